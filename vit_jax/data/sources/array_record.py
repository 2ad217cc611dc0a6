"""ArrayRecord files of tf.Examples, read without TensorFlow."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from vit_jax.data.fields import TEXT, caption_keys, check_captions
from vit_jax.data.labels import check_lists, not_indices, one_hot_width
from vit_jax.data.sources.base import Example, Source, naming, spread
from vit_jax.data.sources.folder_rules import of_system
from vit_jax.data.sources.kind import SourceKind
from vit_jax.data.sources.slices import shuffled
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Records(Source):
    """ArrayRecord files of tf.Examples.

    TFDS is imported when the source is opened or unpickled, and never in `__getitem__`. Imports in
    two threads at the same time may deadlock (etils' lazy modules before Python 3.12).
    """

    name: str
    records: object
    # Function that converts the features of a tf.Example to an `Example`.
    read: Callable[[Mapping], Example]
    class_names: tuple[str, ...]
    max_labels: int  # Maximum number of labels of an example.
    each_labelled: bool = False  # True: an example without a label raises an error.
    # True: labels are one-hot or multi-hot rows. False: they are lists of class indices.
    one_hot: bool = False
    numbered: bool = False
    distinct: bool = True  # A label that occurs twice in an example counts once.
    shards: tuple[tuple[str, int], ...] = ()  # Name and number of records of each file.
    # Name of the feature with the captions; None: captions are not read.
    caption_key: str | None = None
    captions_digest: str = ""  # Hash of all captions; empty if unknown.
    _last: threading.local = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=threading.local
    )
    _parse: Callable = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example as Message

        object.__setattr__(self, "_parse", Message.FromString)

    def __reduce__(self):
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        example = self._example(index)
        labels = example.labels
        if self.one_hot:
            labels = self._indices(index, labels)
        for label in labels:
            if not 0 <= label < len(self.class_names):
                raise UserError(
                    f"{self.describe(index)} has the label {label}, outside the data set's "
                    f"{len(self.class_names)} classes"
                )
        if self.distinct and len(set(labels)) < len(labels):
            if len(labels) == len(self.class_names):
                raise UserError(f"{self.describe(index)}: {not_indices(labels, len(labels))}")
            labels = tuple(dict.fromkeys(labels))
        if not labels and self.each_labelled:
            raise UserError(f"{self.describe(index)} has no label, and the objective needs one")
        if len(labels) > self.max_labels and self.class_names:
            raise UserError(
                f"{self.describe(index)} has {len(labels)} labels; at most {self.max_labels} are "
                "supported"
            )
        return example._replace(labels=labels)

    @property
    def fields(self):
        return (TEXT,) if self.caption_key else ()

    def fields_of(self, index):
        if not self.caption_key:
            return {}
        features = self._features(index)
        with naming(self.describe(index)):
            captions = caption_values(features, self.caption_key)
        return {TEXT: check_captions(captions, self.describe(index))}

    def known_fields(self, indices=None):
        return (self.captions_digest.encode(),)

    def _features(self, index: int) -> Mapping:
        """Returns the features of an example.

        Each thread caches its last example, because the pipeline reads captions after the image.
        """
        if getattr(self._last, "index", None) == index:
            return self._last.features
        try:
            features = self._parse(self.records[index]).features.feature
        except Exception as error:  # From the C++ reader, the protocol buffer or the file system.
            raise UserError(f"cannot read {self.describe(index)}: {first_line(error)}") from error
        if self.caption_key:
            self._last.index, self._last.features = index, features
        return features

    def _example(self, index: int) -> Example:
        features = self._features(index)
        with naming(self.describe(index)):
            return self.read(features)

    def _indices(self, index: int, row: tuple[int, ...]) -> tuple[int, ...]:
        classes = len(self.class_names)
        if len(row) != classes or not set(row) <= {0, 1}:
            raise UserError(
                f"{self.describe(index)}: other labels are rows of {classes} zeros and ones, and "
                f"this one is {list(row[:8])}"
            )
        return tuple(label for label, is_set in enumerate(row) if is_set)

    def checked(self, samples: int = 16) -> "Records":
        """Checks a few examples; returns a copy of the source in which `one_hot` is set.

        `one_hot` is True if the labels of these examples are one-hot or multi-hot.

        Raises:
          UserError: an example lacks the image, a required label or a caption, or has a label of an
            unsupported kind.
        """
        labels = [self._example(index).labels for index in spread(len(self), samples)]
        labels = [label for label in labels if label]
        counts, values = np.array([len(label) for label in labels]), np.array(sum(labels, ()))
        one_hot = one_hot_width(counts, values, len(self.class_names)) is not None
        if not one_hot:
            with naming(self.name):
                check_lists(counts, values, len(self.class_names))
        source = dataclasses.replace(self, one_hot=one_hot)
        for index in spread(len(self), samples):
            source[index]
            source.fields_of(index)
        return source

    def describe(self, index):
        return f"{self.name} example {index}"

    def stored_files(self, indices=None):
        return self.shards

    def fair_order(self):
        return shuffled(len(self))  # Files may be sorted by class.


def image_and_labels(features: Mapping, label_key: str | None) -> Example:
    """Returns the encoded image (the feature `image`) and the labels of a tf.Example.

    Args:
      label_key: name of the feature with the labels; None: labels are not read.

    Raises:
      UserError: the image or the label is missing, or has an unsupported type.
    """
    image = feature_values(features, "image", "bytes_list")
    if len(image) != 1:
        raise UserError(
            f"the feature 'image' has {len(image)} values, and must be one encoded image"
        )
    return Example(image[0], feature_values(features, label_key, "int64_list") if label_key else ())


def caption_values(features: Mapping, key: str) -> tuple[str, ...]:
    """Returns the captions of a tf.Example from its text feature `key`.

    Bytes that are not valid UTF-8 become surrogates, which `check_captions` rejects.

    Raises:
      UserError: the feature does not exist, or is not text.
    """
    values = feature_values(features, key, "bytes_list", "data.caption_key")
    return tuple(value.decode(errors="surrogateescape") for value in values)


KINDS = {"bytes_list": "text or bytes", "float_list": "floats", "int64_list": "integers"}


def feature_values(features: Mapping, key: str, kind: str, option: str = "data.label_key") -> tuple:
    """Returns the values of a feature of a tf.Example; an empty tuple if the feature is empty.

    Raises:
      UserError: the feature does not exist or is not a `kind`: `bytes_list`, `float_list` or
        `int64_list`. The message names the `option` that defines the feature.
    """
    option = f" ({option})" if key != "image" else ""
    if key not in features:
        kinds = {name: features[name].WhichOneof("kind") or kind for name in sorted(features)}
        there = ", ".join(f"{name} ({KINDS[its_kind]})" for name, its_kind in kinds.items())
        raise UserError(f"there is no feature {key!r}{option}; there are: {there}")
    stored = features[key].WhichOneof("kind")
    if stored not in (None, kind):
        raise UserError(
            f"the feature {key!r}{option} holds {KINDS[stored]}, and must hold {KINDS[kind]}"
        )
    return tuple(getattr(features[key], kind).value)


def array_records(
    path: str,
    label_key: str | None,
    num_classes: int | None,
    each_labelled: bool = False,
    caption_key: str | None = None,
) -> Records:
    """Opens ArrayRecord files that have no TFDS metadata.

    Args:
      path: a glob pattern, local or `gs://`, such as `/data/train-*.array_record`.
      label_key: name of the feature with the labels; None: labels are not read.
      each_labelled: True: an example without a label raises an error.
      caption_key: name of the feature with the captions; None: captions are not read.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from etils import epath

    refuse_s3(path)
    if label_key is None:
        num_classes = 0
    elif num_classes is None:
        raise UserError("ArrayRecord files contain no number of classes: give data.num_classes")
    pattern = epath.Path(path)
    matching = pattern.parent.glob(pattern.name)
    files = sorted(str(file) for file in matching if not of_system(file.name))
    if not files:
        raise UserError(f"no files {path} (data.path)")
    try:
        records = ArrayRecordDataSource(files)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    read = partial(image_and_labels, label_key=label_key)
    names, labelled = tuple(map(str, range(num_classes))), each_labelled and num_classes > 0
    shards = tuple((file.name, file.stat().length) for file in map(epath.Path, files))
    source = Records(path, records, read, names, 16, labelled, numbered=True, shards=shards)
    if caption_key is not None:
        features = source._features(0)
        found = (name for name in text_keys(caption_key) if name in features)
        source = dataclasses.replace(source, caption_key=next(found, caption_key))
    return source.checked()


def text_keys(caption_key: str) -> list[str]:
    """Returns the names that the feature with the captions may have in a tf.Example."""
    return [name for key in caption_keys(caption_key) for name in (key, f"{key}/text")]


def refuse_s3(path: str) -> None:
    """Raises UserError for an S3 path, which the reader of ArrayRecord files does not support."""
    if path.startswith("s3://"):
        raise UserError(
            f"{path} (data.path): ArrayRecord files are read from disks and gs://; mount the "
            "bucket, or copy them"
        )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the error's type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ARRAY_RECORD = SourceKind(
    "array_record",
    "ArrayRecord files of tf.Examples",
    lambda split, options: array_records(
        options.path,
        options.label_key,
        options.num_classes,
        options.each_labelled,
        options.caption_key if TEXT in options.fields else None,
    ),
    path="a pattern of files, /data/train-*.array_record, local or gs://",
    stands_alone=False,  # The files do not contain the number of classes.
)
