"""TensorFlow Datasets prepared as ArrayRecord; TensorFlow is not needed."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from vit_jax.data.fields import BOXES, MASK, TEXT
from vit_jax.data.sources.array_record import (
    Records,
    first_line,
    image_and_labels,
    refuse_s3,
    text_keys,
)
from vit_jax.data.sources.kind import SourceKind, SourceOptions, last_folder
from vit_jax.data.sources.slices import absolute
from vit_jax.data.sources.tfds_dense import DenseRecords, dense_reader
from vit_jax.errors import UserError, nearest

PREPARED = "prepared.json"  # File with settings, sizes and hashes that `vit_jax.prepare` writes.


def open_tfds(split: str, options: SourceOptions) -> Records:
    """Opens a split of a TFDS data set, without TensorFlow.

    The examples have labels and captions, or boxes or masks, as the options require. Slices of the
    split may be nested, and several splits may be joined by `+`.
    """
    builder, label_key = tfds_builder(options.path), options.label_key
    name = f"{builder.info.full_name} {split}"
    if {BOXES, MASK} & {*options.fields}:
        tfds_feature(builder, "image")
        field, names, read_field = dense_reader(builder, options)
        read = partial(image_and_labels, label_key=None)
        records, shards = tfds_split(builder, split), tfds_shards(builder, split)
        return DenseRecords(
            name, records, read, names, 1, shards=shards, field=field, read_field=read_field
        )
    names, multiple = _classes(builder, label_key)
    return Records(
        name,
        tfds_split(builder, split),
        partial(image_and_labels, label_key=label_key),
        names,
        # The metadata do not contain the maximum number of labels. 16 is enough even for JFT.
        max_labels=16 if multiple else 1,
        each_labelled=options.each_labelled and label_key is not None,
        shards=tfds_shards(builder, split),
        **(_captions_of(builder, split, options.caption_key) if TEXT in options.fields else {}),
    )


def _classes(builder, label_key: str | None) -> tuple[tuple[str, ...], bool]:
    """Returns the class names, and True if an image may have several labels.

    `label_key` is the name of the feature with the labels; None: labels are not read.

    Raises:
      UserError: the feature does not exist, or does not contain classes.
    """
    feature = tfds_feature(builder, label_key or "image")
    if label_key is None:
        return (), False
    if not _is_class(feature):
        classes = [name for name, kind in builder.info.features.items() if _is_class(kind)]
        raise UserError(
            f"the feature {label_key!r} (data.label_key) of {builder.info.full_name!r} is a "
            f"{type(feature).__name__}, and must be a ClassLabel or a Sequence of such"
            + (f"; there are: {', '.join(classes)}" if classes else "")
        )
    inner = getattr(feature, "feature", None)
    return tuple((inner or feature).names), inner is not None


def _is_class(feature) -> bool:
    import tensorflow_datasets as tfds

    return isinstance(getattr(feature, "feature", feature), tfds.features.ClassLabel)


def _captions_of(builder, split: str, caption_key: str) -> dict[str, str]:
    """Returns the arguments of `Records` about captions; raises UserError without `caption_key`."""
    found = caption_feature(builder.info.features, caption_key)
    if found is None:
        there = ", ".join(text_features(builder.info.features)) or "none"
        raise UserError(
            f"the data set {builder.info.full_name!r} has no captions {caption_key!r}: name the "
            f"feature with --config.data.caption_key=NAME; features of text are: {there}"
        )
    return dict(caption_key=found, captions_digest=_captions_digest(builder, split))


def _captions_digest(builder, split: str) -> str:
    """Returns a text that changes if the captions of a split such as `train+test` change.

    It contains the splits' hashes of captions that `vit_jax.prepare` stores. Without these hashes,
    it contains the splits' sizes in bytes, which change only if the length of a caption changes.
    Computing hashes would require reading all images.
    """
    from etils import epath

    digests = {name: f"{part.num_bytes} bytes" for name, part in builder.info.splits.items()}
    file = epath.Path(builder.data_path) / PREPARED
    try:
        if file.exists():
            digests = json.loads(file.read_text()).get("captions") or digests
        parts = digests if re.search(r"\ball\b", split) else re.findall(r"[\w-]+", split)
        return ",".join(digests[name] for name in digests if name in parts)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is damaged: {first_line(error)}") from error


def caption_feature(features: Mapping, caption_key: str) -> str | None:
    """Returns the name of the caption feature in a tf.Example, such as `captions/text`.

    Args:
      caption_key: name of a feature, which is a text, a sequence of texts, or a sequence of
        mappings with the key `text`. If it is the default name, all names in `CAPTION_KEYS` are
        tried.

    Returns:
      The name; None if the data set has no such feature.
    """
    there = set(text_features(features))
    return next((name for name in text_keys(caption_key) if name in there), None)


def text_features(features: Mapping, above: str = "", nested: int = 0) -> Iterator[str]:
    """Yields the names, in a tf.Example, of all features that are texts or sequences of texts.

    Args:
      above: prefix of the names: the names of the features that contain these features, such as
        `captions/`.
      nested: number of sequences that contain these features.
    """
    from tensorflow_datasets.core import features as kinds
    from tensorflow_datasets.core.utils import dtype_utils

    for name, feature in features.items():
        depth = nested
        while isinstance(feature, kinds.Sequence):
            feature, depth = feature.feature, depth + 1
        if isinstance(feature, kinds.FeaturesDict):
            yield from text_features(feature, f"{above}{name}/", depth)
        is_scalar = isinstance(feature, kinds.Tensor) and feature.shape == ()
        if is_scalar and depth < 2 and dtype_utils.is_string(feature.np_dtype):
            yield above + name


def tfds_builder(path: str):
    """Returns the builder of a prepared TFDS data set.

    Args:
      path: `name`, `name:data_dir`, or the folder with the data set's files.
    """
    import tensorflow_datasets as tfds

    if not path:
        raise UserError(
            "data.path is empty: give the name of a TFDS data set, such as imagenet2012"
        )
    refuse_s3(path)
    # A number after a colon is a version and part of the name, as in imagenet2012:5.1.0. Any other
    # text after a colon is the data_dir.
    name, data_dir = re.fullmatch(r"((?:gs://)?[^:]*(?::[\d.*]+)?)(?::(.+))?", path).groups()
    is_folder = _is_folder(name)
    try:
        if is_folder:
            builder = tfds.builder_from_directory(os.path.expanduser(name))
        else:
            builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except (FileNotFoundError, tfds.core.dataset_info.DatasetInfoFileError) as error:
        # The path may be the folder of a data set or a folder of data sets: search two levels.
        folder = Path(os.path.expanduser(name))
        inner = [*folder.glob("*/dataset_info.json"), *folder.glob("*/*/dataset_info.json")]
        there = ", ".join(str(file.parent) for file in sorted(inner)[:5])
        there = f"; there is one in {there}" if inner else f": {first_line(error)}"
        raise UserError(f"no prepared data set in {name} (data.path){there}") from error
    # TFDS does not validate a folder's JSON files, so any error is possible.
    except Exception as error:
        if is_folder or not isinstance(error, tfds.core.DatasetNotFoundError | ValueError):
            raise UserError(
                f"cannot read the data set {name} (data.path): {first_line(error)}"
            ) from error
        raise UserError(
            f"TFDS has no data set {name!r} (data.path): {first_line(error)}; docs/data.md "
            "describes how to use your own data"
        ) from error
    if not builder.info.splits:
        command = f"tfds build {re.sub(r':.*[*].*', '', name)} --file_format=array_record"
        command += f" --data_dir={data_dir}" if data_dir else ""
        if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
            page = f"https://www.tensorflow.org/datasets/catalog/{builder.name}"
            command += " --manual_dir=DIR, with the files listed at "
            command += f"{page} downloaded by hand into DIR"
        missing = f"data set {name!r} is not prepared in {builder.data_path}"
        raise UserError(f"{missing}; with tensorflow installed, run: {command}")
    return builder


def tfds_feature(builder, key: str):
    """Returns a feature of a TFDS data set.

    Raises:
      UserError: the data set has no feature with this name, or no feature `image`.
    """
    features = builder.info.features
    for needed in ("image", key):
        if needed not in features:
            raise UserError(
                f"data set {builder.info.full_name!r} has no feature {needed!r} (data.label_key "
                f"is {key!r}); {nearest(needed, features)}"
            )
    return features[key]


def tfds_split(builder, split: str):
    """Returns a random-access sequence of the serialized records of a TFDS split."""
    import tensorflow_datasets as tfds

    name, split = builder.info.full_name, _one_slice(builder, split)
    try:
        # Return raw bytes, because `Records` parses a record in 0.01 ms, and TFDS in 0.1 ms.
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        return builder.as_data_source(split=split, deserialize_method=raw).data_source
    except (ValueError, KeyError, NotImplementedError) as error:
        if "array_record" in str(error).lower() or "random access" in str(error).lower():
            raise UserError(
                f"data set {name!r} is not stored as ArrayRecord; run: python -m vit_jax.prepare "
                f"{builder.data_path} --out=DIR"
            ) from error
        raise UserError(
            f"data set {name!r} has no split {split!r}; there are: {', '.join(builder.info.splits)}"
        ) from error


def tfds_shards(builder, split: str) -> tuple[tuple[str, int], ...]:
    """Returns the names of a split's files, and the number of records in each file."""
    instructions = builder.info.splits[_one_slice(builder, split)].file_instructions
    return tuple((os.path.basename(one.filename), one.examples_in_shard) for one in instructions)


def _one_slice(builder, split: str) -> str:
    """Returns a split without nested slices, which TFDS does not support."""
    if "][" not in split:
        return split
    return absolute(split, {key: part.num_examples for key, part in builder.info.splits.items()})


def _is_folder(path: str) -> bool:
    info = os.path.join(path, "dataset_info.json")
    return path.startswith(("/", ".", "~", "gs://")) or os.path.isfile(info)


def _name_of(path: str) -> str:
    return last_folder(path) if _is_folder(path) else re.split("[:/]", path)[0]


TFDS = SourceKind(
    "tfds",
    "a data set of TensorFlow Datasets, prepared as ArrayRecord",
    open_tfds,
    path="NAME or NAME:DATA_DIR of a prepared data set, or the folder that holds its files",
    reads_slices=True,
    name_of=_name_of,
    splits_at=lambda path: tuple(tfds_builder(path).info.splits),
)
