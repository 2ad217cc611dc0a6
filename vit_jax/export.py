"""A model as one file for who serves it: python -m vit_jax.export CHECKPOINT FILE.stablehlo or FILE.onnx

CHECKPOINT is what load_model takes. The program takes images `[batch, height, width, channels]`, any number
at once, float32 in [-1, 1] or with --uint8 as they are, normalises them by the model's mean and deviation,
and gives logits `[batch, classes]` or features, float32. It
computes in float32, whatever the model was trained in, or as --dtype says. What was written is run at two
batch sizes, on the CPU, and compared with the model in float32.

    program = jax.export.deserialize(open("model.stablehlo", "rb").read())
    logits = program.call(images)       # Needs JAX alone; on a CPU, a GPU or a TPU.

    session = onnxruntime.InferenceSession("model.onnx")
    (logits,) = session.run(None, {"images": images})
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.errors import UserError

# How far the logits may be from the model's in float32, as a share of the largest: what rounding makes of
# some fifty layers. A wrong operation makes ten times as much.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

UINT8 = flags.DEFINE_bool("uint8", False, "The program takes images of uint8.")
DTYPE = flags.DEFINE_enum("dtype", "float32", [*TOLERANCES], "The program computes in it.")
IMAGE_SIZE = flags.DEFINE_string("image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's.")
NUM_CLASSES = flags.DEFINE_integer("num_classes", None, "0: without the head, for features.", lower_bound=0)

PLATFORMS = ("cpu", "cuda", "tpu")
BATCHES = (1, 3)  # That are compared.
MOST_BYTES = 2**31 - 2**20  # Of parameters in a file: protocol buffers and flatbuffers end at 2 GiB.


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError("usage: python -m vit_jax.export CHECKPOINT FILE.stablehlo or FILE.onnx")
    source, file = arguments[0], Path(arguments[1])
    writers = {".stablehlo": write_stablehlo, ".onnx": write_onnx}
    if file.suffix not in writers:
        raise UserError(f"{file}: the name ends in .stablehlo or .onnx, which says the format")
    if file.suffix == ".onnx" and DTYPE.value == "bfloat16":
        raise UserError(
            "ONNX Runtime does not compute in bfloat16 on a CPU, where the program is compared: "
            "--dtype=float16, or a file called .stablehlo"
        )
    if file.exists():
        raise UserError(f"{file} exists; give another name")
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for {file.name}")

    import jax

    from vit_jax.load import build_model
    from vit_jax.training.workdir import open_any

    jax.config.update("jax_platforms", "cpu")  # What is written does not depend on the machine.
    changes = {} if NUM_CLASSES.value is None else {"num_classes": NUM_CLASSES.value}
    if IMAGE_SIZE.value:
        changes["image_size"] = command.parse_image_size(IMAGE_SIZE.value)
    checkpoint = open_any(source, changes.get("image_size"))
    exact = model = as_served(build_model(checkpoint, dtype=DTYPE.value, **changes))
    if DTYPE.value != "float32":
        exact = build_model(checkpoint, say=str, dtype="float32", **changes)
    images = (*model.image_size, model.channels)
    dtype = np.dtype(np.uint8 if UINT8.value else np.float32)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        run = writers[file.suffix](model, temporary, images, dtype)
        worst = max(difference(exact, run, images, dtype, batch) for batch in BATCHES)
        if not worst <= TOLERANCES[DTYPE.value]:
            raise UserError(
                f"the program's logits differ from the model's by {worst:.1e} of the largest, more than "
                f"{DTYPE.value} makes of them; nothing is written"
            )
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    shape = "x".join(map(str, images))
    print(
        f"{file}: {file.stat().st_size / 1e6:,.1f} MB, images [batch, {shape}] {dtype} to logits, in "
        f"{DTYPE.value}; differs from the model in float32 by {worst:.1e} of the largest logit, at batches "
        f"of {' and '.join(map(str, BATCHES))}"
    )
    print(f"it wants of each image: {wanted(checkpoint, model.image_size)}")


def wanted(checkpoint, size: tuple[int, int]) -> str:
    """What who serves the program must do to an image first, in words."""
    from vit_jax.training.workdir import checkpoint_crop

    try:
        crop = checkpoint_crop(checkpoint, size)
    except UserError as error:  # It can be done elsewhere.
        return str(error)
    return f"{crop}" + ("" if checkpoint.preprocessing else " (assumed: the checkpoint does not say)")


def as_served(model):
    """The model without what helps training alone: its layers one after the other, computed once."""
    from flax import nnx

    for _, part in nnx.iter_modules(model):
        for name, value in dict(scan=False, remat="none").items():
            if hasattr(part, name):
                setattr(part, name, value)
    return model


def function_of(model) -> Callable:
    """The model as a function of images alone, to float32: features come in the type that is computed in."""
    from flax import nnx

    graphdef, params = nnx.split(model)
    return lambda images: nnx.merge(graphdef, params)(images).astype(np.float32)


def any_batch(images: tuple[int, ...], dtype: np.dtype):
    """The shape of any number of images."""
    import jax

    (batch,) = jax.export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *images), dtype)


def write_stablehlo(model, file: Path, images: tuple[int, ...], dtype: np.dtype) -> Callable:
    """By jax.export; returns what runs the file."""
    import jax
    from flax import nnx

    # Checked first: JAX writes for minutes before it finds out.
    if (size := sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))) > MOST_BYTES:
        raise UserError(
            f"its parameters take {size / 1e9:.1f} GB, and StableHLO holds {MOST_BYTES / 1e9:.1f}; "
            "--dtype=float16 and a file called .onnx take half"
        )
    exported = jax.export.export(jax.jit(function_of(model)), platforms=PLATFORMS)(any_batch(images, dtype))
    file.write_bytes(exported.serialize())
    return jax.export.deserialize(bytearray(file.read_bytes())).call


def write_onnx(model, file: Path, images: tuple[int, ...], dtype: np.dtype) -> Callable:
    """By our own writer, `vit_jax.interop.onnx`; returns what runs the file."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(f'{error.name} is not installed; pip install -e ".[onnx]" brings it') from error
    from vit_jax.interop.onnx import convert

    written = convert(function_of(model), any_batch(images, dtype), ("images", "logits"), MOST_BYTES)
    onnx.checker.check_model(written, full_check=True)
    file.write_bytes(written.SerializeToString())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"images": batch})[0]


def difference(model, run: Callable, images: tuple[int, ...], dtype: np.dtype, batch: int) -> float:
    """The largest between the logits of the model and of the program over random images, as a share of the
    largest logit."""
    import jax

    rng = np.random.default_rng(batch)
    shape = (batch, *images)
    drawn = rng.integers(256, size=shape, dtype=np.uint8) if dtype == np.uint8 else rng.uniform(-1, 1, shape)
    drawn = drawn.astype(dtype)
    wanted = np.asarray(jax.jit(function_of(model))(drawn))
    return float(np.abs(np.asarray(run(drawn)) - wanted).max() / (np.abs(wanted).max() or 1))


if __name__ == "__main__":
    command.run(main)
