"""Reads DINOv2's published depth heads: linear heads on one or four layers, and DPT heads.

Sources: dinov2/hub/depthers.py and dinov2/hub/depth/decode_heads.py. A file contains the tensors
of the head, `decode_head.*`, but not the frozen backbone.
"""

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import check_finite, sketch
from vit_jax.interop.objective_files import ObjectiveParams, Shapes, check_shapes
from vit_jax.models.dense.depth import depth_head
from vit_jax.models.dense.pyramid import widths_of
from vit_jax.models.model_card import abstract, parameter_shapes
from vit_jax.options.model import ImageOptions
from vit_jax.options.objective import DepthOptions

START = "decode_head."
# Maximum depth in metres for each data set. The data set's name is part of the file name.
RANGES = {"nyu": 10.0, "kitti": 80.0}

# Resize method for the position embeddings of DINOv2's backbones with depth heads.
POSITION_RESIZE = "bicubic_offset"

# Maps DINOv2's names of the head's modules (regular expressions) to vit_jax's names.
_UNITS = r"fusion_blocks\.(\d)\.res_conv_unit{}\.conv{}\.conv"
_MODULES = {
    r"conv_depth(\.head\.4)?": "classifier",
    r"reassemble_blocks\.readout_projects\.(\d)\.0": r"readout/\1",
    r"reassemble_blocks\.projects\.(\d)\.conv": r"project/\1",
    r"reassemble_blocks\.resize_layers\.([01])": r"resize/\1/dense",
    r"reassemble_blocks\.resize_layers\.3": "resize/2",
    r"convs\.(\d)\.conv": r"convs/\1",
    _UNITS.format(1, 1): r"fusion/\1/skip/first",
    _UNITS.format(1, 2): r"fusion/\1/skip/second",
    _UNITS.format(2, 1): r"fusion/\1/residual/first",
    _UNITS.format(2, 2): r"fusion/\1/residual/second",
    r"fusion_blocks\.(\d)\.project\.conv": r"fusion/\1/project",
    r"project\.conv": "fused",
    r"conv_depth\.head\.0": "halve",
    r"conv_depth\.head\.2": "hidden",
}


def read_depth_head(
    file: str, tensors: dict[str, np.ndarray], backbone: ImageOptions, max_depth: float | None
) -> ObjectiveParams:
    """Converts a published depth head to parameters of the training objective `depth`.

    Args:
      file: path of the file.
      tensors: tensors of the file, by name.
      backbone: the arguments of the backbone.
      max_depth: maximum depth in metres. If it is None, the maximum depth of the data set in the
        file name is used, such as 10 for `nyu`.

    Raises:
      UserError: the file has unexpected tensors, the head does not fit the backbone, or the data
        set is unknown.
    """
    params = {f"head/{path}": array for path, array in _renamed(file, tensors).items()}
    options = _options(file, params, backbone, max_depth)
    sketched = abstract(partial(depth_head, options, sketch(backbone)))
    shapes = {path: array.shape for path, array in params.items()}

    def sources(expected: Shapes) -> dict[str, Any]:
        check_shapes(file, "depth", shapes, expected)
        return {path: partial(check_finite, params[path], f"{file}: {path}") for path in expected}

    expected = {f"head/{path}": shape for path, shape in parameter_shapes(sketched).items()}
    sources(expected)
    if unknown := sorted(params.keys() - expected):
        raise UserError(f"{file} has parameters of another head: {', '.join(unknown[:3])}")
    return ObjectiveParams("depth", asdict(options), sources, lambda: shapes)


def _options(
    file: str, params: dict[str, np.ndarray], backbone: ImageOptions, max_depth: float | None
) -> DepthOptions:
    """Returns the options of the training objective `depth` that create a published head.

    If `max_depth` (in metres) is None, it is derived from the data set in the file's name.

    Raises:
      UserError: the head does not fit the backbone, or the data set is unknown.
    """
    if max_depth is None:
        name = Path(file).name.lower()
        max_depth = next((most for word, most in RANGES.items() if word in name), None)
    if max_depth is None:
        raise UserError(
            f"{file} does not name its data, {' or '.join(RANGES)}: give --max_depth, the greatest "
            "depth in metres, which was 10 for NYU Depth v2 and 80 for KITTI"
        )
    inputs, bins = params["head/classifier/kernel"].shape
    values = dict(bins=bins, class_token=True, normalize=False, max_depth=max_depth)
    if "head/fused/kernel" in params:
        return DepthOptions(head="dpt", dim=params["head/fused/kernel"].shape[-1], **values)
    width = 2 * widths_of(sketch(backbone))[-1]
    if inputs not in (width, 4 * width):
        raise UserError(
            f"the linear head of {file} reads {inputs} numbers of each patch, and this backbone "
            f"has {width} or {4 * width}, with its class token: give the head's own backbone"
        )
    return DepthOptions(head="linear", layers=inputs // width, upsample=4, **values)


def _renamed(file: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts the tensors of a depth head to vit_jax's layout; returns them by vit_jax's path.

    Raises:
      UserError: the file does not contain a depth head of DINOv2.
    """
    renamed = {}
    for name, array in tensors.items():
        module, _, kind = name.removeprefix(START).rpartition(".")
        path = next(
            (
                found.expand(ours)
                for theirs, ours in _MODULES.items()
                if name.startswith(START) and (found := re.fullmatch(theirs, module))
            ),
            None,
        )
        if path is None or kind not in ("weight", "bias"):
            raise UserError(f"{file} is no depth head of DINOv2: it has the tensor {name}")
        if kind == "weight":
            renamed[f"{path}/kernel"] = _kernel(array, path)
        elif path.endswith("/dense"):  # A transposed convolution: the bias is repeated for pixels.
            factor = tensors[f"{START}{module}.weight"].shape[-1]
            renamed[f"{path}/bias"] = np.tile(array, (factor, factor, 1))
        else:
            renamed[f"{path}/bias"] = array
    if "classifier/kernel" not in renamed:
        raise UserError(f"{file} is no depth head of DINOv2: it lacks {START}conv_depth")
    return renamed


def _kernel(weight: np.ndarray, path: str) -> np.ndarray:
    """Converts the PyTorch weight of a module to the layout of vit_jax's kernel."""
    if path.endswith("/dense"):  # A transposed convolution.
        return weight.transpose(0, 2, 3, 1)
    if weight.ndim == 2 or weight.shape[2:] == (1, 1):
        return weight.reshape(weight.shape[:2]).T
    return weight.transpose(2, 3, 1, 0)
