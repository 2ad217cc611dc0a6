"""Options of a run: each is declared once, with default, rule and help text.

`RunOptions` (`run.py`) has a section for each part of a run. A model's arguments are in `model.py`.
No module here imports JAX, so that `--help` and errors in a config take less than a second.
"""
