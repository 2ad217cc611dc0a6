"""The evaluation transform of a checkpoint."""

from vit_jax.data.preprocess import TestCrop, sides
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.preprocessing import DEFAULT_PREPROCESSING, Preprocessing
from vit_jax.options.data import INTERPOLATIONS, TEST_CROPS


def checkpoint_crop(
    checkpoint: Checkpoint,
    size: int | tuple[int, int],
    mode: str | None = None,
    default: Preprocessing = DEFAULT_PREPROCESSING,
) -> TestCrop:
    """Returns a checkpoint's evaluation crop, adapted to another image size.

    The short side of the resized image is scaled in proportion to the crop. For example, a
    checkpoint that resizes to 256 pixels and crops to 224 pixels resizes to 512 pixels for a crop
    of 448 pixels.

    Args:
      size: size of the crop in pixels, or its height and width.
      mode: how JPEGs are decoded: `fast`, at a reduced size where possible, or `exact`, like
        Pillow. None: the mode of the checkpoint's run, or `fast` if the checkpoint is not from a
        run.
      default: preprocessing for a checkpoint that contains no preprocessing.

    Raises:
      UserError: the checkpoint's crop or interpolation is not supported.
    """
    preprocessing, size = checkpoint.preprocessing or default, sides(size)
    supported = {preprocessing.kind: TEST_CROPS, preprocessing.interpolation: INTERPOLATIONS}
    for name, names in supported.items():
        if name not in names:
            raise UserError(
                f"Unsupported: preprocessing of {checkpoint.place} with {name}. "
                f"Supported: {', '.join(names)}."
            )
    return TestCrop(
        size,
        preprocessing.kind,
        preprocessing.resize(size),
        mode or preprocessing.mode,
        preprocessing.interpolation,
        preprocessing.background,
        preprocessing.half,
    )
