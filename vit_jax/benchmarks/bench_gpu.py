"""Benchmarks a GPU within minutes, the most important measurements first; saves each result.

Several training steps are timed together, and the host waits only for the last step, as in a
training loop. Measurements of our step and of timm's step alternate. timm's step runs in a separate
process, and both steps are compiled at the same time.
"""

import contextlib
import gzip
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.bench_train import compile_ours, fast_dtype, timm_step
from vit_jax.benchmarks.figures import facts, write_record
from vit_jax.errors import UserError, nearest
from vit_jax.models import attention, create_model, model_card, vit
from vit_jax.models.layers import placing
from vit_jax.models.model_card import training_flops
from vit_jax.parallel.chips import GIB, peak_flops
from vit_jax.runs.memory_check import program_memory

SECONDS, TURNS = 2.0, 3  # Duration of a turn, and number of turns of each program.
PARTS = ("machine", "train", "parity", "attention")
# Batch size for each model and image size. The batches are large enough to use an H100 fully, but
# do not fill the H100's memory.
TRAINED = {("ViT-B/16", 224): 128, ("ViT-S/16", 224): 256, ("ViT-L/16", 224): 64}
TRAINED |= {("ViT-B/16", 384): 48, ("ConvNeXt-T", 224): 128, ("Swin-T", 224): 128}
ATTENDED = ((128, 197, 12, 64), (48, 577, 12, 64))  # Batch, tokens, heads, head_dim.
ATTENTIONS = ("cudnn", "xla")


class Program(NamedTuple):
    """A compiled program that is ready to run."""

    run: Callable[[int], None]  # Runs a number of steps, and waits for their end.
    facts: dict[str, Any]
    text: str = ""  # HLO.


class Stopwatch:
    """The benchmark's time limit, and the results so far."""

    def __init__(self, minutes: float, out: str | None):
        self.ends = time.perf_counter() + 60 * minutes
        self.out = Path(out) if out else None
        self.conditions, self.figures = facts(), dict[str, dict[str, Any]]()

    def row(self, name: str, **figures: Any) -> None:
        """Prints the results of one measurement as JSON, and writes all results to gpu.json."""
        left = round(self.ends - time.perf_counter())
        print(json.dumps({"name": name, "seconds_left": left, **figures}), flush=True)
        self.figures[name] = figures
        if self.out:
            write_record(self.out, "gpu", self.figures, self.conditions, complete=False)


def measure(
    minutes: float,
    out: str | None = None,
    parts: Sequence[str] = (),
    models: Sequence[str] = (),
    images: int | None = None,
    image_size: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Prints a JSON line for each result, and writes it to gpu.json in `out`; returns all results.

    Args:
      minutes: time limit; no measurement starts after it.
      out: folder of gpu.json; None: the file is not written.
      parts: names of the benchmarks to run, from `PARTS`; empty: all of `PARTS`, in its order.
      models: models to time; empty: the models in the table `TRAINED`.
      images: batch size of all models; None: as in `TRAINED`.
      image_size: image size of all models; None: as in `TRAINED`.

    Raises:
      UserError: a name in `parts` is unknown.
    """
    for name in set(parts) - set(PARTS):
        raise UserError(f"unknown part {name!r} (--parts); {nearest(name, PARTS)}")
    trained = trained_models(models, images, image_size)
    parity = partial(compare_with_cpu, models[0] if models else "ViT-S/16", image_size or 224)
    calls: dict[str, list[Callable[[Stopwatch], None]]] = {
        "machine": [machine],
        "train": [partial(time_training, *key, count) for key, count in trained.items()],
        "parity": [parity],
        "attention": [partial(time_attention, shape) for shape in ATTENDED],
    }
    stopwatch = Stopwatch(minutes, out)
    for name, call in ((part, call) for part in parts or PARTS for call in calls[part]):
        if time.perf_counter() > stopwatch.ends:
            stopwatch.row("not finished", error=f"{name} and later parts: no time left (--minutes)")
            break
        try:
            call(stopwatch)
        except (UserError, RuntimeError) as error:  # Continue with other measurements.
            stopwatch.row(f"{name}: failed", error=f"{type(error).__name__}: {error}"[:2000])
    return stopwatch.figures


def trained_models(
    models: Sequence[str], images: int | None, image_size: int | None
) -> dict[tuple[str, int], int]:
    """Returns the batch size of each (model, image size) that `measure` times.

    If `models` is empty, these are the models of `TRAINED`. `images` (the batch size) and
    `image_size` apply to all models; None: as in `TRAINED`.
    """
    trained = {key: count for key, count in TRAINED.items() if not models or key[0] in models}
    known = {model for model, _ in TRAINED}
    trained |= {(model, 224): 64 for model in models if model not in known}
    return {(name, image_size or size): images or n for (name, size), n in trained.items()}


def machine(stopwatch: Stopwatch) -> None:
    """Logs device and versions, and measures bfloat16 matmul FLOP/s and memory bandwidth."""
    side = 8192 if jax.default_backend() == "gpu" else 256
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    large = jnp.zeros((side * side * 16,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1).lower(large).compile()
    stopwatch.row(
        "machine",
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        flax=flax.__version__,
        compute_capability=getattr(jax.devices()[0], "compute_capability", None),
        platform_version=jax.devices()[0].client.platform_version,
        product_tflops=2 * side**3 / timed(lambda: product(a, b)) / 1e12,
        copy_terabytes=2 * large.nbytes / timed(lambda: copy(large)) / 1e12,
    )


def timed(call: Callable[[], Any]) -> float:
    """Returns the seconds of a call: the median of three measurements, each of 20 calls."""
    jax.block_until_ready(call())
    found = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(20):
            out = call()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - started) / 20)
    return statistics.median(found)


def is_vit(model: str) -> bool:
    """Returns True for a ViT, whose attention can be computed by cuDNN or by XLA."""
    return vit.FAMILY.parse(model) is not None


@contextlib.contextmanager
def attending(name: str) -> Iterator[None]:
    """Sets the implementation of attention for programs that are traced while the context is open.

    Args:
      name: one of `ATTENTIONS`.
    """
    with contextlib.ExitStack() as stack:
        for module in (attention, vit) if name == "xla" else ():
            stack.enter_context(mock.patch.object(module, "cudnn_takes", lambda *_: False))
        yield


def time_attention(shape: tuple[int, int, int, int], stopwatch: Stopwatch) -> None:
    """Measures the duration of attention in milliseconds: forward, and forward with backward pass.

    Args:
      shape: batch, tokens, heads and head_dim.
    """
    if jax.default_backend() == "cpu":
        shape = (1, 16, *shape[2:])  # Tests run the benchmark on a CPU: one image, few tokens.
    inputs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3)]
    found = {}

    def loss(*inputs):
        return attention.attend(*inputs).astype(jnp.float32).sum()

    for name in ATTENTIONS:
        jax.clear_caches()  # JAX would reuse the trace with the previous implementation.
        functions = attention.attend, jax.grad(loss, (0, 1, 2))
        with attending(name):
            programs = [jax.jit(function).lower(*inputs).compile() for function in functions]
        found[name] = [1e3 * timed(partial(program, *inputs)) for program in programs]
    stopwatch.row(f"attention {shape}", milliseconds_forward_and_both=found)


def compare_with_cpu(name: str, image_size: int, stopwatch: Stopwatch) -> None:
    """Measures the numerical errors of a model's logits, loss and gradients on the GPU.

    The reference is the same computation in float32 on the CPU. An error is
    ||x - reference|| / ||reference||.
    """
    shape = (8, image_size, image_size, 3)
    images = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    cpu, here = jax.devices("cpu")[0], jax.devices()[0]
    reference: dict[str, np.ndarray] = {}
    for row, device, dtype, precision, attends in (
        ("cpu float32", cpu, "float32", "highest", "xla"),
        ("bfloat16, cudnn", here, "bfloat16", None, "cudnn"),
        ("bfloat16, xla", here, "bfloat16", None, "xla"),
        ("float32", here, "float32", None, "xla"),
        ("cpu bfloat16", cpu, "bfloat16", "highest", "xla"),
        ("float32, highest precision", here, "float32", "highest", "xla"),
    ):
        precise = jax.default_matmul_precision(precision)
        with attending(attends), jax.default_device(device), precise:
            found = _outputs(name, dtype, images, device.platform)
        reference, norm = reference or found, np.linalg.norm
        errors = {key: float(norm(found[key] - x) / norm(x)) for key, x in reference.items()}
        stopwatch.row(f"parity {name}, {row}", relative_errors=errors)


def _outputs(name: str, dtype: str, images: np.ndarray, platform: str) -> dict[str, np.ndarray]:
    scanned = {"scan": True} if is_vit(name) else {}  # Compiles faster.
    sizes = dict(num_classes=other_projects.CLASSES, image_size=images.shape[1])
    model = create_model(name, dtype=dtype, **sizes, **scanned)
    # A new model's head is zero, so the gradients of all other layers would be zero. Therefore the
    # head gets random values.
    head = model.head.kernel
    head.set_value(0.02 * jax.random.normal(jax.random.key(1), head.shape, head.dtype))
    graphdef, params = nnx.split(model)

    def loss(params):
        with placing(lambda _, x: x, platform):
            logits = nnx.merge(graphdef, params)(images).astype(jnp.float32)
        labels = np.arange(len(images))
        return -jax.nn.log_softmax(logits)[labels, labels].mean(), logits

    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    flat = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(gradient)])
    found = {"logits": logits, "loss": value, "gradient": flat}
    return {key: np.asarray(x, np.float64) for key, x in found.items()}


def time_training(model: str, image_size: int, images: int, stopwatch: Stopwatch) -> None:
    """Times our training step with each attention implementation (cuDNN, XLA), and timm's step."""
    with timm_process(model, images, image_size) as timm:
        programs = {}
        for name in ATTENTIONS if is_vit(model) else ("cudnn",):
            programs[name] = our_step(model, image_size, images, name)
            if stopwatch.out and (model, image_size) == next(iter(TRAINED)):
                keep_profile(stopwatch, name, programs[name])
        race(stopwatch, model, image_size, images, programs, timm)


def our_step(model: str, image_size: int, images: int, attends: str) -> Program:
    """Compiles our training step."""
    config = other_projects.our_config(model, image_size, fast_dtype(), images)
    with attending(attends):
        compiled, seconds, step = compile_ours(config)
    memory = round(program_memory(compiled) / GIB, 2)
    facts = {"compile_seconds": round(seconds, 1), "memory_gib": memory}

    def run(steps: int) -> None:
        for _ in range(steps):
            out = step()
        jax.block_until_ready(out)

    run(2)
    return Program(run, facts, compiled.as_text())


def race(
    stopwatch: Stopwatch,
    model: str,
    image_size: int,
    images: int,
    programs: Mapping[str, Program],
    timm: Program,
) -> None:
    """Times our training steps and timm's in turns, and logs the results.

    timm's step runs in a separate process. If this process has ended with an error, the results do
    not contain timm.

    Args:
      programs: our step with each implementation of attention, by name.
    """
    programs = programs | {"timm": timm}
    times = time_in_turns(programs)
    if sum(map(len, times.values())) < TURNS * len(programs):
        timm.facts.setdefault("error", "its process ended")
    medians = {key: statistics.median(x) for key, x in times.items()}
    least = training_flops(images * model_card(model, image_size=image_size).multiply_adds)
    peak = peak_flops(jax.devices()[0].device_kind)
    stopwatch.row(
        f"train {model} {image_size}, {images} images",
        milliseconds={key: [round(1e3 * t, 2) for t in x] for key, x in times.items()},
        images_per_second={key: round(images / x, 1) for key, x in medians.items()},
        mfu={key: round(least / x / peak, 4) if peak else None for key, x in medians.items()},
        speed_of_timms={
            key: round(medians["timm"] / x, 3) for key, x in medians.items() if "timm" in medians
        },
        facts={key: program.facts for key, program in programs.items()},
    )


def time_in_turns(programs: Mapping[str, Program]) -> dict[str, list[float]]:
    """Times the programs in turns; returns the seconds per step in each turn, by program.

    If the process of a program ends early, the result does not contain the later turns of this
    program.
    """
    times: dict[str, list[float]] = {key: [] for key in programs}
    for _ in range(TURNS):
        for key, program in programs.items():
            with contextlib.suppress(EOFError, OSError):
                times[key].append(seconds_of_step(program))
    return {key: seconds for key, seconds in times.items() if seconds}


def seconds_of_step(program: Program) -> float:
    """Returns the mean duration of a step in seconds.

    Steps are run for about `SECONDS` seconds.
    """
    started = time.perf_counter()
    program.run(1)
    steps = max(1, round(SECONDS / (time.perf_counter() - started)))
    started = time.perf_counter()
    program.run(steps)
    return (time.perf_counter() - started) / steps


@contextlib.contextmanager
def timm_process(model: str, images: int, image_size: int) -> Iterator[Program]:
    """Yields timm's training step, which is compiled and run in a separate process.

    The compilation starts at once. The first call of the yielded `Program.run` waits until the step
    is compiled.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, model, images, image_size)
    with mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"):
        process = context.Process(target=_train_timm, args=arguments, daemon=True)
        process.start()
    theirs.close()
    facts: dict[str, Any] = {}

    def run(steps: int) -> None:
        if not facts:
            facts.update(ours.recv())
        ours.send(steps)
        ours.recv()

    try:
        yield Program(run, facts)
    finally:
        process.kill()
        process.join()


def _train_timm(pipe, model: str, images: int, image_size: int) -> None:
    try:
        name, step = timm_step(model, images, image_size, gpu=True)
    except UserError as error:
        pipe.send({"error": str(error)})
        return
    import torch

    started = time.perf_counter()
    for _ in range(2):
        step().item()
    seconds = time.perf_counter() - started
    facts = {"name": name, "torch": torch.__version__, "compile_seconds": seconds}
    if torch.cuda.is_available():
        facts["memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    pipe.send(facts)
    while True:
        for _ in range(pipe.recv()):
            loss = step()
        loss.item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pipe.send(None)


def keep_profile(stopwatch: Stopwatch, name: str, program: Program) -> None:
    """Profiles a step: writes the duration of each kernel, and the compiled program as text."""
    steps, kernels = 3, Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program.run(steps)
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    for event in line.events if line.name.startswith("Stream") else ():
                        kernels[event.name] += event.duration_ns / steps / 1e6
    longest = dict(kernels.most_common())
    (stopwatch.out / f"kernels-{name}.json").write_text(json.dumps(longest, indent=1))
    with gzip.open(stopwatch.out / f"program-{name}.txt.gz", "wt") as file:
        file.write(program.text)
    stopwatch.row(f"profile {name}", milliseconds=sum(kernels.values()), kernels=len(kernels))
