"""Measures inference speed, and the largest batch that fits into a device's memory.

The inference speed of our models is compared with the speed in other libraries. Figure 12 of the
ViT paper shows inference speed and largest batch.
"""

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.bench_train import (
    Runner,
    compile_timed,
    fast_dtype,
    program_table,
    race,
    random_batch,
    timm_model,
)
from vit_jax.benchmarks.figures import Table
from vit_jax.errors import UserError
from vit_jax.models import model_card
from vit_jax.parallel.chips import GIB
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.process_settings import keep_freed_memory
from vit_jax.runs.memory_check import program_memory
from vit_jax.training.program import abstract_batch, make_program
from vit_jax.training.step import make_forward


def measure(
    models: Sequence[str],
    images: int,
    image_sizes: Sequence[int],
    against: Sequence[str],
    dtype: str | None = None,
    largest: bool = False,
    memory_gib: float | None = None,
    out: str | None = None,
    turns: int = 5,
    seconds: float = 4.0,
) -> dict[str, dict[str, Any]]:
    """Prints and returns the images/s of our models, and of the same models in other libraries.

    All programs compute logits from uint8 images. They run in turns; the results are medians.

    Args:
      images: batch size per device.
      against: libraries in `PEERS` to compare with.
      dtype: dtype of our computation. None: float32 on a CPU, bfloat16 on other devices, as in the
        other libraries.
      largest: also print the largest batch that fits on a device.
      memory_gib: memory limit for `largest`; None: the device's memory.
      seconds: time for which each program runs in a turn.

    Raises:
      UserError: a model is unknown, an image size is not divisible by its patch size, or the
        device's memory is unknown.
    """
    classes, pairs = other_projects.CLASSES, itertools.product(models, image_sizes)
    cards = {(x, size): model_card(x, image_size=size, num_classes=classes) for x, size in pairs}
    keep_freed_memory()
    limit = memory_limit(memory_gib) if largest else None
    dtype, batch = dtype or fast_dtype(), images * jax.device_count()
    table = program_table(images, dtype, "batch")
    speeds: dict[str, dict[int, float]] = {}  # Keyed by program and image size.
    for (model, size), card in cards.items():
        runners = {model: make_ours(model, batch, size, dtype)}
        for peer in against:
            with table.skipping(peer):
                runners[f"{model}, {peer}"] = PEERS[peer](model, batch, size)
        race(table, [*runners.values()], batch, 2 * batch * card.multiply_adds, turns, seconds)
        for line, runner in runners.items():
            speeds.setdefault(line, {})[size] = table.figures[runner.name]["images/s"]
    plots = {"images/s": speeds}
    if limit:
        plots["largest batch on a device"] = print_largest_batches(table, [*cards], limit, dtype)
    if out:
        draw(plots, Path(out))
        print(f"\ndrawn: {out}")
    return table.figures


def print_largest_batches(
    table: Table, models: Sequence[tuple[str, int]], limit: int, dtype: str
) -> dict[str, dict[int, int]]:
    """Prints and returns the largest batch on a device, by model and image size.

    Args:
      table: the table of inference speed, whose figures also contain the results.
      models: pairs of a model's name and its image size.
      limit: memory of the device in bytes.
    """
    print()
    column = f"images on a device, the most that fit into {limit / GIB:.2f} GiB"
    table = Table("model", {column: ",d"}, table.figures)
    batches: dict[str, dict[int, int]] = {}
    for model, size in models:
        fitting = largest_batch(
            lambda b, m=model, s=size: program_memory(compile_ours(m, b, s, dtype)), limit
        )
        batches.setdefault(model, {})[size] = fitting
        table.row(f"{model} {size}", fitting)
    return batches


def lower_ours(
    model: str, batch: int, image_size: int, dtype: str, devices: Sequence[jax.Device] | None = None
):
    """Lowers the inference of a model, without allocating memory for parameters.

    Args:
      devices: devices to compile for; None: the devices of this machine.

    Returns:
      The result of `make_program`, in which the parameters are only shapes and dtypes, and the
      lowered forward pass.
    """
    options = other_projects.our_config(model, image_size, dtype, batch)
    classes, mesh = other_projects.CLASSES, make_mesh(options.mesh, devices)
    program = make_program(options, num_classes=classes, steps=10**6, mesh=mesh)
    params = program.state["params"]
    places = jax.tree.map(lambda x: x.sharding, params)
    forward = make_forward(program.graphdef, program.mesh, places)
    return program, forward.lower(params, {"image": abstract_batch(options, program.mesh)["image"]})


def compile_ours(model: str, batch: int, image_size: int, dtype: str) -> jax.stages.Compiled:
    """Compiles inference with `batch` images on each device, without allocating memory."""
    return lower_ours(model, batch * jax.device_count(), image_size, dtype)[1].compile()


def make_ours(model: str, batch: int, image_size: int, dtype: str) -> Runner:
    """Compiles our model's inference on random images, with random parameters."""
    program, lowered = lower_ours(model, batch, image_size, dtype)
    compiled, seconds = compile_timed(lowered)
    params = program.initial_state(0)["params"]
    data = {"image": random_batch(batch, image_size, program.mesh)[0]}

    def step():
        jax.block_until_ready(compiled(params, data))

    return Runner(f"{model} {image_size}", seconds, program_memory(compiled), step)


def make_timm(model: str, batch: int, image_size: int) -> Runner:
    """Prepares timm's model for inference in PyTorch. On a GPU it is compiled, and in bfloat16."""
    torch, name, module = timm_model(model, image_size)
    device, dtype = timm_device(torch)
    module = module.eval().to(device, dtype)
    images = torch.from_numpy(random_images(batch, image_size)).to(device)
    started = time.perf_counter()
    forward = module if device == "cpu" else torch.compile(module)

    def step():
        with torch.inference_mode():
            forward(images.to(dtype) / 127.5 - 1).cpu()

    step()
    return Runner(name, time.perf_counter() - started, None, step)


def timm_device(torch) -> tuple[str, Any]:
    """Returns PyTorch's device and dtype for inference: a GPU in bfloat16 if JAX also uses one."""
    gpu = torch.cuda.is_available() and jax.default_backend() == "gpu"
    return ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)


def make_onnxruntime(model: str, batch: int, image_size: int) -> Runner:
    """Prepares timm's model for inference in ONNX Runtime, with one thread per core."""
    started = time.perf_counter()
    name, run = export_to_onnxruntime(model, batch, image_size)
    images = random_images(batch, image_size)
    return Runner(name, time.perf_counter() - started, None, lambda: run(images))


def export_to_onnxruntime(
    model: str, batch: int, image_size: int, features: bool = False
) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """Exports timm's model with PyTorch to ONNX Runtime, with one thread per core.

    Args:
      features: True: the output is the input of the head instead of logits.

    Returns:
      A title for tables, and a function from images to the output. The images are uint8 `[batch,
      channels, height, width]`.

    Raises:
      UserError: a package is not installed, timm has no such model, or JAX does not use the CPU.
    """
    for package in ("onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            command = "pip install onnxruntime onnxscript timm torch"
            raise UserError(f"{package} is not installed: {command}")
    if jax.default_backend() != "cpu":
        raise UserError("ONNX Runtime is measured on CPUs only: JAX_PLATFORMS=cpu")
    torch, name, module = timm_model(model, image_size)
    import onnxruntime

    if features:
        module.reset_classifier(0)

    class FromBytes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = module.eval()

        def forward(self, images):
            return self.model(images.float() / 127.5 - 1)

    images = torch.from_numpy(random_images(batch, image_size))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(FromBytes().eval(), (images,), path, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    title = f"onnxruntime {onnxruntime.__version__}, {name.split(', ')[1]}"
    return title, lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]


PEERS = {"onnxruntime": make_onnxruntime, "timm": make_timm}


def random_images(batch: int, image_size: int) -> np.ndarray:
    """Returns random images in PyTorch's layout, uint8 `[batch, channels, height, width]`."""
    shape = (batch, 3, image_size, image_size)
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


def memory_limit(gib: float | None) -> float:
    """Returns the memory limit of a program on a device, in bytes.

    Raises:
      UserError: the device does not report its memory.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    if gib is None and "bytes_limit" not in statistics:
        raise UserError("the memory of this device is unknown: give --memory_gib for --largest")
    return statistics["bytes_limit"] if gib is None else gib * GIB


def largest_batch(memory: Callable[[int], int], limit: float) -> int:
    """Returns the largest batch size that fits into `limit` bytes; 0 if a single image does not.

    It is found by doubling and bisection, with a relative precision of 1/32. `memory` returns the
    bytes that a batch size needs.
    """

    def fits(images):
        try:
            return memory(images) <= limit
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return False

    most, least_unfit = 0, 1
    while fits(least_unfit):
        most, least_unfit = least_unfit, 2 * least_unfit
    while least_unfit - most > max(1, most // 32):
        middle = (most + least_unfit) // 2
        most, least_unfit = (middle, least_unfit) if fits(middle) else (most, middle)
    return most


def draw(panels: dict[str, dict[str, dict[int, float]]], out: Path) -> None:
    """Draws a panel for each quantity; `panels` are values by quantity, program and image size.

    The x-axis is the image size. A panel contains a line for each program.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    size = dict(figsize=(5.5 * len(panels), 4), constrained_layout=True)
    figure, plots = plt.subplots(1, len(panels), squeeze=False, **size)
    for plot, (label, lines) in zip(plots[0], panels.items(), strict=True):
        for name, points in lines.items():
            style = "x--" if ", " in name else "o-"
            plot.plot(*zip(*sorted(points.items()), strict=True), style, label=name)
        sizes = sorted({size for points in lines.values() for size in points})
        plot.set(yscale="log", xlabel="image size, pixels", ylabel=label)
        plot.set_xticks(sizes, map(str, sizes))
        plot.grid(alpha=0.3)
        plot.legend(fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
