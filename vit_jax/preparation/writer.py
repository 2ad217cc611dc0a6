"""Converts a data set of any kind to a TFDS data set in ArrayRecord format.

The steps are: index the examples, draw their order, write the shards, write the TFDS metadata.
Intermediate results are stored in the folder `.prepare/` of the data set's folder. The metadata are
written last. Until then, TFDS does not find the data set.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.decode import Box, Unreadable, open_image, why_unreadable
from vit_jax.data.sources.base import fingerprint
from vit_jax.data.sources.tfds import PREPARED as SUMMARY
from vit_jax.errors import UserError, as_text
from vit_jax.preparation import readers
from vit_jax.preparation.curation import Pool, curate, open_curated
from vit_jax.preparation.curation_page import report_curation
from vit_jax.preparation.duplicate_removal import Embedded, near_duplicates, report
from vit_jax.preparation.index import (
    Index,
    Run,
    WorkItem,
    build_index,
    choose_shots,
    class_names,
    description,
    load_index,
    locked,
    mapped,
    order_splits,
    replacing,
    training_images,
    write_json,
)
from vit_jax.preparation.kept_embeddings import Embedder, Embeddings
from vit_jax.preparation.similarity_index import check_memory

WORK = ".prepare"
CAPTIONS = "captions"  # Name of the feature with the captions of an image.
EMBEDDINGS = ".embeddings"  # Folder of cached embeddings, which all data sets in `out` share.

# Settings whose values are hashes, each with a description of a changed value. Messages about
# changed settings contain the description instead of the hashes.
OTHER = {
    "files": "other files in the source",
    "model": "another model in --embeddings",
    "curated": "other images in --retrieve_for",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a prepared data set."""

    name: str | None = None  # Name of the TFDS data set; None: the source's name.
    seed: int = 0
    limit: int | None = None  # Maximum number of examples in each split.
    # Number of files of each split; None: TFDS chooses the number by size.
    shards: int | None = None
    # Values of k. For each k, an additional split `train_<k>shot` has k images per class.
    shots: tuple[int, ...] = ()
    # Test sets, as `NAME:DIR/SPLIT`. Near-duplicates of their images are removed from the training
    # split.
    deduplicate_against: tuple[str, ...] = ()
    # Checkpoint of the model that computes embeddings for finding near-duplicates; None: perceptual
    # hashes are compared.
    embeddings: str | None = None
    similarity: float = 0.95  # Minimum cosine similarity of near-duplicates' embeddings.
    # Curated sets; each is a folder, `KIND:PATH` or `KIND:PATH@SPLIT,SPLIT`. Only the nearest
    # neighbours of their images are kept in the training split.
    retrieve_for: tuple[str, ...] = ()
    neighbours: int = 4  # Number of neighbours of each curated image that are kept.
    # For data with captions. True: images without a caption are skipped. False: they raise an
    # error.
    skip_uncaptioned: bool = False


class Split(NamedTuple):
    """A split of the prepared data set, after all its shards have been written."""

    name: str
    lengths: list[int]  # Number of examples in each shard.
    bytes: int
    skipped: list[tuple[int, str, str]]  # Skipped examples: (position in the order, name, reason).
    captions: list[str]  # Hash of the captions of each shard.


class Prepared(NamedTuple):
    """A finished data set."""

    path: str  # Value for `data.path`.
    label_key: str
    caption_key: str | None  # Value for `data.caption_key`; None: the data have no captions.
    splits: dict[str, int]
    skipped: int  # Number of unreadable images.
    removed: int  # Number of removed near-duplicates of test images.
    duplicates: int  # Number of removed near-duplicates of other training images.
    left_out: dict[str, int]  # Number of skipped files, by reason.
    folder: Path


def prepare(
    source: readers.RawDataSet,
    out: Path,
    options: Options,
    run: Run,
    write: Run,
    embedding: tuple[Embedder, Run] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Writes the data set `out/NAME/VERSION`, or resumes an interrupted preparation.

    Args:
      out: folder of TFDS data sets.
      run: function that runs the tasks of indexing and searching.
      write: function that runs the tasks of writing shards, which take longest.
      embedding: a model that computes embeddings, and a function that runs the model's tasks in
        this process.

    Raises:
      UserError: a file of the source is damaged, the data set's folder contains other files, or an
        option would have no effect.
    """
    _check_effect(source, options, embedding)
    if options.shots and source.kind == "tfds":
        source = dataclasses.replace(source, index_labels=True)
    identity = _identity(source, options.name)
    folder = out.joinpath(*identity)
    work = folder / WORK
    settings = _settings(source, options, embedding)
    if _is_finished(folder, settings):
        shutil.rmtree(work, ignore_errors=True)
        return _prepared(out, identity)
    _make_room(folder, source.root)
    with locked(work):
        for leftover in folder.glob("*.tmp"):  # Temporary files of killed processes.
            leftover.unlink(missing_ok=True)
        _claim(work, settings)
        index = build_index(source, options.seed, work, run, options.skip_uncaptioned)
        for line in description(source, index):
            log(line)
        features = _features(source, index)
        (work / "metadata").mkdir(exist_ok=True)
        features.save_config(work / "metadata")
        embeddings = Embeddings(embedding[0], out / EMBEDDINGS, embedding[1]) if embedding else None
        chosen = _choose(source, index, options, folder, run, embeddings)
        names = order_splits(source, index, chosen.left_out, options.limit, work)
        splits = _write_splits(folder, identity[0], names, source, index, options, write)
        info = _info(source, identity, folder, features)
        label_key = "labels" if index.multiple else "label"
        summary = {
            "settings": settings,
            "label_key": source.label_key if source.kind == "tfds" else label_key,
            "left_out": index.left_out,
            **_about_captions(source, splits),
        }
        _finish(folder, info, splits, chosen, summary)
    shutil.rmtree(work)
    return _prepared(out, identity)


def _check_effect(
    source: readers.RawDataSet, options: Options, embedding: tuple[Embedder, Run] | None
) -> None:
    """Raises UserError if an option would have no effect, or lacks the model for embeddings."""
    if options.retrieve_for and not embedding:
        raise UserError(
            f"retrieve_for={options.retrieve_for!r} needs embeddings: give prepare an embedding, "
            "such as (vit_jax.prepare.make_embedder(CHECKPOINT, None), run)"
        )
    if options.embeddings and not embedding:
        raise UserError(
            f"embeddings={options.embeddings!r} names the model only: give prepare an embedding, "
            f"such as (vit_jax.prepare.make_embedder({options.embeddings!r}, None), run)"
        )
    if options.skip_uncaptioned and source.caption_key is None:
        kinds = ", ".join(readers.WITH_COLUMNS)
        remedy = f"only the kinds {kinds} may have captions: remove --skip_uncaptioned"
        if source.kind in readers.WITH_COLUMNS:
            remedy = "name them with --caption_key=NAME, or remove --skip_uncaptioned"
        raise UserError(
            f"--skip_uncaptioned has no effect: no captions were found in {source.root}, data of "
            f"the kind {source.kind!r}; {remedy}"
        )


def _settings(
    source: readers.RawDataSet, options: Options, embedding: tuple[Embedder, Run] | None
) -> dict:
    """Returns the settings on which the content of the prepared data set depends."""
    settings = {
        "source": str(source.root.absolute()),
        "kind": source.kind,
        "files": source.fingerprint(),
        **dataclasses.asdict(options),
    }
    if embedding:
        settings["model"] = embedding[0].key
    if options.retrieve_for:
        settings["curated"] = [
            repr(fingerprint(open_curated(text))) for text in options.retrieve_for
        ]
    return settings


def _write_splits(
    folder: Path,
    name: str,
    splits: list[str],
    source: readers.RawDataSet,
    index: Index,
    options: Options,
    write: Run,
) -> list[Split]:
    """Writes the shards of all splits, and of the few-shot splits (`options.shots`)."""
    if options.shots:  # This first call raises errors before the splits are written.
        choose_shots(source, index, options.shots, (), folder / WORK)
    written = [_write(folder, name, split, options.shards, write) for split in splits]
    if options.shots:
        skipped = written[splits.index("train")].skipped
        for split in choose_shots(source, index, options.shots, skipped, folder / WORK):
            written.append(_write(folder, name, split, None, write))
    return written


def _about_captions(source: readers.RawDataSet, splits: list[Split]) -> dict:
    """Returns metadata about captions: the feature's name, and a hash of each split's captions."""
    if source.caption_key is None:
        return {}
    digests = {
        split.name: hashlib.blake2b("".join(split.captions).encode(), digest_size=16).hexdigest()
        for split in splits
    }
    caption_key = source.caption_key if source.kind == "tfds" else CAPTIONS
    return {"caption_key": caption_key, "captions": digests}


class Choice(NamedTuple):
    """Training examples to remove."""

    left_out: np.ndarray  # Positions of these examples in `Index.entries`.
    removed: int = 0  # Number of near-duplicates of test images.
    duplicates: int = 0  # Number of near-duplicates of other training images.


def _choose(
    source: readers.RawDataSet,
    index: Index,
    options: Options,
    folder: Path,
    run: Run,
    embeddings: Embeddings | None,
) -> Choice:
    """Selects the training examples to remove, and writes reports.

    Near-duplicates of test images are removed. With curated sets, near-duplicates within the
    training split, and images that are not neighbours of curated images, are removed as well.
    """
    if not (options.deduplicate_against or options.retrieve_for):
        return Choice(np.empty(0, np.uint32))
    work, tests = folder / WORK, options.deduplicate_against
    train = training_images(source, index, work)
    with locked(embeddings.folder) if embeddings else contextlib.nullcontext():
        embedded = None
        if embeddings:
            if options.retrieve_for:
                check_memory(len(train), embeddings.embedder.dim)
            files = embeddings.of(train, source.fingerprint(), "train")
            embedded = Embedded(files, embeddings, options.similarity)
        removed = np.empty(0, np.uint32)
        if tests:
            pairs = near_duplicates(train, tests, work, run, embedded)
            report(pairs, train, tests, folder, "similarity" if embedded else "distance")
            removed = pairs["position"]
        if not (options.retrieve_for and embedded):
            return Choice(removed, len(removed))
        pool = Pool(
            files, np.isin(train.positions, removed), options.similarity, work, embeddings.run
        )
        curated = curate(options.retrieve_for, pool, embeddings, options.neighbours)
    report_curation(curated, train, folder, options.similarity, len(removed))
    left_out = np.delete(train.positions, curated.images)
    return Choice(left_out, len(removed), int(np.count_nonzero(~curated.compared["kept"])))


# Functions for the data set's folder.


def _identity(source: readers.RawDataSet, name: str | None) -> tuple[str, ...]:
    """Returns the data set's name, its TFDS config (if it has one), and its version."""
    rest = ("1.0.0",)
    if source.kind == "tfds":
        tfds_name, *rest = _tfds_info(source).full_name.split("/")
        name = name or tfds_name
    name = name or re.sub(r"\W+", "_", source.root.resolve().name.split(".")[0]).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(
            f"{name!r} is not a name for a data set: give one of letters, digits and _ with --name"
        )
    return name, *rest


def _is_finished(folder: Path, settings: dict) -> bool:
    if not ((folder / SUMMARY).exists() and (folder / "features.json").exists()):
        return False
    _same(json.loads((folder / SUMMARY).read_text())["settings"], settings, folder)
    return True


def _make_room(folder: Path, source: Path) -> None:
    """Creates the data set's folder.

    Raises:
      UserError: the folder contains other files, the folder is inside the source, or its path is
        that of a file.
    """
    if source.resolve() in folder.resolve().parents:
        raise UserError(f"--out lies inside the source {source}: give another one")
    work = folder / WORK
    try:
        strange = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if strange and not work.exists():
            there = ", ".join(strange[:3])
            raise UserError(
                f"{folder} contains something else ({there}); give --name or another --out"
            )
        work.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.is_file())
        raise UserError(f"--out: {file} is a file") from error


def _claim(work: Path, settings: dict) -> None:
    """Starts a preparation, or resumes a preparation with the same settings.

    If the settings have changed, the preparation starts again, or raises UserError if a shard has
    already been written.
    """
    settings_file = work / "settings.json"
    # The setting `shots` may change, because few-shot splits are written last. For TFDS data sets
    # it may not become empty or cease to be, because labels are only indexed for such splits.
    settings = {key: value for key, value in settings.items() if key != "shots"}
    if settings_file.exists() and any(work.glob("shards/*.json")):
        return _same(json.loads(settings_file.read_text()), settings, work.parent)
    now = json.loads(json.dumps(settings))
    if not settings_file.exists() or json.loads(settings_file.read_text()) != now:
        for path in work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        write_json(settings_file, settings)


def _same(before: dict, now: dict, folder: Path) -> None:
    now = json.loads(json.dumps(now))
    for key, value in before.items():
        if now.get(key) != value:
            difference = OTHER.get(key, f"{key} {value!r}, now {now.get(key)!r}")
            raise UserError(
                f"{folder} was started with {difference}; give --name or another --out, or "
                "remove it"
            )


# Functions that write the shards of ordered splits.


def _write(folder: Path, name: str, split: str, shards: int | None, run: Run) -> Split:
    """Writes those shards of a split that do not exist yet."""
    from tensorflow_datasets.core import naming
    from tensorflow_datasets.core.utils import shard_utils

    work = folder / WORK
    order, index = mapped(work / f"order-{split}.npy"), load_index(work)
    size = int(index.entries["size"][order].sum(dtype=np.int64))
    usual = shard_utils.ShardConfig().get_number_shards(size, len(order))
    shards = min(shards or usual, len(order))
    bounds = [0, *shard_utils.get_shard_boundaries(len(order), shards)]
    template = naming.ShardedFileTemplate(
        data_dir=folder, dataset_name=name, split=split, filetype_suffix="array_record"
    )
    tasks = []
    for i, path in enumerate(template.sharded_filepaths(shards)):
        result = work / "shards" / f"{split}-{i:05d}.json"
        arguments = (work, split, bounds[i], bounds[i + 1], Path(path), result)
        tasks.append(WorkItem(write_shard, arguments, result, bounds[i + 1] - bounds[i]))
    run(tasks, f"writing {split}", "images")
    done = [json.loads(task.result.read_text()) for task in tasks]
    if not any(shard["examples"] for shard in done):
        raise UserError(
            f"no image of {split} can be read, the first because: {done[0]['skipped'][0][2]}"
        )
    return Split(
        split,
        [shard["examples"] for shard in done],
        sum(shard["bytes"] for shard in done),
        [tuple(skipped) for shard in done for skipped in shard["skipped"]],
        [shard["captions"] for shard in done],
    )


def write_shard(work: Path, split: str, start: int, stop: int, shard: Path, result: Path) -> None:
    """Writes a shard of a split: the examples `start` to `stop` of the split's order.

    The function can run on any machine that has the data set's folder and the source at the same
    paths.
    """
    index, order = load_index(work), mapped(work / f"order-{split}.npy")
    serialize = _serializer(work, index)
    report: dict[str, Any] = {"examples": 0, "bytes": 0, "skipped": []}
    digest = hashlib.blake2b(digest_size=16)
    with replacing(shard) as path, _writer(path) as write:
        for place in range(start, stop):
            entry = index.entries[order[place]]
            try:
                record = serialize(entry)
            except Unreadable as error:
                report["skipped"].append((place, index.describe(entry), why_unreadable(error)))
                continue
            write(record)
            digest.update(index.stored_captions(entry) + b"\n")
            report["examples"] += 1
            report["bytes"] += len(record)
    write_json(result, report | {"captions": digest.hexdigest()})


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[Callable[[bytes], None]]:
    from array_record.python import array_record_module

    # Records are not compressed, because images are already compressed. Groups of one record are
    # best for random access.
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    try:
        yield writer.write
    finally:
        try:
            writer.close()  # The writer raises all its errors here.
        except RuntimeError as error:
            number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
            raise OSError(number, os.strerror(number), str(path.parent)) from error


def _serializer(work: Path, index: Index) -> Callable[[np.void], bytes]:
    """Returns a function that converts an element of `Index.entries` to a serialized TFDS example.

    It raises `Unreadable` if the image cannot be decoded.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import example_serializer

    features = tfds.features.FeaturesDict.from_config(work / "metadata")
    serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
    images = [key for key, feature in features.items() if isinstance(feature, tfds.features.Image)]

    def read(entry: np.void) -> bytes:
        return readers.read(index.kind, index.paths[entry["unit"]], entry, index.name(entry))

    def copy(entry: np.void) -> bytes:
        record = read(entry)
        example = readers.parse_example(record, index.describe(entry))
        for key in images:
            if not (found := example.features.feature[key].bytes_list.value):
                raise Unreadable(f"it has no {key}")
            for image in found:
                _check(image)
        return record

    def make(entry: np.void) -> bytes:
        image = read(entry)
        _check(image)
        labels = index.labels[entry["first_label"] :][: entry["labels"]].tolist()
        label = {"labels": labels} if index.multiple else {"label": labels[0]}
        example = {"image": image, "file_name": as_text(index.name(entry)), **label}
        if entry["captions"]:
            example[CAPTIONS] = index.captions(entry)
        message = serializer.get_tf_example(features.encode_example(example))
        # With `deterministic`, the order of features is the same in all processes.
        return message.SerializeToString(deterministic=True)

    return copy if index.kind == "tfds" else make


def _check(image: bytes) -> None:
    """Decodes an image; raises `Unreadable` if the image is damaged.

    For speed, a JPEG is decoded at 1/8 of its size, without up to seven last rows and columns.
    """
    opened = open_image(image)
    height, width = opened.height, opened.width
    opened.region(Box(0, 0, width, height), (max(1, height // 8), max(1, width // 8)))


# Functions for the TFDS metadata, which TFDS itself writes.


def _tfds_info(source: readers.RawDataSet):
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(source.root).info


def _features(source: readers.RawDataSet, index: Index):
    import tensorflow_datasets as tfds

    if source.kind == "tfds":
        return _tfds_info(source).features
    label = tfds.features.ClassLabel(names=class_names(source, index))
    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        **({"labels": tfds.features.Sequence(label)} if index.multiple else {"label": label}),
        "file_name": tfds.features.Text(),
    }
    if source.caption_key is not None:
        features[CAPTIONS] = tfds.features.Sequence(tfds.features.Text())
    return tfds.features.FeaturesDict(features)


def _info(source: readers.RawDataSet, identity: tuple[str, ...], folder: Path, features):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import dataset_info

    name, *config, version = identity
    about = {"description": f"Prepared by vit_jax from {source.root.absolute()} ({source.kind})."}
    if source.kind == "tfds":
        info = _tfds_info(source)
        names = ("description", "citation", "homepage", "supervised_keys", "metadata")
        about = {name: getattr(info, name) for name in names}
    builder = dataset_info.DatasetIdentity(
        name=name,
        config_name=config[0] if config else None,
        version=tfds.core.Version(version),
        data_dir=str(folder),
        module_name=__name__,
    )
    info = tfds.core.DatasetInfo(builder=builder, features=features, **about)
    info.set_file_format("array_record")
    return info


def _finish(folder: Path, info, splits: list[Split], chosen: Choice, summary: dict) -> None:
    """Writes the TFDS metadata. After the last file is renamed, TFDS finds the data set."""
    import tensorflow_datasets as tfds

    described = folder / WORK / "metadata"
    parts = [
        tfds.core.SplitInfo(name=s.name, shard_lengths=s.lengths, num_bytes=s.bytes) for s in splits
    ]
    info.set_splits(tfds.core.splits.SplitDict(parts))
    info.write_to_directory(described)
    skipped = [
        f"{split.name}\t{file}\t{why}\n" for split in splits for _, file, why in split.skipped
    ]
    if skipped:
        with replacing(folder / "skipped.txt") as temporary:
            temporary.write_text("".join(skipped), encoding="utf-8", errors="backslashreplace")
    summary |= {
        "splits": {split.name: sum(split.lengths) for split in splits},
        "skipped": len(skipped),
        "removed": chosen.removed,
        "duplicates": chosen.duplicates,
    }
    write_json(folder / SUMMARY, summary)
    for file in sorted(described.iterdir(), key=lambda file: file.name == "features.json"):
        file.replace(folder / file.name)


def _prepared(out: Path, identity: tuple[str, ...]) -> Prepared:
    folder = out.joinpath(*identity)
    summary = json.loads((folder / SUMMARY).read_text())
    # The path contains the version. Without the version, TFDS would search for the newest version
    # of a registered data set.
    path = f"{'/'.join(identity[:-1])}:{identity[-1]}:{out.absolute()}"
    known = {key: summary[key] for key in ("label_key", "splits", "skipped", "removed")}
    # Data without captions, and data that older versions have prepared, lack some of these values.
    known |= {"caption_key": summary.get("caption_key"), "left_out": summary.get("left_out", {})}
    known["duplicates"] = summary.get("duplicates", 0)
    return Prepared(path=path, folder=folder, **known)
