"""Visualizes a model: python -m vit_jax.visualize --checkpoint=WORKDIR --images=photos --out=DIR.

The command writes these figures into DIR:
  attention rollout over the images (--layers: after each layer; --heads: each head of the last
    layer)
  mean attention distance of the heads
  similarity of the position embeddings
  principal components of the first layer's filters
  principal components of the last layer's tokens, as colours
  for a BiT, ConvNeXt or Swin, the features of each stage, as colours
  for a Swin, the attention within its windows
All figures are PNGs, and their numbers are in arrays.npz. The page index.html shows all figures in
a single file. It starts with a photograph overlaid with the attention of a layer and a head, which
are selected with sliders. If a figure is not defined for the model, a line gives the reason.
"""

from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.data.image_files import find_images, read_images
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Checkpoint: a workdir, a file or hf://owner/name, as in load_model."
)
IMAGES = flags.DEFINE_list(
    "images",
    [],
    "Images, folders or patterns, with commas; or - for standard input. Without: a run's test "
    "images.",
)
OUT = flags.DEFINE_string("out", None, "Folder for the figures: new, or empty.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Write into a folder that contains files.")
MOST = flags.DEFINE_integer("most", 16, "Images that are shown.", lower_bound=1, upper_bound=64)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Images at once.", lower_bound=1)
IMAGE_SIZE = flags.DEFINE_string(
    "image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's."
)
LAYERS = flags.DEFINE_bool("layers", False, "Rollout after each layer.")
HEADS = flags.DEFINE_bool("heads", False, "The last layer's attention, of each head.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; images are --images=PATH,PATH")
    if not CHECKPOINT.value or not OUT.value:
        raise UserError("give --checkpoint=WORKDIR, --images=PATH and --out=DIR")
    out = Path(OUT.value)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give --out=DIR, a folder")
    if out.exists() and any(out.iterdir()) and not OVERWRITE.value:
        raise UserError(f"{out} contains files; give --overwrite or another --out")
    source = find_images(IMAGES.value) if IMAGES.value else test_images(CHECKPOINT.value)
    command.use_compilation_cache()

    from vit_jax.checkpoint_crop import checkpoint_crop
    from vit_jax.inspection.drawing import draw_all
    from vit_jax.interop.checkpoint import model_name
    from vit_jax.interop.open import open_checkpoint
    from vit_jax.load import build_model

    changes = {"image_size": command.parse_image_size(IMAGE_SIZE.value)} if IMAGE_SIZE.value else {}
    checkpoint = open_checkpoint(CHECKPOINT.value, changes.get("image_size"))
    model = build_model(checkpoint, **changes)
    if model.channels != 3:
        raise UserError(
            f"the model takes images of {model.channels} channels, and files are read as RGB"
        )
    names, images = read_images(source, checkpoint_crop(checkpoint, model.image_size), MOST.value)
    draw_all(
        model,
        names,
        images,
        out,
        title=_title(checkpoint.library, model_name(checkpoint.options)),
        source=f"Checkpoint: {CHECKPOINT.value}",
        layers=LAYERS.value,
        heads=HEADS.value,
        batch_size=BATCH_SIZE.value,
    )


def _title(library: str, name: str) -> str:
    """Returns the page's title: the model and, if `library` is `a run`, its task and data."""
    from vit_jax.runs.run_page import title_of
    from vit_jax.runs.workdir import place_of, saved_run

    saved = saved_run(place_of(CHECKPOINT.value)[0]) if library == "a run" else None
    return f"What {title_of(saved) if saved else name} sees"


def test_images(checkpoint: str) -> Source:
    """Returns the test images of a training run.

    Raises:
      UserError: `checkpoint` is not the workdir of a run.
    """
    from vit_jax.runs.splits import open_splits
    from vit_jax.runs.workdir import place_of, saved_run

    path, _ = place_of(checkpoint)
    saved = None if str(checkpoint).startswith("hf://") else saved_run(path)
    if saved is None:
        raise UserError(f"{checkpoint} is not a run with known test images: give --images=PATH")
    return open_splits(saved.config).test


if __name__ == "__main__":
    command.run(main)
