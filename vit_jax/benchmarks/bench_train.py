"""Measures the time of our training steps and of training steps of other projects."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.figures import Table
from vit_jax.config import with_values
from vit_jax.errors import UserError
from vit_jax.models import model_card
from vit_jax.models.model_card import training_flops
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB, peak_flops
from vit_jax.parallel.mesh import make_mesh, split_batch
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter
from vit_jax.runs.memory_check import program_memory
from vit_jax.training.objectives import objective_of
from vit_jax.training.program import make_program

PEERS = (*other_projects.PEERS, "timm")
TIMM_SIZES = {"Ti": "tiny", "T": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}
TIMM_SIZES |= {"XL": "xlarge", "XXL": "xxlarge"}


class Runner(NamedTuple):
    """A compiled program that is ready to run."""

    name: str
    compile_seconds: float
    memory: int | None  # Bytes per device: state, batch and temporaries.
    step: Callable[[], None]  # Runs the program once, and waits for its end.


def measure(
    models: Sequence[str],
    images: int,
    image_size: int,
    against: Sequence[str],
    checkouts: str | None,
    dtype: str | None = None,
    turns: int = 5,
    seconds: float = 4.0,
) -> dict[str, dict[str, Any]]:
    """Prints and returns the time of each model's training step, here and in other projects.

    The steps take turns; the results are medians.

    Args:
      images: images per device.
      against: projects to compare with; timm needs no checkout.
      checkouts: folder with the projects' checkouts.
      dtype: dtype of the computation; timm's is fixed. None: float32 on a CPU, bfloat16 on other
        devices.
      seconds: time for which each program runs in a turn.
    """
    share_interpreter()
    keep_freed_memory()
    dtype, batch = dtype or fast_dtype(), images * jax.device_count()
    table = program_table(images, dtype, "step")
    for model in models:
        config = other_projects.our_config(model, image_size, dtype, batch)
        runners = [make_ours(f"{model} {image_size}", config)[0]]
        for peer in against:
            with table.skipping(peer):
                runners += make_others(peer, model, batch, image_size, dtype, checkouts)
        least = training_flops(batch * model_card(model, image_size=image_size).multiply_adds)
        race(table, runners, batch, least, turns, seconds)
    return table.figures


def compare(
    steps: Mapping[str, Mapping[str, Any]],
    models: Sequence[str],
    images: int,
    image_size: int,
    dtype: str | None = None,
    turns: int = 5,
    seconds: float = 4.0,
) -> dict[str, dict[str, Any]]:
    """Compares training steps with different config values: FLOPs and time for each model.

    The steps take turns; the results are medians.

    Args:
      steps: name and changed config values of each step, such as `{"supervised": {}, "mae":
        {"objective.name": "mae"}}`. All steps are compared with the first one.
      images: images per device.
      dtype: dtype of the computation; None: float32 on a CPU, bfloat16 on other devices.
      seconds: time for which each step runs in a turn.
    """
    share_interpreter()
    keep_freed_memory()
    dtype, batch, first = dtype or fast_dtype(), images * jax.device_count(), next(iter(steps))
    print_devices(images, dtype)
    columns = {"compiled GFLOPs an image": ",.1f", f"to {first}": ".2f", "ms a step": ",.1f"}
    table = Table("step", columns | {f"images/s to {first}": ".2f"})
    for model in models:
        runners, flops = [], []
        for name, values in steps.items():
            config = other_projects.our_config(model, image_size, dtype, batch)
            config = with_values(config, values)
            runner, compiled = make_ours(f"{model} {image_size}, {name}", config)
            runners.append(runner)
            flops.append(compiled.cost_analysis()["flops"])
        times = take_turns(runners, turns, seconds)
        for runner, found in zip(runners, flops, strict=True):
            pairs = zip(times[runners[0].name], times[runner.name], strict=True)
            faster = statistics.median(before / own for before, own in pairs)
            milliseconds = 1e3 * statistics.median(times[runner.name])
            table.row(runner.name, found / images / 1e9, found / flops[0], milliseconds, faster)
    return table.figures


def print_devices(images: int, dtype: str) -> None:
    """Prints a line with the devices, the images per device and the dtype of the computation."""
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    print(f"{devices}, {images} images on each, {dtype}\n")


def program_table(images: int, dtype: str, call: str) -> Table:
    """Returns the table to which `race` adds rows; `call` is a program's call, such as `step`."""
    print_devices(images, dtype)
    columns = {"compile, s": ".1f", f"ms a {call}": ",.1f", "images/s": ",.1f", "MFU": ".1%"}
    return Table("program", columns | {"memory, GiB": ".2f", "ours to it: images/s": ".2f"})


def race(
    table: Table, runners: Sequence[Runner], batch: int, least: float, turns: int, seconds: float
) -> None:
    """Measures programs in turns, and adds a row for each to a table.

    Args:
      table: the result of `program_table`.
      runners: the programs; ours is the first.
      batch: number of images that a program processes at once, on all devices.
      least: FLOPs of training on this number of images, from which the MFU is computed.
      seconds: minimum duration of a turn.
    """
    times = take_turns(runners, turns, seconds)
    peak = peak_flops(jax.devices()[0].device_kind)
    for runner in runners:
        second = statistics.median(times[runner.name])
        mfu = least / second / peak / jax.device_count() if peak else "peak not known"
        pairs = zip(times[runner.name], times[runners[0].name], strict=True)
        ratio = None if runner is runners[0] else statistics.median(a / b for a, b in pairs)
        memory = runner.memory and runner.memory / GIB
        speed = runner.compile_seconds, second * 1e3, batch / second
        table.row(runner.name, *speed, mfu, memory, ratio)


def take_turns(runners: Sequence[Runner], turns: int, seconds: float) -> dict[str, list[float]]:
    """Returns the seconds per step of each program in each turn, by the program's name."""
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for runner in runners:
        runner.step()  # The first step is slower.
    for turn in range(turns):
        for runner in runners if turn % 2 else reversed(runners):
            started, steps = time.perf_counter(), 0
            while steps == 0 or time.perf_counter() - started < seconds:
                runner.step()
                steps += 1
            times[runner.name].append((time.perf_counter() - started) / steps)
    return times


def fast_dtype() -> str:
    """Returns the fastest dtype on this machine: float32 on CPUs, bfloat16 on other devices."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def make_ours(name: str, config: RunOptions) -> tuple[Runner, jax.stages.Compiled]:
    """Compiles the config's training step.

    Returns:
      A `Runner`, which runs the step and waits for its end, and the compiled program.
    """
    compiled, seconds, step = compile_ours(config)
    runner = Runner(name, seconds, program_memory(compiled), lambda: jax.block_until_ready(step()))
    return runner, compiled


def compile_ours(config: RunOptions) -> tuple[jax.stages.Compiled, float, Callable[[], Any]]:
    """Compiles the config's training step.

    Returns:
      The compiled program, the duration of the compilation in seconds, and a function that starts
      the next step and returns its results without waiting.
    """
    objective = objective_of(config.objective.name)
    classes = other_projects.CLASSES if objective.labels else objective.outputs(config)
    program = make_program(config, num_classes=classes, steps=10**6, mesh=make_mesh(config.mesh))
    state, metrics = program.initial_state(config.seed), program.initial_metrics()
    images, labels = random_batch(config.batch_size, config.data.image_size, program.mesh)
    data = {"image": images, "labels": labels[:, None]}
    compiled, seconds = compile_timed(program.train_step.lower(state, metrics, data))

    def step():
        nonlocal state
        state, sums = compiled(state, metrics, data)
        return state, sums

    return compiled, seconds, step


def make_others(
    peer: str, model: str, batch: int, image_size: int, dtype: str, checkouts: str | None
) -> list[Runner]:
    """Compiles another project's training step, once for each set of options in `Peer.options`.

    Raises:
      UserError: the checkout does not exist, or the package is not installed.
    """
    if peer == "timm":
        return [make_timm(model, batch, image_size)]
    checkout, mesh = other_projects.find_checkout(peer, checkouts), make_mesh()
    data, runners = random_batch(batch, image_size, mesh), []
    make, sizes = other_projects.make_step, (dtype, image_size, batch, mesh)
    for option, values in other_projects.PEERS[peer].options.items():
        made = make(peer, checkout, model, values, *sizes)
        compiled, seconds = compile_timed(made.run.lower(made.state, *data))
        step = repeated(compiled, made.init(), data)
        runners.append(Runner(f"{peer}, {option}", seconds, program_memory(compiled), step))
    return runners


def repeated(compiled: jax.stages.Compiled, state: dict, data: tuple) -> Callable[[], None]:
    """Returns a function that runs the next training step and waits for its end."""

    def step():
        nonlocal state
        state, loss = compiled(state, *data)
        jax.block_until_ready((state, loss))

    return step


def make_timm(model: str, batch: int, image_size: int) -> Runner:
    """Returns timm's training step. It runs on a GPU if our step does."""
    name, step = timm_step(model, batch, image_size, gpu=jax.default_backend() == "gpu")
    started = time.perf_counter()
    step().item()
    return Runner(name, time.perf_counter() - started, None, lambda: step().item())


def timm_step(model: str, batch: int, image_size: int, gpu: bool) -> tuple[str, Callable[[], Any]]:
    """Returns a title for tables, and a function that starts the next step of timm's model.

    The function returns the loss, a tensor, without waiting for its value. On a GPU the step is
    compiled and in bfloat16, with fused attention.

    Args:
      gpu: True: use the GPU, if PyTorch has one.

    Raises:
      UserError: timm is not installed, or has no such model.
    """
    torch, name, module = timm_model(model, image_size)
    gpu = gpu and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    module = module.to(device)
    if gpu:
        torch.set_float32_matmul_precision("high")
    if gpu and not timm_name(model).startswith("vit"):
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=0.1, fused=gpu)
    shape = (batch, 3, image_size, image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, device=device)
    labels = torch.randint(other_projects.CLASSES, (batch,), device=device)
    forward = torch.compile(module) if gpu else module

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            logits = forward(images.float() / 127.5 - 1)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return name, step


def timm_model(model: str, image_size: int) -> tuple:
    """Returns the module `torch`, a title for tables, and timm's model.

    Raises:
      UserError: timm is not installed, or has no such model.
    """
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torch") is None:
        raise UserError("timm is not installed: pip install timm torch")
    try:
        import timm
        import torch
    except RuntimeError as error:  # Versions of torch and torchvision are incompatible.
        raise UserError(f"timm does not import: {error}") from error

    name = timm_name(model)
    if not timm.is_model(name):
        raise UserError(f"timm has no {model}")
    sized = {} if name.startswith("convnext") else dict(img_size=image_size)
    module = timm.create_model(name, num_classes=other_projects.CLASSES, **sized)
    return torch, f"timm {timm.__version__}, {name}", module


def timm_name(model: str) -> str:
    """Converts the name of our ViT, ConvNeXt or Swin to timm's; timm may not have this model."""
    kind, _, rest = model.partition("-")
    short, _, detail = rest.partition("/")
    size = TIMM_SIZES.get(short, short.lower())
    if kind in ("ConvNeXt", "ConvNeXtV2"):
        return f"{kind.lower()}_{size}"
    if kind == "Swin":  # The name contains window size and image size.
        return f"swin_{size}_patch4_window{'12_384' if detail == 'w12' else '7_224'}"
    if kind == "SwinV2":
        windows = detail.removeprefix("w")
        pixels = {"12": "192", "12to16": "192to256", "12to24": "192to384"}.get(windows, "256")
        return f"swinv2_{size}_window{windows}_{pixels}"
    return f"vit_{size}_patch{detail}_224"


def random_batch(batch: int, image_size: int, mesh) -> tuple[jax.Array, jax.Array]:
    """Returns random images and labels on the devices.

    Images are uint8 `[batch, height, width, 3]`, labels int32 `[batch]`.
    """
    random = np.random.default_rng(0)
    images = random.integers(256, size=(batch, image_size, image_size, 3), dtype=np.uint8)
    labels = random.integers(other_projects.CLASSES, size=batch, dtype=np.int32)
    return jax.device_put((images, labels), split_batch(mesh))


def compile_timed(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    """Compiles a program; returns it and the duration of the compilation in seconds."""
    started = time.perf_counter()
    return lowered.compile(), time.perf_counter() - started
