"""Prepares any data set for training: python -m vit_jax.prepare SOURCE --out=DIR.

SOURCE is a folder of images, a CSV, WebDataset tars, ImageNet-21k's tars, Parquet files of the
Hugging Face Hub, or a TFDS data set in TFRecord (its folder, or `NAME:DATA_DIR`). Labels and
captions of the images are kept. The command writes a TFDS data set in the ArrayRecord format into
DIR. The images are in random order, so that `train[:9000000]` is a random sample. After an
interruption, the same command continues. --retrieve_for=SET --embeddings=CHECKPOINT only keeps
images of the training split that are similar to images of SET, without near-duplicates.
"""

import functools
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent import futures
from multiprocessing import connection
from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.data.fields import CAPTION_KEYS
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folder_rules import in_words
from vit_jax.errors import UserError
from vit_jax.preparation import readers, writer
from vit_jax.preparation.index import WorkItem
from vit_jax.preparation.kept_embeddings import Embedder
from vit_jax.preparation.similarity_index import need_faiss
from vit_jax.progress import duration

BATCH = 64  # Number of images in one call of the model that computes embeddings.

flags.DEFINE_string("out", None, "folder for the data set: a data_dir of TFDS")
flags.DEFINE_string("name", None, "the data set's name; default: the source's")
flags.DEFINE_string(
    "kind", None, f"kind of the source: {', '.join(readers.KINDS)}; default: as it looks"
)
flags.DEFINE_string("label_key", None, "Parquet column, JSON key or TFDS feature with the label")
flags.DEFINE_string(
    "caption_key",
    None,
    "CSV column, JSON key, Parquet column or TFDS feature with the captions, or txt for the .txt "
    "files of tars; default: caption, captions or text, if there is one; empty: no captions",
)
flags.DEFINE_bool(
    "skip_uncaptioned", False, "skip images without a caption, which are an error otherwise"
)
flags.DEFINE_integer("seed", 0, "seed of the order", lower_bound=0, upper_bound=2**63 - 1)
flags.DEFINE_integer("limit", None, "prepare only the first N images of each split", lower_bound=1)
flags.DEFINE_integer(
    "shards", None, "files of each split; default: by size, as TFDS", lower_bound=1
)
flags.DEFINE_list("shots", [], "few-shot splits to add: 1,5,10,25")
flags.DEFINE_multi_string(
    "deduplicate_against",
    [],
    "NAME:DIR/SPLIT of a test set whose near-duplicates are removed from the training split",
)
flags.DEFINE_multi_string(
    "retrieve_for",
    [],
    "a curated set, a folder or KIND:PATH (tfds:cifar100): keep the training "
    "images nearest to its images",
)
flags.DEFINE_integer("neighbours", 4, "images retrieved for each curated one", lower_bound=1)
flags.DEFINE_string(
    "embeddings", None, "compare images by the embeddings of this checkpoint's model"
)
flags.DEFINE_integer(
    "image_size", None, "its image size in pixels, if not the checkpoint's", lower_bound=1
)
flags.DEFINE_float(
    "similarity",
    0.95,
    "with --embeddings: the least cosine of near-duplicates, which depends on the checkpoint",
    -1.0,
    1.0,
)
flags.DEFINE_integer("workers", os.cpu_count(), "processes on this machine", lower_bound=1)
flags.DEFINE_string(
    "beam", None, "write by Apache Beam: a runner's name; its options follow after --"
)


def main(arguments: list[str]) -> None:
    values = flags.FLAGS
    if not arguments or not values.out or (len(arguments) > 1 and not values.beam):
        raise UserError(
            "usage: python -m vit_jax.prepare SOURCE --out=DIR [--beam=RUNNER -- OPTIONS]"
        )
    options = read_options()
    embedding = None
    if values.embeddings:
        embedding = make_embedder(values.embeddings, values.image_size), Workers(1)
    source = readers.find(arguments[0], values.kind, values.label_key, values.caption_key)
    print(f"{arguments[0]}: {source.kind}, {_splits(source)}", flush=True)
    log = functools.partial(print, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Workers(values.workers) as run:
            write = Beam(values.beam, arguments[1:]) if values.beam else run
            done = writer.prepare(source, Path(values.out), options, run, write, embedding, log)
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes from here", flush=True)
        sys.exit(130)
    print_result(done, retrieved=bool(options.retrieve_for))


def read_options() -> writer.Options:
    """Returns the data set's options, as set by the flags; raises UserError if invalid."""
    values = flags.FLAGS
    if not all(count.isdecimal() and int(count) for count in values.shots):
        raise UserError(
            f"--shots={','.join(values.shots)}: give numbers of images a class, such as 1,5,10"
        )
    if values.retrieve_for:
        if not values.embeddings:
            raise UserError(
                "--retrieve_for needs --embeddings=CHECKPOINT, by which images are compared"
            )
        need_faiss()
    if values.embeddings and not (values.deduplicate_against or values.retrieve_for):
        raise UserError(
            "--embeddings is for --deduplicate_against=NAME:DIR/SPLIT and --retrieve_for=SET"
        )
    for name, other in (
        ("similarity", "embeddings"),
        ("image_size", "embeddings"),
        ("neighbours", "retrieve_for"),
    ):
        if values[name].present and not values[other].value:
            raise UserError(f"--{name} has no effect without --{other}: give both, or neither")
    return writer.Options(
        values.name,
        values.seed,
        values.limit,
        values.shards,
        tuple(sorted(set(map(int, values.shots)))),
        tuple(values.deduplicate_against),
        values.embeddings,
        values.similarity,
        tuple(values.retrieve_for),
        values.neighbours,
        values.skip_uncaptioned,
    )


def print_result(done: writer.Prepared, retrieved: bool) -> None:
    """Prints the numbers of written and skipped examples, and the flags to train on them.

    Args:
      retrieved: whether images similar to curated data sets were selected (`--retrieve_for`).
    """
    made = ", ".join(f"{name} {count:,}" for name, count in done.splits.items())
    line = f"{done.folder}: {made} examples"
    if done.removed:
        line += f"; {done.removed:,} removed as near-duplicates of test images"
    if retrieved:
        line += f"; {done.duplicates:,} as near-duplicates of other images; see curated.html"
    if done.skipped:
        line += f"; {done.skipped:,} could not be read, see skipped.txt"
    print(line)
    if done.left_out:
        print(f"note: skipped: {in_words(done.left_out)}")
    label = f" --config.data.label_key={done.label_key}" if done.label_key != "label" else ""
    if done.caption_key is not None and done.caption_key.split("/")[0] not in CAPTION_KEYS:
        label += f" --config.data.caption_key={done.caption_key}"
    print(f"train on it with --config.data.source=tfds --config.data.path={done.path}{label}")


def make_embedder(checkpoint: str, image_size: int | None) -> Embedder:
    """Returns a function that computes embeddings of square images with a checkpoint's model."""
    import jax
    import numpy as np
    from flax import nnx

    from vit_jax.data.preprocess import TestCrop
    from vit_jax.evaluation.features import extractor_of
    from vit_jax.load import load_model
    from vit_jax.parallel.mesh import make_mesh

    model = load_model(
        checkpoint, num_classes=0, **({"image_size": image_size} if image_size else {})
    )
    height, width = model.image_size
    if height != width or model.channels != 3:
        raise UserError(
            f"--embeddings={checkpoint}: its images are not square, or not of 3 channels"
        )
    digest = hashlib.blake2b(repr(model.options).encode(), digest_size=16)
    for path, value in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        digest.update(repr(path).encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8))
    image = jax.ShapeDtypeStruct((1, height, width, 3), np.uint8)
    dim = nnx.eval_shape(lambda model, image: model.features(image), model, image).shape[-1]
    extractor, params = extractor_of(
        model,
        make_mesh(),
        TestCrop(height, "square", height),
        batch_size=BATCH,
        workers=0,
        threads=min(os.cpu_count() or 1, 8),
        max_unreadable=sys.maxsize,  # Unreadable images are reported when the split is written.
        log=lambda line: None,
    )

    def embed(source: Source) -> tuple[np.ndarray, np.ndarray]:
        parts = [(part["mask"], part["values"]) for part in extractor.stream(params, source)]
        mask, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return np.flatnonzero(mask), values[mask]

    return Embedder(digest.hexdigest(), dim, embed)


def _splits(source: readers.RawDataSet) -> str:
    """Returns a line that describes the splits and classes of a data set."""
    splits = ", ".join(dict.fromkeys(unit.split for unit in source.units))
    classes = f", {len(source.class_names):,} classes" if source.class_names else ""
    bare = (
        {unit.split for unit in source.units if unit.label < 0} if source.kind == "folder" else ()
    )
    unlabelled = (
        f" ({', '.join(sorted(bare))} without classes: images without labels)" if bare else ""
    )
    return f"{len(source.units):,} parts{classes}, splits {splits}{unlabelled}"


class Workers:
    """Pool of processes on this machine that run tasks. With one worker, this process runs them."""

    def __init__(self, workers: int):
        self._workers, self._pool = workers, None

    def __enter__(self):
        if self._workers > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = futures.ProcessPoolExecutor(self._workers, context, _start_worker)
        return self

    def __exit__(self, kind, *_):
        if self._pool:
            # After Ctrl-C, workers stop immediately. After other errors, they first complete the
            # shards that they are writing.
            if kind is KeyboardInterrupt:
                for process in (self._pool._processes or {}).values():
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, tasks: list[WorkItem], title: str, unit: str) -> None:
        progress = PhaseProgress(tasks, title, unit)
        tasks = [task for task in tasks if not task.result.exists()]
        if not self._pool:
            for task in tasks:
                task.function(*task.arguments)
                progress.add(task.weight)
        else:
            running = {self._pool.submit(task.function, *task.arguments): task for task in tasks}
            try:
                for done in futures.as_completed(running):
                    done.result()
                    progress.add(running[done].weight)
            except futures.process.BrokenProcessPool as error:
                raise UserError(
                    "a worker was killed, for its memory perhaps: give fewer --workers"
                ) from error
        progress.finish()


def _start_worker() -> None:
    """Makes a worker process ignore Ctrl-C, and end when its parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (connection.wait([parent]), os._exit(1)), daemon=True).start()


class Beam:
    """Runs tasks with Apache Beam. All machines must have source and data set at the same paths."""

    def __init__(self, runner: str, options: list[str]):
        try:
            import apache_beam
            from apache_beam.options.pipeline_options import PipelineOptions
        except ImportError as error:
            raise UserError('--beam needs Apache Beam: pip install "vit_jax[beam]"') from error
        self._options = PipelineOptions([f"--runner={runner}", *options])
        try:
            apache_beam.Pipeline(options=self._options)
        except ValueError as error:
            raise UserError(f"--beam={runner}: {str(error).split('. ')[0]}") from error

    def __call__(self, tasks: list[WorkItem], title: str, unit: str) -> None:
        import apache_beam as beam

        tasks = [task for task in tasks if not task.result.exists()]
        print(f"{title}: {len(tasks):,} tasks go to Beam", flush=True)
        if tasks:
            with beam.Pipeline(options=self._options) as pipeline:
                _ = (
                    pipeline
                    | beam.Create(tasks)
                    | beam.Reshuffle()
                    | beam.Map(lambda t: t.function(*t.arguments))
                )


class PhaseProgress:
    """Shows the progress of a phase: in a terminal in one line, elsewhere twice a minute."""

    def __init__(self, tasks: list[WorkItem], title: str, unit: str):
        self._title, self._unit = title, unit
        self._total = sum(task.weight for task in tasks)
        self._before = self._done = sum(task.weight for task in tasks if task.result.exists())
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def add(self, weight: int) -> None:
        """Adds completed work, and prints the progress at intervals."""
        self._done += weight
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else 30):
            return
        self._shown = now
        rate = (self._done - self._before) / (now - self._start)
        left = duration((self._total - self._done) / rate)
        share = f"{self._done / self._total:.1%} of {self._total:,} {self._unit}"
        self._print(f"{self._title}: {share} | {rate:,.0f} {self._unit}/s | {left} left")

    def finish(self) -> None:
        """Prints the completed work and its duration."""
        seconds = time.monotonic() - self._start
        before = f", {self._before:,} of them earlier" if self._before else ""
        self._print(
            f"{self._title}: {self._total:,} {self._unit}{before}, {duration(seconds)}", end="\n"
        )

    def _print(self, text: str, end: str = "") -> None:
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end=end if self._terminal else "\n",
            flush=True,
        )


if __name__ == "__main__":
    command.run(main)
