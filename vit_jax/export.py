"""Exports a model as one file for serving: python -m vit_jax.export CHECKPOINT FILE.onnx.

FILE.stablehlo is a program for JAX, and FILE.onnx is a program for ONNX Runtime. CHECKPOINT is a
source as in load_model. The program's input is images `[batch, height, width, channels]` with any
batch size, float32 in [-1, 1] or, with --uint8, pixel values. The program normalizes them by the
model's mean and std, and returns logits `[batch, classes]` or features in float32. It computes in
--dtype, by default float32, regardless of the dtype of training. Before the file is written, the
program is run at two batch sizes on the CPU and compared with the model in float32. Class names and
preprocessing are stored in the metadata of an ONNX file, or in FILE.stablehlo.json.

With --tower=image or --tower=text, CHECKPOINT is an image-text model as in load_image_text, and one
of its encoders is exported. The program returns embeddings of length 1, float32 `[batch, dim]`. The
text encoder's input is tokens, int32 `[batch, length]`. The metadata contain the scale and the bias
of the similarities.

For runs of these objectives (config.objective.name), the program returns:
  segmentation  `scores` `[batch, rows, columns, classes]`, at the resolution of the head
  depth         `depth` `[batch, rows, columns, 1]` in metres
  detection     `objects` `[batch, objects, 6]`: left, top, right and bottom as fractions of the
                image's sides, score and class. A head for masks also returns `masks` `[batch,
                objects, rows, columns]`: logits of the whole image, above 0 at the object's pixels

    program = jax.export.deserialize(open("model.stablehlo", "rb").read())
    logits = program.call(images)       # Needs JAX alone; on a CPU, a GPU or a TPU.

    session = onnxruntime.InferenceSession("model.onnx")
    (logits,) = session.run(None, {"images": images})
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.errors import UserError
from vit_jax.progress import phase, print_line

# Maximum difference between the program's logits and the float32 model's logits, divided by the
# largest logit. Rounding errors in about fifty layers are smaller. A wrong operation causes ten
# times this difference.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

UINT8 = flags.DEFINE_bool("uint8", False, "The program takes images of uint8.")
DTYPE = flags.DEFINE_enum("dtype", "float32", [*TOLERANCES], "Compute dtype of the program.")
IMAGE_SIZE = flags.DEFINE_string(
    "image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's."
)
NUM_CLASSES = flags.DEFINE_integer(
    "num_classes", None, "0: without the head, for features.", lower_bound=0
)
TOWER = flags.DEFINE_enum(
    "tower", None, ["image", "text"], "The tower of a model of images and texts to export."
)

BATCHES = (1, 3)  # Batch sizes at which the program is compared with the model.


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError("usage: python -m vit_jax.export CHECKPOINT FILE.stablehlo or FILE.onnx")
    source, file = arguments[0], Path(arguments[1])
    check_file(file)

    import jax

    jax.config.update("jax_platforms", "cpu")  # The file must not depend on the machine.
    if TOWER.value:
        _export_tower(source, file)
        return
    from vit_jax.dense import objective_at
    from vit_jax.interop.dense import TASKS

    if (task := objective_at(source)) in TASKS:
        _export_dense(source, file, task)
        return
    from vit_jax.interop.open import open_checkpoint
    from vit_jax.interop.programs import metadata_of

    changes = {} if NUM_CLASSES.value is None else {"num_classes": NUM_CLASSES.value}
    if (size := command.parse_image_size(IMAGE_SIZE.value)) is not None:
        changes["image_size"] = size
    with phase(f"reading {source}"):
        checkpoint = open_checkpoint(source, changes.get("image_size"))
        model, exact = _built(checkpoint, changes)
    program = _of_images(
        model, exact, metadata_of(model, _pixel_dtype(), checkpoint.preprocessing), "logits"
    )
    _write_and_describe(file, program)
    print(f"preprocessing of each image: {preprocessing_text(checkpoint, model.image_size)}")
    if model.num_classes:
        print(f"probabilities of the classes: the logits' {model.about.probabilities}")
        if not checkpoint.class_names:
            print("the checkpoint has no class names: none are written")


def _built(checkpoint, changes: dict[str, Any], complete: Callable = lambda model: model) -> tuple:
    """Builds a model, with `complete` applied, in the program's dtype and in float32."""
    from vit_jax.interop.programs import as_served
    from vit_jax.load import build_model

    model = as_served(
        complete(build_model(checkpoint, log=print_line, dtype=DTYPE.value, **changes))
    )
    if DTYPE.value == "float32":
        return model, model
    return model, as_served(complete(build_model(checkpoint, log=str, dtype="float32", **changes)))


def _pixel_dtype() -> np.dtype:
    return np.dtype(np.uint8 if UINT8.value else np.float32)


def _export_dense(source: str, file: Path, task: str) -> None:
    """Exports the model of a segmentation, depth or detection run, with its head."""
    from vit_jax.interop.dense import TASKS, with_head
    from vit_jax.interop.open import open_checkpoint
    from vit_jax.interop.programs import Objects, dense_metadata_of

    if NUM_CLASSES.value is not None:
        raise UserError(f"--num_classes does not apply to a {task} run: its head has the classes")
    size = command.parse_image_size(IMAGE_SIZE.value)
    changes = {} if size is None else {"image_size": size}
    with phase(f"reading {source}"):
        checkpoint = open_checkpoint(source, size)
        model, exact = _built(checkpoint, changes, partial(with_head, TASKS[task], checkpoint))
    metadata = dense_metadata_of(model, _pixel_dtype(), checkpoint.preprocessing)
    program = _of_images(model, exact, metadata, model.output[0])
    if task == "detection":
        program = program._replace(model=Objects(model), exact=Objects(exact))
        if model.predicts_masks:
            metadata["masks"] = "logits of each object in the whole image, above 0 where it is"
            program = program._replace(names=(*program.names, "masks"))
    _write_and_describe(file, program)
    print(f"preprocessing of each image: {preprocessing_text(checkpoint, model.image_size)}")


def _export_tower(source: str, file: Path) -> None:
    """Exports the image encoder or the text encoder of an image-text model."""
    from vit_jax.image_text import open_towers
    from vit_jax.interop import programs

    if NUM_CLASSES.value is not None:
        raise UserError("--num_classes does not apply to a --tower, which has no classes")
    if TOWER.value == "text" and (UINT8.value or IMAGE_SIZE.value):
        raise UserError("--uint8 and --image_size are of images: leave them out of --tower=text")
    size = command.parse_image_size(IMAGE_SIZE.value)
    with phase(f"reading {source}"):
        checkpoint, text_part = open_towers(source, size)
        print_line(text_part.describe())
    if TOWER.value == "text":
        options = text_part.tower.options
        program = Program(
            programs.Embedder(text_part.tower_in(DTYPE.value)),
            programs.Embedder(text_part.tower_in("float32")),
            ("tokens", "embeddings"),
            (options.length,),
            np.dtype(np.int32),
            programs.text_metadata_of(text_part),
            partial(programs.random_tokens, options),
        )
        _write_and_describe(file, program)
        return
    changes = {} if size is None else {"image_size": size}
    model, exact = _built(checkpoint, changes)
    metadata = programs.metadata_of(model, _pixel_dtype(), checkpoint.preprocessing)
    metadata.pop("class_names", None)
    program = _of_images(model, exact, metadata | programs.similarity_of(text_part), "embeddings")
    embedders = dict(model=programs.Embedder(model), exact=programs.Embedder(exact))
    _write_and_describe(file, program._replace(**embedders))
    print(f"preprocessing of each image: {preprocessing_text(checkpoint, model.image_size)}")


class Program(NamedTuple):
    """A program to be exported."""

    model: Any  # The model in the program's dtype.
    exact: Any  # The model in float32.
    names: tuple[str, ...]  # Names of the input and the outputs.
    shape: tuple[int, ...]  # Shape of the input without the batch axis.
    dtype: np.dtype  # Dtype of the input.
    metadata: dict[str, Any]  # Information for a server, such as class names.
    draw: Callable[[int], np.ndarray]  # Function from a batch size to random inputs.


def _of_images(model, exact, metadata: dict[str, Any], output: str) -> Program:
    """Returns the program to export for an image model."""
    from vit_jax.interop.programs import random_images

    shape, dtype = (*model.image_size, model.channels), _pixel_dtype()
    draw = partial(random_images, shape, dtype)
    return Program(model, exact, ("images", output), shape, dtype, metadata, draw)


def _write_and_describe(file: Path, program: Program) -> None:
    worst = write(file, program)
    shape, (inputs, *outputs) = "x".join(map(str, program.shape)), program.names
    print(
        f"{file}: {file.stat().st_size / 1e6:,.1f} MB, {inputs} [batch, {shape}] {program.dtype} "
        f"to {' and '.join(outputs)}, in {DTYPE.value}; differs from the model in float32 by "
        f"{worst:.1e} of the largest {outputs[0].removesuffix('s')}, at batches of "
        f"{' and '.join(map(str, BATCHES))}"
    )


def check_file(file: Path) -> None:
    """Raises UserError if a file's suffix, its path or `--dtype` is not supported."""
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


def write(file: Path, program: Program) -> float:
    """Compares a program with the model, and writes it to a new file in its suffix's format.

    Returns:
      The largest difference between the outputs of program and model, divided by the largest
      output.

    Raises:
      UserError: the difference exceeds the tolerance of the program's dtype.
    """
    from vit_jax.interop.programs import difference, metadata_file, write_onnx, write_stablehlo

    temporary = file.with_name(f".{file.name}.tmp")
    write_program = write_stablehlo
    if file.suffix == ".onnx":
        write_program = partial(write_onnx, names=program.names)
    try:
        with phase(f"writing {file}"):
            run = write_program(
                program.model, temporary, program.shape, program.dtype, program.metadata
            )
        with phase("comparing the program with the model"):
            worst = max(difference(program.exact, run, program.draw(n)) for n in BATCHES)
        if not worst <= TOLERANCES[DTYPE.value]:
            raise UserError(
                f"the program's {' and '.join(program.names[1:])} differ from the model's by "
                f"{worst:.1e} of the largest, more than {DTYPE.value} explains; nothing is written"
            )
        if file.suffix == ".stablehlo":
            metadata_file(temporary).replace(metadata_file(file))
        temporary.replace(file)
    finally:
        for path in (temporary, metadata_file(temporary)):
            path.unlink(missing_ok=True)
    return worst


def preprocessing_text(checkpoint, size: tuple[int, int]) -> str:
    """Returns a description of how images must be preprocessed for the exported program."""
    from vit_jax.checkpoint_crop import checkpoint_crop

    try:
        crop = checkpoint_crop(checkpoint, size)
    except UserError as error:  # Not an error here, since other code may preprocess the images.
        return str(error)
    return f"{crop}" + ("" if checkpoint.preprocessing else " (assumed: not in the checkpoint)")


if __name__ == "__main__":
    command.run(main)
