"""The interface of trackers, and a run as they show it."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class RunFacts(NamedTuple):
    """A run, as trackers show it.

    Attributes:
      workdir: the folder with its files, which is a copy where the workdir is in a bucket.
      place: the workdir, as its user named it.
      title: its work in words: `ViT-B/16 fine-tuned on pets`.
      config: its values by their dotted keys.
      nested: the same as JSON's objects.
    """

    workdir: Path
    place: str
    title: str
    config: dict[str, Any]
    nested: dict[str, Any]

    @property
    def name(self) -> str:
        """The last part of its place."""
        return self.place.rstrip("/").rpartition("/")[2]


class BaseTracker(abc.ABC):
    """Sends a run's figures to one library. Calls come from one thread, in the order of the steps.

    Attributes:
      identity: names the run to the library; a continued run hands it in again.
      settles_after: seconds after which the library keeps what it was sent, even if the process is
        killed.
    """

    identity: str
    settles_after: float

    @abc.abstractmethod
    def __init__(self, run: RunFacts, identity: str, last_step: int):
        """Opens the run, or opens it again; a new one is told the config.

        Args:
          identity: as an earlier start had it; empty for a new run.
          last_step: of what was sent before; 0 for a new run.

        Raises:
          UserError: the library is missing, or refuses.
        """

    @abc.abstractmethod
    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends figures of a step; a step can have several rows."""

    @abc.abstractmethod
    def picture(self, step: int, name: str, png: bytes) -> None:
        """Sends a picture."""

    @abc.abstractmethod
    def close(self) -> None:
        """Sends what waits, and marks the run as over for now."""
