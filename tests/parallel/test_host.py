"""What training sets for its process."""

import os
import subprocess
import sys

import pytest

# An intermediate array of 256 MB, as a step has many; its pages are 4 kB.
STEPS = """
import resource
import jax, jax.numpy as jnp
from vit_jax.parallel.host import keep_freed_memory
keep_freed_memory()
x = jnp.ones((8192, 8))
step = jax.jit(lambda x: (x @ x.T).max())
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_step_on_the_cpu_finds_the_memory_of_the_one_before():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": ""}
    result = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True)
    first, *_, last = map(int, result.stdout.split())
    assert first > 2**15 > 2**11 > last


def test_memory_is_no_more_than_what_this_process_may_have():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "from vit_jax.parallel.host import host_memory\n"
        "limit, free = host_memory(); print(0 < free <= limit <= 2**33)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == "True\n", out.stderr
