"""Google's npz files, written by vision_transformer (ViT, hybrids), big_transfer (BiT), big_vision.

Files of training checkpoints also contain the optimizer's state, which is ignored. Files of
image-text models also contain the text tower, which `google_text.py` reads.
"""

import re
from fractions import Fraction
from pathlib import Path

from vit_jax.interop.library import Library, load_formats
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import Tensor, without_prefix

STARTS = ("params/", "opt/target/")  # Prefixes of a model's parameters in a file.
TOWERS_PREPROCESSING = Preprocessing("square", Fraction(1), "bilinear")  # Of image-text models.


def _prepare(
    path: Path, tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, Tensor], dict]:
    """Returns the image model's tensors and a configuration, derived from the tensors' names.

    npz files have no `config.json`. The configuration takes its place, with two entries:

    - `prefix`: the prefix of the image model's parameters in the file, such as `params/img/`.
    - `by_kind`: True if the parameters have big_vision's names.
    """
    prefix = next(
        (start for start in STARTS if any(name.startswith(start) for name in tensors)), ""
    )
    if f"{prefix}img/embedding/kernel" in tensors:
        prefix += "img/"
    by_kind = any(re.search("encoderblock.*/MlpBlock_0/", name) for name in tensors)
    return without_prefix(tensors, prefix), dict(prefix=prefix, by_kind=by_kind)


def _preprocessing(
    config: dict, processor_config: dict, channels: int
) -> tuple[dict, Preprocessing | None, str]:
    """Returns `TOWERS_PREPROCESSING` for image-text models, and None (unknown) for other models.

    npz files do not contain the preprocessing.
    """
    return {}, TOWERS_PREPROCESSING if config["prefix"].endswith("img/") else None, ""


LIBRARY = Library(
    title="Google's npz",
    formats=load_formats(__name__, "google_bit", "google_vit"),
    suffix=".npz",
    claims=lambda path, config, tensors: path.suffix == ".npz",
    prepare=_prepare,
    unknown=lambda config, tensors: (
        "these are not the arrays of a ViT, hybrid or BiT of Google's: 'embedding/kernel' is "
        f"missing among {len(tensors)} arrays such as {min(tensors, default='none')!r}"
    ),
    preprocessing=_preprocessing,
    class_names=lambda config: [],
    files=lambda described, values, seen, names, probabilities: None,
)
