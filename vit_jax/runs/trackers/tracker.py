"""Interface of trackers, and the information about a run that they show."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RunFacts(NamedTuple):
    """Information about a run for trackers.

    Attributes:
      workdir: the folder with its files; a local copy if the workdir is in a bucket.
      place: the workdir's path or URL as given by the user.
      title: title of the run: `ViT-B/16 fine-tuned on pets`.
      config: values of the config by dotted key.
      nested: the same values as nested dicts.
    """

    workdir: Path
    place: str
    title: str
    config: dict[str, Any]
    nested: dict[str, Any]

    @property
    def name(self) -> str:
        """The last component of `place`."""
        return self.place.rstrip("/").rpartition("/")[2]


class BaseTracker(abc.ABC):
    """Sends a run's metrics to one library; called from one thread in the order of the steps.

    Attributes:
      library: name of the package that it imports.
      identity: the library's identifier of the run, which a resumed run passes again.
      settles_after: seconds after which sent rows are safe even if the process is killed.
    """

    library: ClassVar[str]
    identity: str
    settles_after: float

    @abc.abstractmethod
    def __init__(self, run: RunFacts, identity: str, last_step: int):
        """Opens a new run and sends its config, or reopens an earlier one.

        Args:
          identity: the identifier of an earlier start; empty for a new run.
          last_step: the last step that was sent before; 0 for a new run.

        Raises:
          UserError: the library is missing, or fails.
        """

    @abc.abstractmethod
    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends metrics of a step; a step can have several rows."""

    @abc.abstractmethod
    def picture(self, step: int, name: str, png: bytes) -> None:
        """Sends a picture."""

    @abc.abstractmethod
    def close(self) -> None:
        """Sends pending data, and marks the run as finished for now."""
