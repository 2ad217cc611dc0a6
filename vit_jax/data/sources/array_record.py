"""ArrayRecord files of tf.Examples, by themselves and as TFDS describes them; TensorFlow is not needed."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.slices import absolute, shuffled
from vit_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Records(Source):
    """ArrayRecord files of tf.Examples; `read` takes what is wanted of one's features."""

    name: str
    records: object
    read: Callable[[Mapping], Example]
    class_names: tuple[str, ...]
    max_labels: int

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example as Message

        try:
            features = Message.FromString(self.records[index]).features.feature
        except Exception as error:  # The C++ reader's, a protocol buffer's, or the file system's.
            raise UserError(f"cannot read {self.describe(index)}: {_first_line(error)}") from error
        example = self.read(features)
        for label in example.labels:
            if not 0 <= label < len(self.class_names):
                raise UserError(
                    f"{self.describe(index)} has the label {label}, outside the data set's "
                    f"{len(self.class_names)} classes"
                )
        return Example(example.image, example.labels[: self.max_labels])

    def describe(self, index):
        return f"{self.name} example {index}"

    def fair_order(self):
        return shuffled(len(self))  # Files may hold class after class.


def image_and_labels(features: Mapping, label_key: str | None) -> Example:
    """The encoded `image` of a tf.Example and its label or labels; none without a key."""
    (image,) = features["image"].bytes_list.value
    return Example(image, tuple(features[label_key].int64_list.value) if label_key else ())


def tfds_records(path: str, split: str, label_key: str | None) -> Records:
    """A TFDS data set prepared as ArrayRecord, read without TensorFlow.

    Args:
      path: `name`, `name:data_dir`, or the folder with its files.
      split: may be sliced and joined as TFDS allows, and slices cut again.
    """
    import tensorflow_datasets as tfds

    builder = tfds_builder(path)
    feature = tfds_feature(builder, label_key or "image")
    multiple = label_key is not None and not isinstance(feature, tfds.features.ClassLabel)
    labels = feature.feature if multiple else feature
    # The widest label set is not in a data set's description: 16 holds JFT's with room to spare.
    return Records(
        f"{builder.info.full_name} {split}",
        tfds_split(builder, split),
        partial(image_and_labels, label_key=label_key),
        tuple(labels.names) if label_key else (),
        max_labels=16 if multiple else 1,
    )


def tfds_builder(path: str):
    """The builder of a TFDS data set that is prepared.

    Args:
      path: `name`, `name:data_dir`, or the folder with its files.
    """
    import tensorflow_datasets as tfds

    if not path:
        raise UserError("data.path is empty: give the name of a TFDS data set, such as imagenet2012")
    # A version (imagenet2012:5.1.0) is part of the name, a data_dir starts like a path.
    name, data_dir = re.fullmatch(r"((?:gs://)?[^:]*(?::[\d.*]+)?)(?::(.+))?", path).groups()
    is_folder = name.startswith(("/", ".", "~", "gs://"))
    try:
        if is_folder:
            builder = tfds.builder_from_directory(os.path.expanduser(name))
        else:
            builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except (FileNotFoundError, tfds.core.dataset_info.DatasetInfoFileError) as error:
        folder = Path(os.path.expanduser(name))  # Of a name or of all of them; not all that lies below.
        inner = [*folder.glob("*/dataset_info.json"), *folder.glob("*/*/dataset_info.json")]
        there = ", ".join(str(file.parent) for file in sorted(inner)[:5])
        there = f"; there is one in {there}" if inner else f": {_first_line(error)}"
        raise UserError(f"no prepared data set in {name} (data.path){there}") from error
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"TFDS knows no data set {name!r} (data.path): {_first_line(error)}; give data of your own with "
            "--config.data.source and --config.data.path (docs/data.md)"
        ) from error
    if not builder.info.splits:
        by_hand = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
        command = f"tfds build {re.sub(r':.*[*].*', '', name)} --file_format=array_record"
        command += f" --data_dir={data_dir}" if data_dir else ""
        if by_hand:
            page = f"https://www.tensorflow.org/datasets/catalog/{builder.name}"
            command += f" --manual_dir=DIR, with the files that {page} names downloaded by hand into DIR"
        missing = f"data set {name!r} is not prepared in {builder.data_path}"
        raise UserError(f"{missing}; with tensorflow installed, run: {command}")
    return builder


def tfds_feature(builder, key: str):
    """A feature of a TFDS data set, which must have images too."""
    features = builder.info.features
    for needed in ("image", key):
        if needed not in features:
            raise UserError(
                f"data set {builder.info.full_name!r} has no feature {needed!r} (data.label_key is {key!r}); "
                f"{nearest(needed, features)}"
            )
    return features[key]


def tfds_split(builder, split: str):
    """The serialized records of a split of a TFDS data set, by index."""
    import tensorflow_datasets as tfds

    name = builder.info.full_name
    if "][" in split:
        split = absolute(split, {key: part.num_examples for key, part in builder.info.splits.items()})
    try:
        # Raw: TFDS takes 0.1 ms to decode a record, `Records` 0.01.
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


def array_records(path: str, label_key: str | None, num_classes: int | None) -> Records:
    """ArrayRecord files without TFDS's description.

    Args:
      path: a pattern of files, `/data/train-*.array_record`, local or `gs://`.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from etils import epath

    if label_key is None:
        num_classes = 0
    elif num_classes is None:
        raise UserError("array_record files don't say their classes: give data.num_classes")
    pattern = epath.Path(path)
    files = sorted(str(file) for file in pattern.parent.glob(pattern.name))
    if not files:
        raise UserError(f"no files {path} (data.path)")
    try:
        records = ArrayRecordDataSource(files)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from error
    read = partial(image_and_labels, label_key=label_key)
    return Records(path, records, read, tuple(map(str, range(num_classes))), max_labels=16)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
