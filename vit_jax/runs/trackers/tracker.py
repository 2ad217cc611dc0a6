"""Interface of trackers, and information about a run for trackers."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RunFacts(NamedTuple):
    """Information about a run for trackers.

    Attributes:
      workdir: folder of the run's files; a local copy if the workdir is in a bucket.
      place: the workdir's path or URL as the user wrote it.
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
        """Name of the run: the last component of `place`."""
        return self.place.rstrip("/").rpartition("/")[2]


class BaseTracker(abc.ABC):
    """Sends a run's metrics to one library, such as W&B.

    A single thread calls all methods, in the order of the steps.

    Attributes:
      library: name of the Python package of the library.
      identity: identifier of the run in the library. A resumed run passes it to `__init__`.
      settles_after: seconds after which sent rows cannot be lost if the process is killed.
    """

    library: ClassVar[str]
    identity: str
    settles_after: float

    @abc.abstractmethod
    def __init__(self, run: RunFacts, identity: str, last_step: int):
        """Opens a new run and sends its config, or reopens an earlier one.

        Args:
          identity: identifier of a resumed run in the tracking library, such as W&B; empty: a new
            run.
          last_step: the last step of which a resumed run has sent metrics; 0: a new run.

        Raises:
          UserError: the tracking library is not installed, or raises an error.
        """

    @abc.abstractmethod
    def row(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends metrics of a step. It may be called several times for a step."""

    @abc.abstractmethod
    def picture(self, step: int, name: str, png: bytes) -> None:
        """Sends a picture."""

    @abc.abstractmethod
    def close(self) -> None:
        """Sends pending data, and marks the run as finished. Resuming the run opens it again."""
