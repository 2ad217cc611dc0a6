"""Settings of every Python process of the tests: Python imports this file when a process starts.

`tests/conftest.py` puts this folder into PYTHONPATH.
"""

import gc

# Tracing creates many objects that live long. With Python's default thresholds, garbage collection
# takes 6 to 9 % of a process's time.
gc.set_threshold(50_000, 20, 50)
