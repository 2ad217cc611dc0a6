"""Laptop scale: small models of three families on images of 16 pixels that the package draws.

At 16 pixels a step costs a quarter of one at 32, and an object is still larger than a digit of
scikit-learn's data set. Objects fill the image (`centred`), since small ViTs need thousands of
steps to find scattered ones. Pre-training is on any number of images of `letters`. Few-shot
evaluation is on alphabets that pre-training does not contain. `configs/composed.py` is the recipe.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.command import read_config
from vit_jax.shipped import CONFIGS

UPSTREAM, DOWNSTREAM = "letters", ("greek", "cyrillic", "armenian", "georgian")
# Three sizes of three families, in the order of their compute.
MODELS = {
    "ViT": ("ViT-32x4/4", "ViT-64x4/4", "ViT-96x4/4"),
    "BiT": ("BiT-R14x1/8", "BiT-R14x1/4", "BiT-R26x1/4"),
    "hybrid": ("R14x1/8+ViT-32x4/4", "R14x1/8+ViT-64x4/4", "R14x1/4+ViT-64x4/4"),
}


def family_of(model: str) -> str:
    """Returns the family of a model by its name: `ViT`, `BiT` or `hybrid`."""
    return "hybrid" if "+" in model else model.partition("-")[0]


def config_name(
    model: str,
    collection: str = UPSTREAM,
    images: int = 100_000,
    steps: int = 1000,
    size: int = 16,
    source: str = "centred",
) -> str:
    """Returns the config of a run on a collection's first images, as its name with arguments.

    The config is `configs/composed.py`, with batches of 128: "composed:model=ViT-32x4/4,...".

    Args:
      model: its name.
      collection: collection of the images.
      images: number of training images.
      steps: number of steps of the run.
      size: size of the images, in pixels.
      source: `centred` or `scattered` objects.
    """
    images_of = f"source={source},collection={collection},images={images},size={size}"
    return f"composed:model={model},{images_of},steps={steps}"


def short_run(steps: int, **values: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns a run of the quickstart's model on scikit-learn's digits, of half a minute for a ViT.

    It trains on the digits from 0 to 6; few-shot evaluation, `fewshot/digits/10`, is on all ten. On
    scattered objects a ViT needs thousands of steps to be better than chance.

    Args:
      steps: number of steps of the run.
      **values: overrides of the config.
    """
    last = {
        key: steps for key in ("steps", "evaluate_every", "checkpoint__every", "fewshot__every")
    }
    last |= {"optimizer__warmup_steps": max(1, steps // 10)}
    seen = {
        "data__classes": tuple("0123456"),
        "fewshot__sets": ("digits:",),
        "fewshot__shots": (10,),
    }
    return "quickstart", last | seen | values


def fewshot(
    steps: int, *collections: str, shots: int = 10, images: int = 2000, source: str = "centred"
) -> Mapping[str, Any]:
    """Returns overrides for few-shot evaluation on collections, at the end of a run or more often.

    Args:
      steps: between evaluations, a multiple of the run's `evaluate_every`. The metrics are
        `fewshot/greek/10` and so on.
      *collections: by default `DOWNSTREAM`.
      shots: training images per class.
      images: number of images that the shots are drawn from.
      source: `centred` or `scattered` objects.
    """
    sets = tuple(
        f"{source}:{name}@train[:{images}],test[:2000]" for name in collections or DOWNSTREAM
    )
    return {"fewshot__sets": sets, "fewshot__shots": (shots,), "fewshot__every": steps}


def steps_of_equal_compute(config: str, values: Mapping[str, Any], steps: int) -> int:
    """Returns the steps for which a config with overrides has the compute of `steps` without them.

    Args:
      config: its name, with its argument after a colon.
      values: overrides, with two underscores for a dot.
      steps: number of steps of the run without the overrides.
    """
    from vit_jax.planning.estimate import make_workload

    file, _, argument = config.partition(":")
    plain, other = (read_config(f"{CONFIGS / file}.py:{argument}") for _ in range(2))
    other.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in values.items()}
    )
    costs = [make_workload(each, None).multiply_adds for each in (plain, other)]
    return max(1, round(steps * costs[0] / costs[1]))


def shorter(steps: int) -> Mapping[str, Any]:
    """Returns overrides for shorter runs that compare choices on `dev`, not on the test images."""
    return {
        "data__test_split": "dev[:5000]",
        "steps": steps,
        "optimizer__warmup_steps": steps // 10,
        "evaluate_every": steps,
        "checkpoint__every": steps,
        "fewshot__every": 0,
    }


def mean_fewshot(point: Mapping[str, Any], prefix: str = "", shots: int = 10) -> list[float]:
    """Returns a point's mean few-shot accuracy over the downstream collections, for each seed.

    Args:
      point: has the metrics of all downstream collections.
      prefix: `best ` for the best of all evaluations.
      shots: training images per class.
    """
    names = [f"{prefix}fewshot/{name}/{shots}" for name in DOWNSTREAM]
    return [
        sum(values) / len(names) for values in zip(*(point[name] for name in names), strict=True)
    ]
