"""The evaluation transform of a checkpoint."""

from vit_jax.data.preprocess import TestCrop, sides
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.preprocessing import UNSAID, Preprocessing
from vit_jax.options.data import INTERPOLATIONS, TEST_CROPS


def checkpoint_crop(
    checkpoint: Checkpoint,
    size: int | tuple[int, int],
    mode: str | None = None,
    default: Preprocessing = UNSAID,
) -> TestCrop:
    """Returns a checkpoint's evaluation crop, for images of any size.

    The ratio of crop to resized image is the same at all sizes.

    Args:
      size: size of the crop in pixels, or its height and width.
      mode: `fast` or `exact`, as in `TestCrop`; None: the mode of the run, else fast.
      default: preprocessing for a checkpoint that stores none.

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
