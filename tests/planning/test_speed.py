"""The compiled program for TPUs is not slower or larger than reported in docs/measurements.md."""

import importlib.metadata
import importlib.util

import pytest

from vit_jax.benchmarks import other_projects
from vit_jax.config import with_values
from vit_jax.planning.compile import compile_step, find_slice
from vit_jax.planning.hlo import total

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
    ),
]
# Values of one layer that is repeated, the last layer and everything outside of layers, with jax
# 0.10.2 and libtpu 0.0.52. Other versions of the compiler give other values.
VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.52"}
CYCLES, TEMPORARIES, SENT = 20_052_271, 456_907_776, 32_923_560


@pytest.fixture(scope="module")
def step():
    """Returns the step of two layers of ViT-B/16 with 64 images on each of 8 TPU v3 cores."""
    for name, version in VERSIONS.items():
        if importlib.metadata.version(name) != version:
            pytest.skip(f"the figures are of {name} {version}")
    config = other_projects.our_config("ViT-B/16", 224, "bfloat16", batch_size=8 * 64)
    config = with_values(config, {"model.depth": 2})
    return compile_step(config, find_slice("v3", "2x2"), other_projects.CLASSES, steps=10**6)


def test_cycles_of_b16_have_not_risen(step):
    assert total(step.operations, "cycles") < 1.02 * CYCLES


def test_temporaries_of_b16_have_not_risen(step):
    assert step.memory.temporaries < 1.02 * TEMPORARIES


def test_bytes_sent_of_b16_have_not_risen(step):
    assert total(step.operations, "sent") < 1.02 * SENT
