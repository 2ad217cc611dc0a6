"""Measures this machine: python -m vit_jax.benchmark overhead

overhead: host time of a training step of --config, outside the compiled program.
load: time and memory of `load_model` for a ViT-L/16 of 1.2 GB in each format, beside reading the file.
input: images/s that a core turns into training crops, beside tf.data, Pillow and a plain decode.
resume: seconds to the first batch at example 10 and at example 100 million.
saving: training with a checkpoint every 20 steps, beside none.
fewshot: seconds of few-shot's least squares for 1,000 classes and 1,024 features, beside plain NumPy.
memory: memory of the input pipeline over 100,000 batches, drawn to input_memory.png.
inference: images/s of --models over --image_sizes by the clock, beside others (--against=onnxruntime,timm),
  the largest batch that fits (--largest), and a plot of them (--out=FILE.png).
predict: images/s of --models over 2,000 JPEGs in a folder, beside the plain model.
serve: images/s and waiting time of a server of --models under 1, 4 and 16 clients, each for --seconds.
train: training steps of --models by the clock, beside others' code (--against) from checkouts in the
  folder --checkouts.
objectives: training steps of --models by the clock and by their compiled FLOPs: supervised, masked patch
  prediction, masked autoencoder.
depth: the same of stochastic depth, each image by chance and of a drawn subset alone.
crops: what the TPU compiler estimates of DINO's step of --models beside the supervised one, and of a pass for
  crops of each size beside one packed pass.
tpu: what the TPU compiler estimates of the training step of --models on --slices, here on the CPU, beside
  others' likewise.
"""

import importlib
import os

from absl import flags

from vit_jax import command
from vit_jax.config import check
from vit_jax.errors import UserError, nearest

CONFIG = command.define_config("For `overhead`: the job, if not configs/quickstart.py.")
MODELS = flags.DEFINE_list("models", ["ViT-B/16"], "Models that are measured.")
IMAGE_SIZE = flags.DEFINE_integer("image_size", 224, "Their images' height and width.", lower_bound=1)
IMAGE_SIZES = flags.DEFINE_list("image_sizes", ["224"], "For `inference`, in place of --image_size.")
IMAGES = flags.DEFINE_integer("images", 64, "Images on each device.", lower_bound=1)
DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "For `train` and `inference`: what ours computes in; without it float32 on CPUs, bfloat16 elsewhere.",
)
LARGEST = flags.DEFINE_bool("largest", False, "For `inference`: also the largest batch that fits.")
MEMORY_GIB = flags.DEFINE_float(
    "memory_gib", None, "For --largest: a device's memory, if not its own.", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "For `inference`: the plot's file, such as inference.png.")
SLICES = flags.DEFINE_list("slices", ["v3:2x2", "v5e:2x2"], "For `tpu` and `crops`: chips and topologies.")
AGAINST = flags.DEFINE_list(
    "against",
    [],
    "Others to measure beside ours: vision_transformer, big_vision; timm by the clock; onnxruntime, timm.",
)
CHECKOUTS = flags.DEFINE_string("checkouts", None, "The folder with the others' checkouts.")
SECONDS = flags.DEFINE_float("seconds", 60, "For `serve`: of each figure.", lower_bound=1)
BENCHMARKS = (
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
    "tpu",
)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        given = arguments[0] if arguments else ""
        raise UserError(f"unknown benchmark {given!r}; {nearest(given, BENCHMARKS)}")
    if arguments[0] in ("tpu", "crops"):
        os.environ["JAX_PLATFORMS"] = (
            "cpu"  # Before JAX is imported: the compiler's library would look for a TPU.
        )
    command.use_compilation_cache()
    benchmark = importlib.import_module(f"vit_jax.benchmarks.bench_{arguments[0]}")
    if arguments[0] == "overhead":
        config = CONFIG.value or command.read_config("configs/quickstart.py")
        check(config)
        benchmark.measure(config)
    elif arguments[0] in ("inference", "train", "tpu"):
        for peer in set(AGAINST.value) - set(benchmark.PEERS):
            raise UserError(f"unknown {peer!r} (--against); {nearest(peer, benchmark.PEERS)}")
        sized = dict(image_size=IMAGE_SIZE.value, checkouts=CHECKOUTS.value)
        own = {
            "inference": dict(
                image_sizes=_image_sizes(),
                dtype=DTYPE.value,
                largest=LARGEST.value,
                memory_gib=MEMORY_GIB.value,
                out=OUT.value,
            ),
            "train": sized | dict(dtype=DTYPE.value),
            "tpu": sized | dict(slices=SLICES.value),
        }
        benchmark.measure(
            models=MODELS.value, images=IMAGES.value, against=AGAINST.value, **own[arguments[0]]
        )
    elif arguments[0] in ("objectives", "depth"):
        benchmark.measure(
            models=MODELS.value, images=IMAGES.value, image_size=IMAGE_SIZE.value, dtype=DTYPE.value
        )
    elif arguments[0] == "crops":
        configs = {name: command.read_config(f"configs/dino.py:model={name}") for name in MODELS.value}
        benchmark.measure(configs, SLICES.value, IMAGES.value)
    elif arguments[0] == "serve":
        benchmark.measure(MODELS.value, IMAGE_SIZE.value, SECONDS.value)
    elif arguments[0] == "predict":
        benchmark.measure(MODELS.value, IMAGES.value if flags.FLAGS["images"].present else None)
    else:
        benchmark.measure()


def _image_sizes() -> list[int]:
    sizes = IMAGE_SIZES.value
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise UserError(f"--image_sizes={','.join(sizes)} is no list of sizes in pixels, such as 224,384")
    return [int(size) for size in sizes]


if __name__ == "__main__":
    command.run(main)
