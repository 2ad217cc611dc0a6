"""Settings of a training process: memory and huge pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A step with an intermediate array of 256 MB, in pages of 4 kB. Without the barrier, the compiler
# of JAX 0.12 would fuse both operations, and there would be no such array.
STEPS = """
import resource
import jax, jax.numpy as jnp
from vit_jax.parallel.process_settings import keep_freed_memory
KEEP
x = jnp.ones((8192, 8))
step = jax.jit(lambda x: jax.lax.optimization_barrier(x @ x.T).max())
for _ in range(COUNT):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(setting: str, steps: int) -> list[int]:
    """Returns the number of new memory pages in each step."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": ""}
    code = STEPS.replace("KEEP", setting).replace("COUNT", str(steps))
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    return [*map(int, result.stdout.split())]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_step_on_the_cpu_reuses_the_memory_of_the_previous_one():
    assert min(new_pages("", steps=3)) > 2**15
    # A step may start before the memory of the previous one is free. It then allocates another
    # block.
    assert sum(pages < 2**11 for pages in new_pages("keep_freed_memory()", steps=24)[12:]) > 6


def test_host_memory_is_within_the_limit_of_this_process():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "from vit_jax.parallel.process_settings import host_memory\n"
        "limit, free = host_memory(); print(0 < free <= limit <= 2**33)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == "True\n", out.stderr


# Allocates a block of 64 MB, and prints the size of its huge pages. Child processes do not inherit
# the setting.
HUGE = """
import ctypes, os, re, subprocess, sys
from vit_jax.huge_pages import restart_with_huge_pages
CALL
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
libc.memset(libc.malloc(2**26), 1, 2**26)
rollup = open("/proc/self/smaps_rollup").read()
print(re.search(r"AnonHugePages: *([0-9]+)", rollup)[1], os.environ.get("GLIBC_TUNABLES"), *sys.argv)
"""


def huge_kilobytes(call: str, **environment: str) -> tuple[int, str, str]:
    """Returns kilobytes of huge pages, GLIBC_TUNABLES for child processes, and the arguments."""
    result = subprocess.run(
        [sys.executable, "-c", HUGE.replace("CALL", call), "an argument"],
        env={key: x for key, x in os.environ.items() if key != "GLIBC_TUNABLES"} | environment,
        capture_output=True,
        text=True,
    )
    pages, tunables, *arguments = result.stdout.split(maxsplit=2)
    return int(pages), tunables, *arguments


def gives_huge_pages_on_request() -> bool:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return mode.exists() and "[madvise]" in mode.read_text()


@pytest.mark.skipif(not gives_huge_pages_on_request(), reason="the system gives none on request")
def test_a_restarted_process_has_huge_pages_and_its_arguments_and_its_children_have_neither():
    call = "restart_with_huge_pages()"
    others = "glibc.malloc.perturb=0"
    assert huge_kilobytes("", JAX_PLATFORMS="cpu")[0] < 2**12
    assert huge_kilobytes(call, JAX_PLATFORMS="cuda")[0] < 2**12
    pages, tunables, arguments = huge_kilobytes(call, JAX_PLATFORMS="cpu", GLIBC_TUNABLES=others)
    # The block has 2**16 kilobytes. Fewer are in huge pages if the memory is fragmented.
    assert pages > 2**12
    assert (tunables, arguments) == (others, "-c an argument\n")
