"""Images with depth maps."""

import dataclasses

from vit_jax.data.fields import DEPTH
from vit_jax.data.map_files import DEPTH_SUFFIXES, decode_depth
from vit_jax.data.sources.base import naming
from vit_jax.data.sources.folder_rules import DEPTH_FOLDERS
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.pairs import Pairs, Split, find_pairs, find_splits, folder_of, split_of
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Depths(Pairs):
    """Images with depth maps."""

    fields = (DEPTH,)
    scale: float = 0.001  # Factor from the values of PNG files to metres.

    def fields_of(self, index):
        with naming(self.describe_map(index)):
            return {DEPTH: decode_depth(self.read_map(index), self.scale)}

    def known_fields(self, indices=None):
        return (repr(self.scale).encode(),)


def open_depths(split: str, options: SourceOptions) -> Depths:
    """Opens a split of images with depth maps.

    Raises:
      UserError: there are no folders of images and depth maps, the split does not exist, an image
        has no depth map, or an image and its depth map differ in size.
    """
    root = folder_of(options.path)
    _, splits = _layout(root)
    found = split_of(options.path, splits, split)
    images, maps, left_out = find_pairs(root, found, DEPTH_SUFFIXES, "depth map")
    pairs = tuple(images), tuple(maps), dict(left_out)
    annotated = bool(options.fields)
    source = Depths(root, *pairs, scale=options.depth_scale, annotated=annotated)
    source.check_sizes(DEPTH)
    return source


def _layout(root: str) -> tuple[str, dict[str, Split]]:
    if splits := find_splits(root, DEPTH_FOLDERS):
        return "folders of images and depth maps", splits
    raise UserError(
        f"{root} has no images with depth maps (data.path): put them into {root}images and "
        f"{root}depth, with the same names"
    )


DEPTHS = SourceKind(
    "depth",
    "images with depth maps",
    open_depths,
    path="a folder with images and depth maps (16-bit PNG or .npy) of the same names",
    layout_at=lambda path: _layout(folder_of(path)),
)
