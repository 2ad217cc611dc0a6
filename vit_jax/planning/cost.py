"""Length of a run in steps, its exaFLOPs, and its cost in device-days and dollars."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from vit_jax.data.sources import SOURCES, open_source
from vit_jax.data.sources.slices import split_range
from vit_jax.errors import UserError
from vit_jax.models.model_card import training_flops
from vit_jax.options.data import DataOptions
from vit_jax.options.run import RunOptions
from vit_jax.planning.compile import Slice
from vit_jax.training.objectives import objective_of

# Numbers of training images and classes of the paper's data sets. They are listed here because the
# data sets need not be on this machine.
DATA_SETS = {
    "jft": (303_000_000, 18_291),
    "imagenet21k": (14_197_122, 21_843),
    "imagenet2012": (1_281_167, 1_000),
}
PRICES = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True)
class Workload:
    """The amount of work of a run: steps, images and operations. Independent of the devices."""

    images: int
    num_classes: int
    steps: int
    batch_size: int
    parameters: int
    multiply_adds: int  # Multiply-adds of an image's forward pass.

    @property
    def flops(self) -> float:
        """FLOPs of a step: a lower bound, computed from the multiply-adds of the model."""
        return training_flops(self.multiply_adds * self.batch_size)

    @property
    def exaflops(self) -> float:
        """ExaFLOPs of the run, as counted in the paper (table 6)."""
        return self.flops * self.steps / 1e18


@dataclass(frozen=True)
class Cost:
    """The cost of training steps. Start-up, evaluation and waiting for data are not included."""

    hours: float
    core_days: float  # Days times devices (JAX devices: cores of TPU v2 and v3, else chips).
    chip_days: float
    dollars: float | None
    price: str


def data_set_size(config: RunOptions, images: int | None) -> tuple[int, int]:
    """Returns the number of training images and the number of classes.

    If one of the numbers is unknown, the data set at `data.path` is opened. For an objective
    without labels, the number of classes is the width of the model's head.

    Args:
      images: number of training images; None: the number in the data set.

    Raises:
      UserError: one of the two numbers is unknown, and the user has not set it by a flag.
    """
    values, objective = config.data, objective_of(config.objective.name)
    name = values.path.split(":")[0] or values.source
    whole, classes = _known_size(values)
    if (whole is None or classes is None) and _can_be_opened(values):
        how = dict(path=values.path, label_key=values.label_key, only=values.classes)
        train = open_source(values.source, values.train_split, labels=objective.labels, **how)
        images, classes = images or len(train), len(train.class_names)
    if images is None and whole is None:
        raise UserError(f"how many training images {name!r} has is not known; give --images=N")
    classes = (values.num_classes or classes) if objective.labels else objective.outputs(config)
    if classes is None:
        raise UserError(
            f"how many classes {name!r} has is not known; give --config.data.num_classes=N"
        )
    if images is None:
        images = len(split_range(values.train_split, whole))
    return images, classes


def _known_size(values: DataOptions) -> tuple[int | None, int | None]:
    """Returns the numbers of images and classes without opening the data; None: unknown."""
    kind = SOURCES.get(values.source)
    if kind and (counts := kind.counts(values.path)):
        return counts
    return DATA_SETS.get(values.path.split(":")[0], (None, None))


def _can_be_opened(values: DataOptions) -> bool:
    """Returns True if `data.path` is a data set on this machine."""
    kind = SOURCES.get(values.source)
    if not kind or not kind.path or not values.path:
        return False
    return Path(values.path).exists() or (values.source == "tfds" and ":" in values.path)


def read_prices(path: Path) -> dict[str, dict]:
    """Reads a TOML file with the price of each chip: dollars per chip-hour, and the source.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        prices = tomllib.loads(path.read_text())
        return {k: dict(dollars=float(x["dollars"]), of=str(x["of"])) for k, x in prices.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        words = f"cannot read prices from {path}: {error} (--prices; see {PRICES})"
        raise UserError(words) from error


def cost(job: Workload, where: Slice, step_seconds: float, prices: dict[str, dict]) -> Cost:
    """Returns the cost of a run whose steps take `step_seconds`."""
    hours = job.steps * step_seconds / 3600
    chips = where.devices / where.chip.devices_per_chip
    price = prices.get(where.chip.name)
    return Cost(
        hours=hours,
        core_days=where.devices * hours / 24,
        chip_days=chips * hours / 24,
        dollars=price and chips * hours * price["dollars"],
        price=f"${price['dollars']:.2f} a chip-hour, {price['of']}" if price else "no price known",
    )
