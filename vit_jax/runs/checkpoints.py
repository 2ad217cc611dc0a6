"""Checkpoints of a run, through Orbax: the only module that uses Orbax.

Checkpoints are stored in a folder, or in a bucket with a URL. A checkpoint contains separate items,
such as `params`, `optimizer` and `run` (step, metrics since the last log line). The parameters can
therefore be read without the other items.

A complete checkpoint is published by an atomic rename. In a bucket it is published by an object
that is written last. Listed checkpoints are thus always complete.

A checkpoint also contains a checksum of each item, to detect later damage. The checksums do not
depend on the numbers of processes and devices.
"""

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from logging import LogRecord
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from vit_jax.errors import UserError
from vit_jax.interop.objective_files import Shapes
from vit_jax.parallel.sharding import path_name
from vit_jax.paths import is_url
from vit_jax.runs.bucket import move, read_through
from vit_jax.training.step import Metrics, State

DAMAGED = "damaged"  # Folder next to the checkpoints; damaged checkpoints are moved into it.

# Parts of error messages of TensorStore and of the system. An error with such a message does not
# mean that a file is damaged.
_PASSING = (
    *(
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "ABORTED",
    ),
    *("UNIMPLEMENTED", "Too many open files", "Cannot allocate memory", "Input/output error"),
)


class DamagedCheckpoint(UserError):
    """Error: the content of a checkpoint differs from the saved content."""


class Checkpoints:
    """The checkpoints in one folder. They are saved in the background.

    Args:
      keep_last: number of newest checkpoints to keep. None: the checkpoints are only read, which is
        possible while a run writes them.
      keep_every: checkpoints at multiples of this number of steps are also kept. None: no
        additional checkpoints are kept.
      keep_best: number of best checkpoints that are also kept. The best ones have the highest k-NN
        accuracy. Without k-NN they have the highest accuracy, without accuracy the lowest loss.
        The metrics are those of the split for model selection.
    """

    def __init__(
        self,
        folder: Path | epath.Path,
        keep_last: int | None,
        keep_every: int | None = None,
        keep_best: int = 0,
        log: Callable[[str], None] = print,
    ):
        self._remote, self._log = is_url(folder), log
        # Orbax does not support relative paths.
        self.folder = folder if self._remote else folder.absolute()
        if str(folder).startswith("s3://"):
            _teach_orbax_s3()
        if keep_last is None:
            for path, problem in self._unreadable_figures():
                raise DamagedCheckpoint(f"checkpoint {path} is damaged: {problem}")
        else:
            if jax.process_index() == 0:
                self._sweep()
            multihost_utils.sync_global_devices("swept")
        logging.get_absl_logger().addFilter(_not_of_orbax)
        policies = ocp.training.preservation_policies
        preservation = [policies.LatestN(keep_last)]  # With None all checkpoints are kept.
        if keep_every:
            preservation.append(policies.EveryNSteps(keep_every))
        if keep_best:
            preservation.append(
                policies.BestN(
                    get_metric_fn=_score, n=keep_best, keep_checkpoints_without_metrics=False
                )
            )
        context = ocp.Context()
        # Compression is disabled, because it takes much CPU time and only saves 8 % of the weights'
        # size. Sharding metadata are not written, because restoring sets the shardings. Both
        # together would take half of the CPU time of a save.
        context.array.saving.use_compression = False
        context.array.saving.enable_write_sharding_file = False
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            context=context,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(preservation),
            cleanup_tmp_directories=self._remote and keep_last is not None,
        )
        self._saving = None

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, the newest last."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None: there is no checkpoint."""
        return self.steps[-1] if self.steps else None

    @property
    def figures(self) -> dict[int, dict[str, float]]:
        """Evaluation metrics that were saved with checkpoints, by step."""
        return {c.step: c.metrics for c in self._checkpointer.checkpoints if c.metrics}

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the best metrics; the newest in a tie."""
        return self.best_with({})

    def best_with(self, more: dict[int, dict[str, float]]) -> int | None:
        """Returns the step with the best metrics, also of those in `more`; the newest in a tie."""
        figures = self.figures | more
        return max(figures, key=lambda step: (_score(figures[step]), step), default=None)

    @property
    def last_good(self) -> str:
        """Phrase for an error message that names the newest checkpoint."""
        if self.latest is None:
            return f"no checkpoint is in {self.folder} yet"
        return f"the last good checkpoint is {self.folder / str(self.latest)}"

    def save(
        self,
        step: int,
        items: dict,
        figures: dict[str, float] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Copies the items from the devices, and writes them while training continues.

        Args:
          step: number of training steps done so far.
          items: result of `as_items`.
          figures: metrics of an evaluation at this step.
          overwrite: True: replace an existing checkpoint of this step. False: keep it.

        Raises:
          UserError: the disk is too full for this checkpoint, or for the previous one, which was
            written in the background.
        """
        self.wait()
        if self.latest == step and not overwrite:
            return
        with self._named_errors():
            self._check_space(items)
            self._saving = self._checkpointer.save_checkpointables_async(
                step,
                dict(items),  # A copy, because Orbax adds the metrics to this dict.
                overwrite=overwrite,
                metrics=figures,
                custom_metadata={
                    "checksums": _checksums(items),
                    "arrays": {name: _fingerprint(item) for name, item in items.items()},
                },
            )

    def restore_newest(self, like: dict) -> tuple[int, dict] | None:
        """Restores the newest undamaged checkpoint with the shardings of `like`.

        If an older checkpoint was restored, newer damaged checkpoints are moved to the folder
        `DAMAGED`. If no checkpoint can be restored, none is moved, because the cause may be
        something else than damage. All processes must call this method, and get the same result.

        Args:
          like: items with the arrays or shapes that the result must have.

        Returns:
          The step and the items; None if there is no checkpoint.

        Raises:
          UserError: all checkpoints are damaged; or a checkpoint cannot be read for another reason;
            or a checkpoint contains other arrays than `like`.
        """
        problems = {}
        for step in reversed(self.steps):
            restored, problem = None, None
            try:
                restored, sums = self._read(step, like)
            except DamagedCheckpoint as error:
                problem = str(error)
            # If any process detects damage, no process may use the checkpoint.
            if multihost_utils.process_allgather(np.bool_(restored is not None)).all():
                try:
                    whole = self._compare(step, restored, sums)
                except DamagedCheckpoint as error:
                    problem = str(error)
                else:
                    self._set_aside(problems)
                    return step, whole
            path = self.folder / str(step)
            problems[path] = (
                problem or f"checkpoint {path} is damaged, according to another process"
            )
        damaged = [*problems.values(), *map(str, sorted((self.folder / DAMAGED).glob("*")))]
        if damaged:
            raise UserError(
                f"every checkpoint of the run is damaged: {', '.join(damaged)}; put a good one "
                f"into {self.folder}, or remove {self.folder} to start from the first step"
            )
        return None

    def restore(self, step: int, like: dict) -> dict:
        """Restores the items of one checkpoint, in one process.

        Raises:
          UserError: the checkpoint is damaged (DamagedCheckpoint), or contains other arrays than
            `like`.
        """
        return self._compare(step, *self._read(step, like))

    def wait(self) -> None:
        """Waits until saved checkpoints are written; raises UserError if the disk is full."""
        with self._named_errors():
            if self._saving is not None:
                self._saving.result()
                self._saving = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.wait()
            self._checkpointer.close()
        except Exception:
            if kind is None:  # If the context raised an error, that error is more important.
                raise

    def _read(self, step: int, like: dict) -> tuple[dict, dict[str, int]]:
        """Returns the items of a checkpoint, and their expected checksums."""
        path = self.folder / str(step)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            like,
        )
        try:
            with _alone():
                metadata = ocp.checkpointables_metadata(path)
                if not metadata.custom_metadata:
                    raise ValueError("its metadata cannot be read")
                if "checksums" not in metadata.custom_metadata:
                    raise UserError(f"checkpoint {path} is not one that vit_jax wrote")
                for name in like:
                    if metadata.custom_metadata["arrays"][name] != _fingerprint(
                        metadata.metadata[name]
                    ):
                        raise ValueError(f"the list of arrays in {name} cannot be read")
                _check_same(
                    path, _arrays(like), _arrays({name: metadata.metadata[name] for name in like})
                )
                sums = {name: metadata.custom_metadata["checksums"][name] for name in like}
                return ocp.load_checkpointables(path, abstract), sums
        # These errors do not mean that the checkpoint is damaged. For example, the checkpoint
        # belongs to another model, or the memory is too small.
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax, TensorStore and the file system have many exceptions.
            raise _verdict(path, error) from error

    def _compare(self, step: int, restored: dict, sums: dict[str, int]) -> dict:
        for name, value in _checksums(restored).items():
            if value != sums[name]:
                raise DamagedCheckpoint(
                    f"checkpoint {self.folder / str(step)} is damaged: the checksum of {name} "
                    "differs"
                )
        return restored

    def _sweep(self) -> None:
        """Removes incomplete checkpoints, and moves those with damaged metrics to `DAMAGED`."""
        if not self._remote:  # In buckets Orbax itself removes incomplete checkpoints.
            for rest in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(rest)
        for path, problem in self._unreadable_figures():
            self._move_aside(path, f"checkpoint {path} is damaged: {problem}")

    def _unreadable_figures(self) -> Iterator[tuple[Path | epath.Path, str]]:
        """Yields each checkpoint whose metrics are invalid JSON, and the error.

        If such a checkpoint exists, Orbax lists no checkpoints at all.
        """
        for figures in self.folder.glob("[0-9]*/metrics/metrics"):
            try:
                json.loads(figures.read_text())
            except FileNotFoundError:
                continue  # A run in another process has removed this checkpoint.
            except ValueError as error:
                yield figures.parents[1], f"{figures}: {error}"

    def _set_aside(self, problems: dict[Path | epath.Path, str]) -> None:
        """Moves damaged checkpoints into the folder `DAMAGED`, the newest checkpoint first."""
        if problems:
            if jax.process_index() == 0:
                for path, problem in problems.items():
                    self._move_aside(path, problem)
            multihost_utils.sync_global_devices("moved aside")
            self._checkpointer.reload()

    def _move_aside(self, path: Path | epath.Path, problem: str) -> None:
        folder = path.parent / DAMAGED
        folder.mkdir(exist_ok=True)
        names = itertools.chain(
            [path.name], (f"{path.name}.{count}" for count in itertools.count(2))
        )
        aside = next(folder / name for name in names if not (folder / name).exists())
        if self._remote:
            move(str(path), str(aside))
        else:
            path.rename(aside)
        self._log(f"{problem}; moved to {aside}")

    def _check_space(self, items: dict) -> None:
        if self._remote:
            return
        needed = sum(x.nbytes for x in jax.tree.leaves(items))
        free = shutil.disk_usage(self.folder).free
        if free < 1.1 * needed + 1e6:
            raise UserError(
                self._no_space(f"{free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed")
            )

    def _no_space(self, detail: str) -> str:
        return (
            f"no space left for a checkpoint ({detail}); {self.last_good}; free some space and "
            "start again"
        )

    @contextlib.contextmanager
    def _named_errors(self):
        try:
            yield
        except Exception as error:
            if any(
                words in str(error) for words in ("No space left", "ENOSPC", "RESOURCE_EXHAUSTED")
            ):
                raise UserError(self._no_space("disk full")) from error
            raise


def as_items(state: State, metrics: Metrics) -> dict:
    """Converts a train state and metrics to a checkpoint's items.

    Checkpoints contain no frozen model, so the frozen model in the state is omitted.
    """
    run = {"step": state["step"], "skipped": state["skipped"], "metrics": metrics}
    items = {name: state[name] for name in ("params", "extra", "optimizer") if state[name]}
    return items | state["objective_state"] | {"run": run}


def from_items(items: dict) -> tuple[State, Metrics]:
    """Converts a checkpoint's items to the train state and the metrics.

    `frozen` in the train state is an empty dict, because checkpoints contain no frozen model. The
    calling code must replace it.
    """
    run = dict(items["run"])
    metrics = run.pop("metrics")
    weights = {"params": items["params"], "extra": items.get("extra", {})}
    objective_state = {
        name: item for name, item in items.items() if name not in (*weights, "optimizer", "run")
    }
    return weights | {
        "objective_state": objective_state,
        "frozen": {},
        "optimizer": items["optimizer"],
    } | run, metrics


def load_items(folder: Path | epath.Path, like: dict, which: str = "") -> dict:
    """Loads some items of a checkpoint, such as `params`, without reading the other items.

    Args:
      like: the items to load. Their leaves are arrays or `jax.ShapeDtypeStruct`s with the shapes
        and shardings of the result.
      which: a step; empty for the newest checkpoint; or `best` for the checkpoint with the highest
        k-NN accuracy. Without k-NN it is the highest accuracy, without accuracy the lowest loss.

    Returns:
      The items by name, and the checkpoint's step as `step`.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or belongs to another model.
    """
    while folder.is_dir():
        with Checkpoints(folder, keep_last=None) as checkpoints:
            steps = {"": checkpoints.latest, "best": checkpoints.best}
            steps |= {str(step): step for step in checkpoints.steps}
            if (step := steps.get(which)) is not None:
                try:
                    return checkpoints.restore(step, like) | {"step": step}
                except UserError:
                    if (folder / str(step)).exists() or which == str(step):
                        raise
                    continue  # A run in another process removed this checkpoint for a newer one.
            if checkpoints.steps:
                there = ", ".join(map(str, checkpoints.steps))
                raise UserError(f"no checkpoint {which!r} in {folder}; there are: {there}")
        break
    raise UserError(f"no checkpoint in {folder}")


def item_shapes(folder: Path | epath.Path, step: int) -> dict[str, Shapes]:
    """Returns the shapes of all arrays in a checkpoint, by item and path, without reading arrays.

    For an item that is a single array, the path is empty.

    Raises:
      UserError: the checkpoint is damaged.
    """
    path = (folder if is_url(folder) else folder.absolute()) / str(step)
    try:
        with _alone():
            items = ocp.checkpointables_metadata(path).metadata
    except Exception as error:  # Orbax, TensorStore and the file system have many exceptions.
        raise _verdict(path, error) from error
    return {
        name: {path_name(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(item)}
        for name, item in items.items()
    }


def _alone() -> ocp.Context:
    """Returns an Orbax context in which this process reads without waiting for other processes.

    With Orbax's default context, all processes would wait forever if one of them cannot read a
    file.
    """
    alone = ocp.Context()
    alone.multiprocessing.active_processes = {jax.process_index()}
    alone.multiprocessing.primary_host = jax.process_index()
    alone.multiprocessing.barrier_sync_key_prefix = "alone"
    return alone


def _read_files(path: Path | epath.Path) -> None:
    """Reads all files of a folder; raises OSError if one cannot be read."""
    for folder, _, names in os.walk(path, onerror=_raise):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                while file.read(2**20):
                    pass


def _verdict(path: Path | epath.Path, error: Exception) -> UserError:
    """Returns the error to raise for a checkpoint that Orbax failed to read.

    The error is a DamagedCheckpoint, or another UserError if the files cannot be read at the
    moment. Orbax reports files without read permission as missing. All files are therefore read
    again here to find the cause.
    """
    while error.__cause__:
        error = error.__cause__
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    try:
        if is_url(path):
            read_through(str(path))
        else:
            _read_files(path)
    except OSError as unreadable:
        reason, certain = f"{unreadable.strerror}: {unreadable.filename}", False
    except UserError as unreadable:
        reason, certain = str(unreadable), False
    else:
        certain = not any(word in reason for word in _PASSING)
    if not path.exists():
        return UserError(f"checkpoint {path} is gone: it was removed or moved while it was read")
    if not certain:
        return UserError(
            f"checkpoint {path} cannot be read ({reason}); it need not be damaged, and stays"
        )
    return DamagedCheckpoint(f"checkpoint {path} is damaged: {reason}")


def _teach_orbax_s3() -> None:
    """Patches Orbax to support `s3://` like `gs://`: through TensorStore, with atomic writes.

    Without the patch, Orbax treats an `s3://` URL as a relative path
    (https://github.com/google/orbax/pull/2739).

    Raises:
      UserError: the patch does not work with the installed version of Orbax.
    """
    if gcs_utils.is_gcs_path(epath.Path("s3://bucket/run")):
        return
    normalize, to_gcs = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
    gcs_utils._GCS_PATH_PREFIX = ("gs://", "s3://")
    gcs_utils.get_kvstore_for_gcs = lambda path: (
        _s3_store(path) if path.startswith("s3://") else to_gcs(path)
    )
    tensorstore_utils._use_gcs_driver = is_url
    tensorstore_utils._normalize_path = lambda path: re.sub("^s3:/+", "s3://", normalize(path))
    made = tensorstore_utils.build_kvstore_tspec("s3://bucket/run", use_ocdbt=True)
    if made["base"].get("bucket") != "bucket" or not gcs_utils.is_gcs_path(
        epath.Path("s3://bucket/run")
    ):
        raise UserError(
            f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')} cannot be made to "
            "write to s3://: mount the bucket, or install the version of requirements.txt"
        )


def _s3_store(url: str) -> dict:
    """Returns TensorStore's spec for an S3 URL. AWS's environment variables name the endpoint."""
    bucket, _, path = url.removeprefix("s3://").partition("/")
    store = {"driver": "s3", "bucket": bucket, "path": path}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        store["endpoint"] = endpoint
    # Credentials are read from the environment variables. Otherwise AWS's library would try all of
    # its credential providers, one after another.
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        store["aws_credentials"] = {"type": "environment"}
    return store


def _raise(error: OSError):
    raise error


def _not_of_orbax(record: LogRecord) -> bool:
    """Logging filter that suppresses Orbax's long log records of errors that it also raises."""
    return "/orbax/" not in record.pathname


def _score(figures: dict[str, float]) -> float:
    """Returns the score of an evaluation, for model selection; the highest score is the best.

    The score is the k-NN accuracy. Without k-NN it is the accuracy, and at equal accuracy the lower
    loss is better. Without accuracy it is the negative loss.
    """
    loss = figures.get("loss", math.inf)
    score = -loss
    if "knn" in figures:  # Losses of self-supervised training are not comparable.
        score = figures["knn"]
    elif "accuracy" in figures:  # The loss decides between equal accuracies.
        score = figures["accuracy"] - min(loss, 100.0) / (
            1000 * max(1.0, figures.get("images", 1e9))
        )
    return -math.inf if math.isnan(score) else score


def _checksums(items: dict) -> dict[str, int]:
    """Returns a checksum of each item: the bits of all values, summed as integers modulo 2^32.

    The sum is exact in any order, so it does not depend on the sharding. On CPUs it is computed in
    NumPy, because XLA would compile a program for each shape of an array.
    """
    sums = {
        name: [
            _sum_on_host(x) if _is_on_host(x) else _in_turn(_sum_of_bits(x))
            for x in jax.tree.leaves(item)
        ]
        for name, item in items.items()
    }
    return {name: sum(map(int, values)) % 2**32 for name, values in jax.device_get(sums).items()}


def _is_on_host(array: jax.Array) -> bool:
    """Returns True if this process has the whole array in the memory of its CPU."""
    return array.is_fully_addressable and {x.platform for x in array.devices()} == {"cpu"}


def _sum_on_host(array: jax.Array) -> int:
    bits = np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")
    return int(bits.astype(np.uint32, copy=False).sum(dtype=np.uint32))


def _in_turn(array: jax.Array) -> jax.Array:
    """Waits for an array that is sharded over several processes, then returns it.

    Programs with collectives thus run one after another. Without waiting, the processes could run
    their collectives in different orders on CPUs and deadlock.
    """
    return array if array.is_fully_addressable else array.block_until_ready()


@jax.jit
def _sum_of_bits(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _arrays(tree: dict) -> dict[str, str]:
    """Returns dtype and shape of each array or Orbax metadata, such as `float32[3,4]`, by path."""
    return {
        path_name(path): f"{np.dtype(x.dtype)}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _fingerprint(item: dict) -> int:
    return zlib.crc32(repr(sorted(_arrays(item).items())).encode())


def _check_same(path: Path | epath.Path, expected: dict[str, str], stored: dict[str, str]) -> None:
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"checkpoint {path} does not fit this model: {name} is "
                f"{stored.get(name, 'missing')} and should be {expected.get(name, 'missing')}"
            )
