"""Before anything imports JAX: programs that compile in half the time, whose speed does not matter
here.

They are compiled once for all workers, and for the processes that tests start.
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

# XLA's fusion emitters go through MLIR, which takes a third of the time; from 0.11 there is no
# other way.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
# Splitting a program for several threads costs a tenth of the processor time of compiling it; here
# other tests are run by the other cores.
ONE_THREAD = " --xla_cpu_parallel_codegen_split_count=1"
FAST_COMPILE = "--xla_backend_optimization_level=0" + OLD_EMITTERS + ONE_THREAD
# Where a process computes for a minute, so that code twice as fast is worth its compilation.
SOME_SPEED = "--xla_backend_optimization_level=1" + OLD_EMITTERS + ONE_THREAD
os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)
PROCESSES = Path(__file__).parent / "processes"  # Its settings are of each Python process.
HANG = 600  # Seconds after which a process hangs, however busy the machine is.
if (
    "JAX_COMPILATION_CACHE_DIR" not in os.environ
):  # Set for the workers by the process that starts them.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="vit_jax_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with these folders, and the settings of all processes of the tests."""
    return os.pathsep.join(map(str, (PROCESSES, *folders)))


if str(PROCESSES) not in os.environ.get("PYTHONPATH", ""):  # Else set by the process above.
    os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

SKIPPED = "vit_jax/skipped"  # In pytest's cache: the tests that the last `pytest` skipped.


def pytest_addoption(parser):
    parser.addoption(
        "--rest",
        action="store_true",
        help="run the tests that `pytest` alone leaves out: slow and skipped ones",
    )


def pytest_configure(config):
    if config.option.rest:
        config.option.markexpr = "not study"
    elif not hasattr(config, "workerinput") and hasattr(
        config, "cache"
    ):  # It gets the workers' reports.
        config.pluginmanager.register(SkippedTests(config.cache))


class SkippedTests:
    """Keeps the names of the tests that were skipped when they last ran, for `--rest`."""

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
    """Leaves tests that need PyTorch's libraries, and further variants of `one_variant`, to
    `--rest`.

    Importing these libraries takes long, and much memory.
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
    """Gives back the memory of a file's compiled programs, so that a worker does not grow with
    every file.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        with contextlib.suppress(
            OSError, AttributeError
        ):  # There is no glibc, which keeps what it is given.
            ctypes.CDLL("libc.so.6").malloc_trim(0)


# The PyTorch libraries that are compared with.


@pytest.fixture(scope="session")
def torch():
    """PyTorch; the test is skipped where it is not installed."""
    library = pytest.importorskip("torch")
    library.set_num_threads(1)  # More would spin, on the cores of the other tests.
    name_missing_operators(library)
    return library


@pytest.fixture(scope="session")
def timm(torch):
    """timm; the test is skipped where it is not installed."""
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
    """Transformers; the test is skipped where it is not installed."""
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="session")
def open_clip(torch, timm, transformers):
    """open_clip; the test is skipped where it is not installed."""
    return pytest.importorskip("open_clip")
