"""ArrayRecord files of tf.Examples, which are read without TensorFlow."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.kind import SourceKind
from vit_jax.data.sources.slices import shuffled
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Records(Source):
    """ArrayRecord files of tf.Examples; `read` takes what is wanted of one's features.

    Opening and unpickling import TFDS, `__getitem__` never does: two threads that import it at once may wait
    for each other for ever (etils' lazy modules before Python 3.12).
    """

    name: str
    records: object
    read: Callable[[Mapping], Example]
    class_names: tuple[str, ...]
    max_labels: int
    _parse: Callable = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example as Message

        object.__setattr__(self, "_parse", Message.FromString)

    def __reduce__(self):
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        try:
            features = self._parse(self.records[index]).features.feature
        except Exception as error:  # The C++ reader's, a protocol buffer's, or the file system's.
            raise UserError(f"cannot read {self.describe(index)}: {first_line(error)}") from error
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


def array_records(path: str, label_key: str | None, num_classes: int | None) -> Records:
    """ArrayRecord files without TFDS's description.

    Args:
      path: a pattern of files, `/data/train-*.array_record`, local or `gs://`.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from etils import epath

    refuse_s3(path)
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
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    read = partial(image_and_labels, label_key=label_key)
    return Records(path, records, read, tuple(map(str, range(num_classes))), max_labels=16)


def refuse_s3(path: str) -> None:
    """Raises UserError for a path that the reader of ArrayRecord files has no way to."""
    if path.startswith("s3://"):
        raise UserError(
            f"{path} (data.path): ArrayRecord files are read from disks and gs://; mount the bucket, "
            "or copy them"
        )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ARRAY_RECORD = SourceKind(
    "array_record",
    "ArrayRecord files of tf.Examples",
    lambda split, options: array_records(options.path, options.label_key, options.num_classes),
    path="a pattern of files, /data/train-*.array_record, local or gs://",
    stands_alone=False,  # The files do not say how many classes there are.
)
