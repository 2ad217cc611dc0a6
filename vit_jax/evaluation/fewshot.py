"""Few-shot linear evaluation (ViT paper, section 4.1), with big_vision's settings.

The model is frozen. A linear classifier is fitted by least squares to the features of a few
training images per class, and evaluated on the whole test split.
"""

import contextlib
import hashlib
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.sources import SOURCES, DataSet, data_set, open_source
from vit_jax.data.sources.base import Source, Subset, check_labelled, fingerprint, lacking
from vit_jax.data.sources.pairs import DEV
from vit_jax.errors import UserError
from vit_jax.evaluation import least_squares
from vit_jax.evaluation.features import Extractor, Features, extractor_of, single_labels
from vit_jax.parallel.mesh import make_mesh, over_devices
from vit_jax.progress import Progress

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
PENALTY = 2.0**10
# Training and test slices of a folder that has class folders, but no splits.
HALVES = ("all[:80%]", "all[80%:]")

# Default data sets of the few-shot suite. As in big_vision, ImageNet's training images are the
# first 65,000 images of `train`.
DATA_SETS = tuple(
    map(
        data_set,
        (
            "tfds:caltech_birds2011",
            "tfds:caltech101",
            "tfds:cars196:2.1.0",
            "tfds:cifar100",
            "tfds:colorectal_histology@train[:2000],train[2000:]",
            "tfds:dtd",
            "tfds:imagenet2012@train[:65000],validation",
            "tfds:oxford_iiit_pet",
            "tfds:uc_merced@train[:1000],train[1000:]",
        ),
    )
)


class TooFewImages(UserError):
    """Error: a class has fewer training images than shots.

    The attribute `most` is the largest number of shots for which all classes have enough images.
    """

    def __init__(self, name: str, class_name: str, most: int, shots: int):
        self.class_name, self.most = class_name, most
        super().__init__(
            f"{name}: class {class_name!r} has {most} training images, fewer than {shots} shots; "
            f"{most} are the most that all classes have"
        )


class Accuracy(NamedTuple):
    """Test accuracies of all seeds, for one number of shots and one L2 penalty."""

    shots: int
    penalty: float
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def deviation(self) -> float:
        """Sample std of the accuracy over the seeds (divisor: seeds - 1); 0 for a single seed."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else 0.0


class FewShotTask:
    """Few-shot evaluation on a data set.

    A few training images are selected for each class. All other training images are never read.

    Args:
      name: name of the data set, for messages and metrics.
      seeds: random seeds. Each seed defines a random order of the images of each class. The first k
        images of a class are used for k shots.

    Raises:
      TooFewImages: a class has fewer images than shots.
      UserError: an image does not have exactly one label.
    """

    def __init__(
        self,
        name: str,
        train: Source,
        test: Source,
        shots: Sequence[int] = SHOTS,
        seeds: Sequence[int] = SEEDS,
        log: Callable[[str], None] = print,
    ):
        self.name, self.classes, self.test = name, len(train.class_names), test
        self.shots, self.seeds = tuple(shots), tuple(seeds)
        labels = read_single_labels(name, train, log)
        self.chosen = choose(labels, train.class_names, max(shots), seeds, name)
        indices = np.unique(np.concatenate([*self.chosen.values()], axis=None))
        self.train = Subset(train, indices)

    def fingerprint(self) -> dict[str, int | str]:
        """Returns a fingerprint of all training, test and few-shot images."""
        chosen = np.concatenate([*self.chosen.values()]).tobytes()
        digest = hashlib.blake2b(chosen, digest_size=8).hexdigest()
        return fingerprints(self.train, self.test) | {"chosen images": digest}

    def accuracies(
        self,
        extractor: Extractor,
        params: dict,
        penalties: Sequence[float] = (PENALTY,),
        go_on: Callable[[], bool] = lambda: True,
        log: Callable[[str], None] = print,
    ) -> list[Accuracy] | None:
        """Returns an `Accuracy` for each combination of a number of shots and a penalty.

        Args:
          go_on: function that is called before each batch and each fit. If it returns False, the
            result is None.
        """
        train = extractor(params, self.train, go_on)
        test = train and extractor(params, self.test, go_on)
        if test is None:
            return None
        by_shots = {}
        mesh = extractor.mesh
        features = over_devices(test.values, mesh)
        targets = over_devices(test.labels, mesh, fill=-1)
        for shots in self.shots:
            for seed in self.seeds:
                if not go_on():
                    return None
                values, labels = self._pick(train, shots, seed)
                fitted = least_squares.fit(values, labels, self.classes, penalties, mesh, log)
                for penalty, classifier in zip(penalties, fitted, strict=True):
                    right = least_squares.accuracy(classifier, features, targets, mesh)
                    by_shots.setdefault((shots, penalty), {})[seed] = right
        return [Accuracy(shots, penalty, by_seed) for (shots, penalty), by_seed in by_shots.items()]

    def _pick(self, train: Features, shots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns features and labels of the readable few-shot training images of a seed."""
        numbers = self.chosen[seed][:, :shots].ravel()
        rows = np.flatnonzero(np.isin(self.train.indices[train.indices], numbers))
        return train.values[rows], train.labels[rows].max(axis=1)


def few_shot(
    model: nnx.Module,
    train: Source,
    test: Source,
    *,
    name: str = "the data set",
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    penalties: Sequence[float] = (PENALTY,),
    mesh: Mesh | None = None,
    batch_size: int = 128,
    workers: int | None = None,
    threads: int | None = None,
    log: Callable[[str], None] = print,
) -> list[Accuracy]:
    """Returns few-shot accuracies of a loaded model on one data set.

    For several data sets, use `FewShotTask` with one `Extractor`.

    Args:
      model: model from `load_model`. Its head is not used; its pre-logits layer is used.
      train, test: images of the data set.
      name: name of the data set, for messages.
      shots: numbers of training images per class.
      seeds: random seeds for the choice of training images.
      penalties: L2 penalties of least squares.
      mesh: mesh of devices; default: all devices.
      batch_size: global batch size.
      workers, threads: numbers of processes and threads that decode images; None: chosen
        automatically.
      log: callback for messages about progress and notes.

    Raises:
      UserError: a class has fewer images than shots, an image does not have exactly one label, or
        the model's images are not square.
    """
    mesh = mesh or make_mesh()
    task = FewShotTask(name, train, test, shots, seeds, log)
    options = dict(batch_size=batch_size, workers=workers, threads=threads, log=log)
    extractor, params = extractor_of(model, mesh, **options)
    return task.accuracies(extractor, params, penalties, log=log)


def cut_in_two(described: DataSet, log: Callable[[str], None] = print) -> DataSet:
    """Selects slices of a data set without splits as its training and test images.

    An example is a folder with class folders, but without the folders `train` and `test`. The
    slices are shares of each class. All other data sets are returned unchanged, and so is a data
    set for which the user has named slices.
    """
    path, splits = described.path, (described.train_split, described.test_split)
    if splits != ("train", "test") or not SOURCES[described.kind].is_whole(path):
        return described
    train, test = HALVES
    log(
        f"{path} has no folders train and test: {train} of each class is to train and {test} to "
        f"test (folder:{path}@TRAIN,TEST gives other numbers)"
    )
    return described._replace(train_split=train, test_split=test)


def with_test_split(described: DataSet, log: Callable[[str], None] = print) -> DataSet:
    """Selects a validation split, such as `val`, for a data set without the split `test`.

    The data set is returned unchanged if it has the split `test`, if it has no validation split, or
    if the user has selected another split than `test`.
    """
    splits: Collection[str] = ()
    if described.test_split == "test":
        with contextlib.suppress(UserError):  # It is raised again when the data are opened.
            splits = SOURCES[described.kind].splits_at(described.path)
    dev = next((name for name in DEV if name in splits), None)
    if dev is None or "test" in splits:
        return described
    log(no_test_split(described, dev))
    return described._replace(test_split=dev)


def no_test_split(described: DataSet, split: str) -> str:
    """Returns the log line for a data set that is evaluated on `split` in place of `test`."""
    return (
        f"{described.name} has no split test: {split} is evaluated "
        f"(--set={described.kind}:{described.path}@TRAIN,TEST selects other splits)"
    )


def open_data_set(
    described: DataSet,
    image_size: int = 224,
    label_key: str = "label",
    log: Callable[[str], None] = print,
) -> tuple[Source, Source]:
    """Opens a data set's training and test images, with the same class indices in both.

    Raises:
      UserError: the data set does not exist, is empty or cannot be read.
    """
    arguments = dict(path=described.path, image_size=image_size, each_labelled=True)
    arguments["label_key"] = label_key
    train = open_source(described.kind, described.train_split, **arguments)
    names = train.class_names
    if len(names) < 2:
        raise UserError(
            f"{described.path} has the single class {', '.join(names)}, and an evaluation needs "
            "two or more: give the folder that contains the folders of the classes"
        )
    test = open_source(described.kind, described.test_split, class_names=names, **arguments)
    check_labelled(train, "training")
    check_labelled(test, "test")
    for line in (*lacking("training", train), *lacking("test", test)):
        log(f"{described.name}: {line.removeprefix('note: ')}")
    return train, test


def choose(
    labels: np.ndarray, class_names: Sequence[str], shots: int, seeds: Sequence[int], name: str
) -> dict[int, np.ndarray]:
    """Draws random training images of each class.

    Returns:
      A dict from each seed to the indices of the drawn images, int64 `[classes, shots]`.

    Raises:
      TooFewImages: a class has fewer images than shots.
    """
    counts = np.bincount(labels, minlength=len(class_names))
    least = counts.argmin()
    if counts[least] < shots:
        raise TooFewImages(name, class_names[least], int(counts[least]), shots)
    places = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return {
        seed: np.stack(
            [
                np.random.default_rng((seed, label)).permutation(images)[:shots]
                for label, images in enumerate(places)
            ]
        )
        for seed in seeds
    }


def fingerprints(train: Source, test: Source, samples: int = 16) -> dict[str, int | str]:
    """Returns the fingerprints of both splits, which include `samples` examples of each."""
    of_both = {"training": fingerprint(train, samples), "test": fingerprint(test, samples)}
    return {
        f"{split} {key}": value
        for split, of_split in of_both.items()
        for key, value in of_split.items()
    }


def read_single_labels(name: str, source: Source, log: Callable[[str], None]) -> np.ndarray:
    """Reads each image's label, int32 `[images]`; raises UserError unless each has one."""
    return single_labels(source.label_table(Progress(name, len(source), "labels", log)), name)
