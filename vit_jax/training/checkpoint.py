"""Checkpoints of a run, through Orbax: the only module that knows Orbax.

A checkpoint holds `params`, `optimizer` and `run` (step, seed, metrics since the last log line)
as separate items, so that parameters can be read alone. It appears by an atomic rename: what is
listed is complete.
"""

import contextlib
import shutil
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from vit_jax.errors import UserError


class Checkpoints:
    """The checkpoints in one folder; saving goes on in the background.

    Args:
      kept: how many to keep, the newest; None only reads, and may do so while a run writes.
    """

    def __init__(self, folder: Path, kept: int | None):
        self.folder = folder
        if kept is not None and jax.process_index() == 0:
            for rest in folder.glob("*.orbax-checkpoint-tmp*"):  # Of a write that was killed.
                shutil.rmtree(rest)
        policies = ocp.training.preservation_policies
        self._checkpointer = ocp.training.Checkpointer(
            folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.PreserveAll() if kept is None else policies.LatestN(kept),
        )
        self._saving = None

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._checkpointer.latest.step if self._checkpointer.latest else None

    @property
    def last_good(self) -> str:
        """Part of an error message: where the newest checkpoint is."""
        if self.latest is None:
            return f"no checkpoint is in {self.folder} yet"
        return f"the last good checkpoint is {self.folder / str(self.latest)}"

    def save(self, step: int, items: dict) -> None:
        """Copies the items from the devices, and writes them while training goes on.

        Raises:
          UserError: no space left, now or in the writing of the one before.
        """
        self.wait()
        if self.latest == step:
            return
        with self._named_errors():
            self._check_space(items)
            self._saving = self._checkpointer.save_checkpointables_async(step, items)

    def restore(self, step: int, like: dict) -> dict:
        """The items of a checkpoint, placed as the arrays of `like` are.

        Raises:
          UserError: the checkpoint's arrays differ from `like` in name or shape.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), like
        )
        try:
            restored = self._checkpointer.load_checkpointables(step, abstract)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"checkpoint {self.folder / str(step)} does not fit this model: {str(error).splitlines()[0]}"
            ) from error
        for (path, wanted), got in zip(
            jax.tree.leaves_with_path(abstract), jax.tree.leaves(restored), strict=True
        ):
            if not isinstance(got, jax.Array) or got.shape != wanted.shape:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UserError(
                    f"checkpoint {self.folder / str(step)}: {name} is missing or of another shape"
                )
        return restored

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          UserError: it could not be, for want of space.
        """
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
            if kind is None:  # Else the first error is the one to show.
                raise

    def _check_space(self, items: dict) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(items))
        free = shutil.disk_usage(self.folder).free
        if free < 1.1 * needed + 1e6:
            raise UserError(self._no_space(f"{free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed"))

    def _no_space(self, detail: str) -> str:
        return f"no space left for a checkpoint ({detail}); {self.last_good}; free some space and start again"

    @contextlib.contextmanager
    def _named_errors(self):
        try:
            yield
        except Exception as error:
            if any(words in str(error) for words in ("No space left", "ENOSPC", "RESOURCE_EXHAUSTED")):
                raise UserError(self._no_space("disk full")) from error
            raise


def load_params(folder: Path, like: dict) -> dict:
    """The parameters of the newest checkpoint in `folder`, and nothing else of it.

    Args:
      like: arrays or `jax.ShapeDtypeStruct`s of the shapes and places that are wanted.

    Raises:
      UserError: there is no checkpoint, or it is of another model.
    """
    if folder.is_dir():
        with Checkpoints(folder, kept=None) as checkpoints:
            if checkpoints.latest is not None:
                return checkpoints.restore(checkpoints.latest, {"params": like})["params"]
    raise UserError(f"no checkpoint in {folder}")
