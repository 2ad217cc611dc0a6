"""Before anything imports JAX: programs that compile in half the time, whose speed does not matter here."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
