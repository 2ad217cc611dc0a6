"""Measures this machine: python -m vit_jax.benchmark all --out=DIR.

Prints tables. With --out=DIR, the figures are also written to NAME.json in this folder, with
versions, machine, date and commit.

all: runs the benchmarks below that this machine can run, the most important first, each in its own
  process. Benchmarks with figures in --out that have the same commit, versions, machine and flags
  are not repeated (--again: repeat them). At the end all figures in --out are printed; figures with
  another commit, versions or machine are marked as old. --minutes is the time after which no
  benchmark starts, and --only=NAME,NAME selects benchmarks. Other flags, except --config, apply to
  all benchmarks.
overhead: time of a training step of --config on the host, outside the compiled program.
load: time and memory of `load_model` for a ViT-L/16 of 1.2 GB in each format, compared with reading
  the file.
input: number of training crops that a CPU core makes per second, compared with tf.data, Pillow and
  a plain decode. --host measures only the processor time of the main process, while other
  processes decode.
resume: seconds to the first batch at example 10 and at example 100 million.
saving: training with a checkpoint every 20 steps, compared with training without checkpoints.
fewshot: seconds of the least squares of few-shot evaluation for 1,000 classes and 1,024 features,
  compared with plain NumPy.
memory: memory of the input pipeline over 100,000 batches, drawn to input_memory.png.
inference: images/s of --models at --image_sizes in wall-clock time, compared with other libraries
  (--against=onnxruntime,timm). --largest finds the largest batch that fits into memory, and
  --out=DIR draws a plot, inference.png.
predict: images/s from 1,024 JPEGs in a folder to the five likeliest classes and to features, with
  --models. It is compared with the model alone, and with the same in other libraries
  (--against=onnxruntime,timm).
serve: images/s and latency of a server of --models under 1, 4 and 16 clients, each for --seconds,
  compared with a minimal server with ONNX Runtime (--against=onnxruntime).
train: wall-clock time of training steps of --models, compared with other projects (--against),
  whose checkouts are in the folder --checkouts.
objectives: wall-clock time and compiled FLOPs of training steps of --models: supervised, masked
  patch prediction, masked autoencoder.
depth: wall-clock time and FLOPs of training steps with two kinds of stochastic depth. Either each
  branch drops images independently, or each branch is computed for a random subset of fixed size.
crops: the TPU compiler's estimates for --models. DINO's step is compared with the supervised step,
  and separate passes for crops of each size are compared with one packed pass.
gpu: benchmarks of a GPU, the most important first, within --minutes: training steps compared with
  timm's in PyTorch, attention, agreement with float32 on the CPU. Each result is written to
  gpu.json in the folder --out as soon as it is measured.
tpu: the TPU compiler's estimates for the training step of --models on --slices, compiled on this
  machine's CPU, compared with the compiler's estimates for other projects. A second estimate takes
  for each operation the larger of its schedule and its memory traffic; --operations=10 prints the
  10 most expensive ones.
"""

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

from absl import flags

from vit_jax import command
from vit_jax.config import check
from vit_jax.errors import UserError, nearest
from vit_jax.huge_pages import restart_with_huge_pages

CONFIG = command.define_config("For `overhead`: the job, if not configs/quickstart.py.")
MODELS = flags.DEFINE_list("models", ["ViT-B/16"], "Models that are measured.")
IMAGE_SIZE = flags.DEFINE_integer(
    "image_size", 224, "Their images' height and width.", lower_bound=1
)
IMAGE_SIZES = flags.DEFINE_list(
    "image_sizes", ["224"], "For `inference`, in place of --image_size."
)
IMAGES = flags.DEFINE_integer("images", 64, "Images on each device.", lower_bound=1)
DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "For `train` and `inference`: compute dtype of vit_jax; by default float32 on CPUs, "
    "bfloat16 elsewhere.",
)
LARGEST = flags.DEFINE_bool("largest", False, "For `inference`: also the largest batch that fits.")
MEMORY_GIB = flags.DEFINE_float(
    "memory_gib", None, "For --largest: a device's memory, if not its own.", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "Folder for NAME.json with the figures, and for plots.")
SLICES = flags.DEFINE_list(
    "slices", ["v3:2x2", "v5e:2x2"], "For `tpu` and `crops`: chips and topologies."
)
OPERATIONS = flags.DEFINE_integer(
    "operations", 0, "For `tpu`: most expensive operations to print.", lower_bound=0
)
AGAINST = flags.DEFINE_list(
    "against",
    [],
    "Other projects to compare with: vision_transformer, big_vision; timm by the clock; "
    "onnxruntime, timm.",
)
CHECKOUTS = flags.DEFINE_string("checkouts", None, "The folder with the others' checkouts.")
SECONDS = flags.DEFINE_float(
    "seconds", 60, "For `serve`: duration of each measurement.", lower_bound=1
)
MINUTES = flags.DEFINE_float(
    "minutes",
    None,
    "For `gpu` and `all`: time after which no measurement starts; by default 8, and no limit.",
    lower_bound=0,
)
ONLY = flags.DEFINE_list("only", [], "For `all`: names of benchmarks; by default all.")
AGAIN = flags.DEFINE_bool("again", False, "For `all`: repeat benchmarks with current figures.")
HOST = flags.DEFINE_bool("host", False, "For `input`: measure only the main process.")
PARTS = flags.DEFINE_list("parts", [], "For `gpu`: parts to measure; by default all.")
BENCHMARKS = (
    "all",
    "overhead",
    "load",
    "input",
    "resume",
    "saving",
    "fewshot",
    "memory",
    "inference",
    "predict",
    "serve",
    "train",
    "objectives",
    "depth",
    "crops",
    "gpu",
    "tpu",
)


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments else ""
    if len(arguments) != 1 or name not in BENCHMARKS:
        raise UserError(f"unknown benchmark {name!r}; {nearest(name, BENCHMARKS)}")
    if name in ("tpu", "crops"):
        # This is set before JAX is imported. Otherwise libtpu would search for a TPU.
        os.environ["JAX_PLATFORMS"] = "cpu"
    if name == "all":
        return run_all()
    if name != "tpu":  # The compiler writes no schedules of programs from JAX's cache.
        command.use_compilation_cache()
    benchmark = importlib.import_module(f"vit_jax.benchmarks.bench_{name}")
    if peers := getattr(benchmark, "PEERS", None):
        for peer in set(AGAINST.value) - set(peers):
            raise UserError(f"unknown {peer!r} (--against); {nearest(peer, peers)}")
    arguments_of = ARGUMENTS.get(name, ())
    figures = benchmark.measure(
        **(arguments_of() if callable(arguments_of) else _values(*arguments_of))
    )
    if OUT.value:
        from vit_jax.benchmarks.figures import facts, write_record

        complete = not any("error" in row for row in figures.values())
        write_record(OUT.value, name, figures, facts(), complete)


def run_all() -> None:
    """Runs the benchmark `all` with the flags of the command line."""
    from vit_jax.benchmarks import bench_all

    if not OUT.value:
        raise UserError("benchmark all writes files: give --out=DIR")
    own = (CONFIG.name, OUT.name, MINUTES.name, ONLY.name, AGAIN.name)
    known = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
    bench_all.measure(
        OUT.value,
        minutes=math.inf if MINUTES.value is None else MINUTES.value,
        only=ONLY.value,
        again=AGAIN.value,
        more=[flag.serialize() for flag in known if flag.present and flag.name not in own],
    )


def _of_overhead() -> dict[str, Any]:
    config = CONFIG.value or command.read_config("configs/quickstart.py")
    return dict(config=check(config))


def _of_inference() -> dict[str, Any]:
    plot = str(Path(OUT.value) / "inference.png") if OUT.value else None
    names = ("models", "images", "against", "dtype", "largest", "memory_gib")
    return dict(_values(*names), image_sizes=_image_sizes(), out=plot)


def _of_crops() -> dict[str, Any]:
    configs = {
        name: check(command.read_config(f"configs/dino.py:model={name}")) for name in MODELS.value
    }
    return dict(_values("slices", "images"), configs=configs)


def _of_gpu() -> dict[str, Any]:
    given = [name for name in ("models", "images", "image_size") if flags.FLAGS[name].present]
    minutes = 8 if MINUTES.value is None else MINUTES.value
    return dict(_values("out", "parts", *given), minutes=minutes)


def _of_prediction() -> dict[str, Any]:
    images = IMAGES.value if flags.FLAGS["images"].present else None
    return dict(_values("models", "against"), images=images)


STEPS = ("models", "images", "image_size")
# Maps a benchmark to the flags that are arguments of its `measure`, or to a function that reads the
# flags and returns these arguments. Benchmarks that are not listed have no arguments.
ARGUMENTS = {
    "overhead": _of_overhead,
    "input": ("host",),
    "memory": ("out",),
    "inference": _of_inference,
    "train": (*STEPS, "against", "checkouts", "dtype"),
    "tpu": (*STEPS, "against", "checkouts", "slices", "operations"),
    "objectives": (*STEPS, "dtype"),
    "depth": (*STEPS, "dtype"),
    "crops": _of_crops,
    "gpu": _of_gpu,
    "serve": ("models", "image_size", "seconds", "against"),
    "predict": _of_prediction,
}


def _values(*names: str) -> dict[str, Any]:
    """Returns the values of flags by name."""
    return {name: flags.FLAGS[name].value for name in names}


def _image_sizes() -> list[int]:
    sizes = IMAGE_SIZES.value
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise UserError(
            f"--image_sizes={','.join(sizes)} is not a list of sizes in pixels, such as 224,384"
        )
    return [int(size) for size in sizes]


if __name__ == "__main__":
    restart_with_huge_pages()
    command.run(main)
