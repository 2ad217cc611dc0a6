"""Exports a model as one file for serving: python -m vit_jax.export CHECKPOINT FILE.onnx.

FILE.stablehlo is a program for JAX, FILE.onnx one for ONNX Runtime. CHECKPOINT is a source as in
load_model. The program takes images `[batch, height, width, channels]` with any batch size, float32
in [-1, 1] or, with --uint8, pixel values. It normalizes them by the model's mean and std, and
returns logits `[batch, classes]` or features in float32. It computes in float32, whatever dtype the
model was trained in, or in --dtype. The program is run at two batch sizes on the CPU, and compared
with the model in float32. Class names and preprocessing are stored in the metadata of an ONNX file,
or in FILE.stablehlo.json.

    program = jax.export.deserialize(open("model.stablehlo", "rb").read())
    logits = program.call(images)       # Needs JAX alone; on a CPU, a GPU or a TPU.

    session = onnxruntime.InferenceSession("model.onnx")
    (logits,) = session.run(None, {"images": images})
"""

from pathlib import Path

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.errors import UserError
from vit_jax.progress import phase, print_line

# The largest difference between the logits and the model's in float32, relative to the largest
# logit, that rounding causes in about fifty layers. A wrong operation causes ten times as much.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

UINT8 = flags.DEFINE_bool("uint8", False, "The program takes images of uint8.")
DTYPE = flags.DEFINE_enum("dtype", "float32", [*TOLERANCES], "Compute dtype of the program.")
IMAGE_SIZE = flags.DEFINE_string(
    "image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's."
)
NUM_CLASSES = flags.DEFINE_integer(
    "num_classes", None, "0: without the head, for features.", lower_bound=0
)

BATCHES = (1, 3)  # Batch sizes at which program and model are compared.


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError("usage: python -m vit_jax.export CHECKPOINT FILE.stablehlo or FILE.onnx")
    source, file = arguments[0], Path(arguments[1])
    check_file(file)

    import jax

    from vit_jax.interop.open import open_checkpoint
    from vit_jax.interop.programs import as_served
    from vit_jax.load import build_model

    jax.config.update("jax_platforms", "cpu")  # The file does not depend on the machine.
    changes = {} if NUM_CLASSES.value is None else {"num_classes": NUM_CLASSES.value}
    if IMAGE_SIZE.value:
        changes["image_size"] = command.parse_image_size(IMAGE_SIZE.value)
    with phase(f"reading {source}"):
        checkpoint = open_checkpoint(source, changes.get("image_size"))
        exact = model = as_served(
            build_model(checkpoint, log=print_line, dtype=DTYPE.value, **changes)
        )
        if DTYPE.value != "float32":
            exact = build_model(checkpoint, log=str, dtype="float32", **changes)
    images = (*model.image_size, model.channels)
    dtype = np.dtype(np.uint8 if UINT8.value else np.float32)
    worst = write(file, model, exact, dtype, checkpoint.preprocessing)
    shape = "x".join(map(str, images))
    print(
        f"{file}: {file.stat().st_size / 1e6:,.1f} MB, images [batch, {shape}] {dtype} to logits, "
        f"in {DTYPE.value}; differs from the model in float32 by {worst:.1e} of the largest "
        f"logit, at batches of {' and '.join(map(str, BATCHES))}"
    )
    print(f"preprocessing of each image: {wanted(checkpoint, model.image_size)}")
    if model.num_classes:
        print(f"probabilities of the classes: the logits' {model.about.probabilities}")
        if not checkpoint.class_names:
            print("the checkpoint has no class names: none are written")


def check_file(file: Path) -> None:
    """Raises UserError if the program cannot be written to a file: suffix, dtype or path."""
    if file.suffix not in (".stablehlo", ".onnx"):
        raise UserError(f"{file}: the name must end in .stablehlo or .onnx, the format")
    if file.suffix == ".onnx" and DTYPE.value == "bfloat16":
        raise UserError(
            "ONNX Runtime does not compute in bfloat16 on a CPU, where the program is compared: "
            "--dtype=float16, or a file called .stablehlo"
        )
    metadata = file.with_name(f"{file.name}.json")
    for path in (file, metadata) if file.suffix == ".stablehlo" else (file,):
        if path.exists():
            raise UserError(f"{path} exists; give another name")
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for {file.name}")


def write(file: Path, model, exact, dtype: np.dtype, preprocessing) -> float:
    """Writes a model's program, unless it differs too much from the model.

    Args:
      file: the new file, whose suffix determines the format.
      model: the model in the program's dtype.
      exact: the model in float32.
      dtype: dtype of the images.
      preprocessing: the checkpoint's preprocessing, for the metadata.

    Returns:
      The largest difference between the logits of program and model, relative to the largest logit.

    Raises:
      UserError: the difference exceeds the tolerance of the program's dtype.
    """
    from vit_jax.interop.programs import (
        difference,
        metadata_file,
        metadata_of,
        write_onnx,
        write_stablehlo,
    )

    images = (*model.image_size, model.channels)
    temporary = file.with_name(f".{file.name}.tmp")
    write_program = write_onnx if file.suffix == ".onnx" else write_stablehlo
    try:
        with phase(f"writing {file}"):
            metadata = metadata_of(model, dtype, preprocessing)
            run = write_program(model, temporary, images, dtype, metadata)
        with phase("comparing the program with the model"):
            worst = max(difference(exact, run, images, dtype, batch) for batch in BATCHES)
        if not worst <= TOLERANCES[DTYPE.value]:
            raise UserError(
                f"the program's logits differ from the model's by {worst:.1e} of the largest, "
                f"more than {DTYPE.value} explains; nothing is written"
            )
        if file.suffix == ".stablehlo":
            metadata_file(temporary).replace(metadata_file(file))
        temporary.replace(file)
    finally:
        for path in (temporary, metadata_file(temporary)):
            path.unlink(missing_ok=True)
    return worst


def wanted(checkpoint, size: tuple[int, int]) -> str:
    """Returns a description of the preprocessing that the program expects."""
    from vit_jax.checkpoint_crop import checkpoint_crop

    try:
        crop = checkpoint_crop(checkpoint, size)
    except UserError as error:  # The caller may preprocess elsewhere.
        return str(error)
    return f"{crop}" + ("" if checkpoint.preprocessing else " (assumed: not in the checkpoint)")


if __name__ == "__main__":
    command.run(main)
