"""Images with maps: each image has a file with a value for each pixel (a mask or a depth map).

Images and maps are in two folders. An image and its map have the same file name, except for the
suffix and for the endings `image_end` and `map_end` of `Split`.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.data.decode import Jpeg, Pixels, Unreadable, open_image
from vit_jax.data.dense_fields import check_upright
from vit_jax.data.sources.base import Example, Source, spread
from vit_jax.data.sources.folder import file_sizes, folders_in, read_file, walk
from vit_jax.data.sources.folder_rules import (
    IMAGE_FOLDERS,
    check_no_text_labels,
    of_system,
    sort_out,
    split_name,
)
from vit_jax.data.sources.slices import groups_by_path, stratified
from vit_jax.errors import UserError, as_text

DEV = ("val", "valid", "validation", "dev")  # Synonyms for the same split.
SAMPLES = 16  # When a split is opened, the sizes of 16 images and their maps are compared.
SHOWN = 3  # Maximum number of file names in an error.


class Split(NamedTuple):
    """The files of a split.

    Attributes:
      images, maps: folders of images and of maps (masks or depth maps), relative to the root of the
        data set.
      image_end, map_end: ends of the names of images and of maps, before the suffix. An image and
        its map have the same name except for these ends. For example, the image `a_leftImg8bit.png`
        has the map `a_gtFine_labelIds.png` with the ends `_leftImg8bit` and `_gtFine_labelIds`.
      listed: path of a text file with the names of the split's images, without folder and suffix.
        Empty: the split contains all images in the folder.
    """

    images: str
    maps: str
    image_end: str = ""
    map_end: str = ""
    listed: str = ""


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
    """Images with maps: a map is a file with a value for each pixel of the image.

    Attributes:
      root: folder of the data set, with a trailing slash.
      images, maps: paths of the files, relative to the root.
      annotated: the maps are used. False: only the images are.
    """

    root: str
    images: tuple[str, ...]
    maps: tuple[str, ...]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    annotated: bool = dataclasses.field(default=True, kw_only=True)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = read_file(self.root + self.images[index])
        if self.annotated:
            check_upright(image, self.describe(index), self.describe_map(index))
        return Example(image, ())

    def describe(self, index):
        return as_text(self.root + self.images[index])

    def labels_of(self, index):
        return ()

    def stored_files(self, indices=None):
        chosen = range(len(self)) if indices is None else indices
        names = [column[index] for column in (self.images, self.maps) for index in chosen]
        sizes = file_sizes(self.root, [self.root + name for name in names])
        return zip(names, sizes, strict=True)

    def groups(self, key):
        return groups_by_path(self.images, key)

    def fair_order(self):
        return stratified([os.path.dirname(name) for name in self.images], self.images)

    def read_map(self, index: int) -> bytes:
        """Returns the content of an image's map file.

        Raises:
          UserError: the file cannot be read.
        """
        try:
            return read_file(self.root + self.maps[index])
        except OSError as error:
            raise UserError(f"cannot read {self.describe_map(index)}: {error.strerror}") from error

    def describe_map(self, index: int) -> str:
        """Returns the name of an image's map (mask or depth map), for messages."""
        return as_text(self.root + self.maps[index])

    def check_sizes(self, field: str) -> None:
        """Raises UserError if one of a few sampled images differs in size from its map.

        Args:
          field: key of the map in `fields_of`.
        """
        for index, image in readable_samples(self):
            rows, columns = self.fields_of(index)[field].shape
            if (rows, columns) != (image.height, image.width):
                raise UserError(
                    f"{self.describe(index)} has {image.width}x{image.height} pixels, and "
                    f"{self.describe_map(index)} {columns}x{rows}: save both at one size, and "
                    "images upright, without an EXIF rotation"
                )


def readable_samples(source: Source) -> Iterator[tuple[int, Jpeg | Pixels]]:
    """Yields the index and the opened image of each readable image in a sample.

    Unreadable images are ignored here, because the pipeline counts and replaces them.
    """
    for index in spread(len(source), SAMPLES):
        try:
            image = open_image(source[index].image)
        except (Unreadable, OSError):
            continue
        yield index, image


def find_splits(root: str, map_folders: Sequence[str]) -> dict[str, Split]:
    """Returns the splits of a data set's folder with images and maps (masks or depth maps).

    The folders are `images/train` and `masks/train`, or `train/images` and `train/masks`. If the
    folders `images` and `masks` have no subfolders of splits, they are the split `all`.

    Args:
      map_folders: possible names of the folder of maps, the most likely first.
    """
    if pair := _two_folders(root, map_folders):
        images, maps = pair
        both = _splits_in(os.path.join(root, images)), _splits_in(os.path.join(root, maps))
        splits = {
            split: Split(f"{images}/{folder}", f"{maps}/{both[1][split]}")
            for split, folder in both[0].items()
            if split in both[1]
        }
        return splits or {"all": Split(images, maps)}
    splits = {}
    for folder in filter(split_name, _folders(root)):
        if pair := _two_folders(os.path.join(root, folder), map_folders):
            splits[split_name(folder)] = Split(*(f"{folder}/{name}" for name in pair))
    return splits


def split_of(path: str, splits: Mapping[str, Any], name: str, *others: str) -> Any:
    """Returns the split with one of the given names; the names in `DEV` are synonyms.

    Raises:
      UserError: the split does not exist.
    """
    names = (name, *others, *(DEV if name in DEV else ()))
    found = next((splits[one] for one in names if one in splits), None)
    if found is None:
        raise UserError(
            f"{path} has no split {name!r}, but {', '.join(splits)}: choose by data.train_split "
            "and data.test_split" + (", as 'all[:80%]' and 'all[80%:]'" if "all" in splits else "")
        )
    return found


def find_pairs(
    root: str, split: Split, suffixes: Sequence[str], what: str
) -> tuple[list[str], list[str], Counter[str]]:
    """Returns a split's images, their maps (masks or depths), and the skipped files by reason.

    Args:
      root: the folder of the data set, with a trailing slash.
      suffixes: suffixes of maps, in lower case.
      what: the kind of map, for errors.

    Raises:
      UserError: there are no images, an image has no map, or two files have the same name.
    """
    images, left_out = sort_out(_files(root + split.images))
    maps = [
        file
        for file in _files(root + split.maps)
        if file.lower().endswith(tuple(suffixes)) and not of_system(file)
    ]
    if not maps and what == "mask":
        check_no_text_labels(root + split.maps)
    image_of = _by_name(root + split.images, images, split.image_end)
    map_of = _by_name(root + split.maps, maps, split.map_end)
    names = sorted(image_of)
    if split.listed:
        names = _listed(root + split.listed)
        _check_all(names, image_of, f"of {split.listed} do not exist", root + split.images)
    elif others := len(map_of.keys() - image_of.keys()):
        left_out[f"{what}s without an image"] += others
    if not names:
        raise UserError(f"no images in {root}{split.images}")
    remedy = (
        f"; a {what} has the name of its image and the suffix {' or '.join(suffixes)}: add them, "
        "or move the images away"
    )
    _check_all(names, map_of, f"have no {what}", root + split.maps, remedy)
    return (
        [f"{split.images}/{image_of[name]}" for name in names],
        [f"{split.maps}/{map_of[name]}" for name in names],
        left_out,
    )


def _check_all(
    names: Sequence[str], files: Mapping[str, str], lack: str, folder: str, remedy: str = ""
) -> None:
    """Raises UserError if images have no file in a folder; `files` are its files by image name.

    The message contains `lack`, such as "have no mask", and ends with `remedy`.
    """
    if missing := [name for name in names if name not in files]:
        raise UserError(
            f"{len(missing):,} of {len(names):,} images {lack} in {folder}: {shortened(missing)}"
            f"{remedy}"
        )


def folder_of(path: str) -> str:
    """Returns the folder of a data set with a trailing slash.

    Raises:
      UserError: the folder does not exist or is not local.
    """
    if not path:
        raise UserError(
            "data.path is empty: give the folder of the data, --config.data.path=FOLDER"
        )
    if "://" in path:
        raise UserError(f"{path} (data.path): masks are read from disks; copy or mount the bucket")
    if not os.path.isdir(path):
        raise UserError(f"there is no folder {path!r} (data.path)")
    return os.path.join(path, "")


def _folders(where: str) -> list[str]:
    return [os.path.basename(folder) for folder in folders_in(where)]


def _two_folders(where: str, map_folders: Sequence[str]) -> tuple[str, str] | None:
    """Returns the names of the image and map folders in `where`; None if one is missing."""
    named = {name.lower(): name for name in _folders(where)}
    images = next((named[name] for name in IMAGE_FOLDERS if name in named), None)
    maps = next((named[name] for name in map_folders if name in named), None)
    return (images, maps) if images and maps else None


def _splits_in(where: str) -> dict[str, str]:
    return {split: name for name in _folders(where) if (split := split_name(name))}


def _files(folder: str) -> list[str]:
    start = len(os.path.join(folder, ""))
    return [path[start:] for path in walk(folder)]


def _by_name(folder: str, files: Sequence[str], end: str) -> dict[str, str]:
    """Returns the files by name. Files whose stems do not end with `end` are skipped.

    A file's name is its path without suffix and without `end`: `x/a` for `x/a_leftImg8bit.png`, if
    `end` is `_leftImg8bit`.

    Raises:
      UserError: two files have the same name.
    """
    named: dict[str, str] = {}
    for file in sorted(files):
        stem = os.path.splitext(file)[0]
        if not stem.endswith(end):
            continue
        if (other := named.setdefault(stem.removesuffix(end), file)) != file:
            raise UserError(
                f"{folder} has two files of one name, {as_text(other)} and {as_text(file)}: rename "
                "one of them"
            )
    return named


def _listed(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8-sig") as lines:
            return [line.split()[0] for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def shortened(names: Sequence[str]) -> str:
    """Returns a text with the first file names, for an error."""
    more = " ..." if len(names) > SHOWN else ""
    return ", ".join(map(as_text, names[:SHOWN])) + more
