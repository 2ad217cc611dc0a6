"""Settings that must be made before JAX is imported, and the fixtures of all tests.

XLA compiles with few optimizations: this halves the compilation time, and the speed of the programs
does not matter in tests. A compilation cache is shared by all workers and by the processes that
tests start.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

import tests.processes.sitecustomize  # noqa: F401

# XLA's fusion emitters use MLIR, which takes a third of the compilation time. From jaxlib 0.11 they
# cannot be switched off.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
# Splitting a program for parallel code generation adds a tenth to the processor time of its
# compilation, and the other cores are busy with other tests.
ONE_THREAD = " --xla_cpu_parallel_codegen_split_count=1"
FAST_COMPILE = "--xla_backend_optimization_level=0" + OLD_EMITTERS + ONE_THREAD
# For processes that compute for a minute: code that is twice as fast is worth its compilation time.
SOME_SPEED = "--xla_backend_optimization_level=1" + OLD_EMITTERS + ONE_THREAD
os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)
# Its sitecustomize.py is imported by every Python process.
PROCESSES = Path(__file__).parent / "processes"
LARGE = 3 << 29  # Bytes. A worker that uses more frees memory after a test file.
HANG = 600  # Seconds. A process that takes longer hangs, even on a busy machine.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # For the workers, the main process has set it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="vit_jax_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def python_path(*folders: Path | str) -> str:
    """Returns a PYTHONPATH of the folder with the settings of test processes and other folders."""
    return os.pathsep.join(map(str, (PROCESSES, *folders)))


# Otherwise, the parent process has set it.
if str(PROCESSES) not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

# Key in pytest's cache: names of the tests that the last `pytest` skipped.
SKIPPED = "vit_jax/skipped"


def pytest_addoption(parser):
    parser.addoption(
        "--rest",
        action="store_true",
        help="run the tests that `pytest` alone leaves out: slow and skipped ones",
    )


def pytest_configure(config):
    if config.option.rest:
        config.option.markexpr = "not study"
    if hasattr(config, "workerinput") or not hasattr(config, "cache"):
        return
    # Only the main process receives the reports of all workers.
    if not config.option.rest:
        config.pluginmanager.register(SkippedTests(config.cache))


class SkippedTests:
    """Stores in pytest's cache which tests were skipped when they last ran, for `--rest`."""

    def __init__(self, cache):
        self.cache, self.names = cache, {*cache.get(SKIPPED, [])}

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.names.add(report.nodeid)
        elif report.when == "call":
            self.names.discard(report.nodeid)

    def pytest_sessionfinish(self):
        self.cache.set(SKIPPED, sorted(self.names))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks two kinds of tests as slow.

    They are tests that use PyTorch's libraries, and all variants but the first of a test with the
    marker `one_variant`.

    `pytest` alone skips slow tests; `--rest` runs them. Importing PyTorch's libraries takes much
    time and memory.
    """
    seen = set()
    for item in items:
        variant = item.get_closest_marker("one_variant") and item.nodeid.split("[")[0]
        if variant in seen or {"torch", "timm", "transformers"} & {*item.fixturenames}:
            item.add_marker("slow")
        elif variant:
            seen.add(variant)
    if config.option.rest:
        skipped = {*config.cache.get(SKIPPED, [])}
        items[:] = [
            item for item in items if item.get_closest_marker("slow") or item.nodeid in skipped
        ]


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees a worker's memory after a test file, if it has grown to `LARGE`.

    Otherwise the compiled programs are kept: small ones, of single operations, are used by many
    files. Objects that are left afterwards live until the end, so they are excluded from garbage
    collection, which would visit all of them each time.
    """
    yield
    if memory_in_use() < LARGE:
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    gc.freeze()
    # Only glibc keeps freed memory and has this function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def memory_in_use() -> int:
    """Returns the resident memory of this process in bytes; on other systems than Linux `LARGE`."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return LARGE
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_collection_finish():
    """Excludes the objects of imported modules and collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


# PyTorch and libraries based on it, whose results are compared with those of vit_jax.


@pytest.fixture(scope="session")
def torch():
    """Returns PyTorch; the test is skipped if it is not installed."""
    library = pytest.importorskip("torch")
    library.set_num_threads(1)  # Idle threads would busy-wait on cores that other tests need.
    name_missing_operators(library)
    return library


@pytest.fixture(scope="session")
def timm(torch):
    """Returns timm; the test is skipped if it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("timm needs torchvision")
    return pytest.importorskip("timm")


def name_missing_operators(torch) -> None:
    """Lets timm and Transformers be imported if torchvision is built for CUDA and torch for CPUs.

    torchvision's compiled operators are missing then. The libraries use none of them, but their
    names must exist.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


@pytest.fixture(scope="session")
def transformers(torch):
    """Returns Transformers; the test is skipped if it is not installed."""
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="session")
def open_clip(torch, timm, transformers):
    """Returns open_clip; the test is skipped if it is not installed."""
    return pytest.importorskip("open_clip")
