"""Laptop scale of the experiments: small ViTs, BiTs and hybrids on generated images of 16 pixels.

Each image shows an object, such as a letter, on texture and noise. A training step with images of
16 pixels takes a quarter of the time of a step with images of 32 pixels. Objects are still larger
than the digits in scikit-learn's data set. Each object fills its image (`centred`), because small
ViTs need thousands of steps to learn objects at random positions (`scattered`).

Models are pre-trained on Latin letters (the collection `letters`), of which any number of images
can be generated. They are evaluated by few-shot classification of letters of other alphabets. The
recipe is `configs/composed.py`.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.command import read_config
from vit_jax.shipped import CONFIGS

UPSTREAM, DOWNSTREAM = "letters", ("greek", "cyrillic", "armenian", "georgian")
SHOTS = 10  # Number of training images per class in few-shot evaluations.
# Three sizes of each of three families, in ascending order of compute.
MODELS = {
    "ViT": ("ViT-32x4/4", "ViT-64x4/4", "ViT-96x4/4"),
    "BiT": ("BiT-R14x1/8", "BiT-R14x1/4", "BiT-R26x1/4"),
    "hybrid": ("R14x1/8+ViT-32x4/4", "R14x1/8+ViT-64x4/4", "R14x1/4+ViT-64x4/4"),
}


def family_of(model: str) -> str:
    """Returns a model's family: `ViT`, `BiT` or `hybrid`."""
    return "hybrid" if "+" in model else model.partition("-")[0]


def config_name(
    model: str,
    collection: str = UPSTREAM,
    images: int = 100_000,
    steps: int = 1000,
    size: int = 16,
    source: str = "centred",
) -> str:
    """Returns the name of a config for generated images, such as `composed:model=ViT-32x4/4,...`.

    The config is `configs/composed.py` with arguments; the batch size is 128.

    Args:
      collection: the kind of objects in the images: `letters`, `digits`, or another alphabet.
      images: number of training images: the first images of the training split.
      size: size of the images, in pixels.
      source: kind of images. `centred`: one object fills the image. `scattered`: objects are at
        random positions. `coloured`: one object with a colour and a rotation.
    """
    images_of = f"source={source},collection={collection},images={images},size={size}"
    return f"composed:model={model},{images_of},steps={steps}"


def short_run(steps: int, **values: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the config and overrides of a short run, which takes half a minute for a ViT.

    The run trains the quickstart's model on scikit-learn's digits from 0 to 6. The few-shot
    evaluation (metric `fewshot/digits/10`) uses all ten digits.
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
    steps: int, *collections: str, images: int = 2000, source: str = "centred"
) -> Mapping[str, Any]:
    """Returns config overrides for few-shot evaluation during a run.

    Args:
      steps: interval of the evaluation in steps, a multiple of the run's `evaluate_every`.
      *collections: alphabets to classify, such as `greek`; `DOWNSTREAM` by default.
      images: number of images from which the shots are drawn.
      source: `centred` or `scattered` objects.
    """
    sets = tuple(
        f"{source}:{name}@train[:{images}],test[:2000]" for name in collections or DOWNSTREAM
    )
    return {"fewshot__sets": sets, "fewshot__shots": (SHOTS,), "fewshot__every": steps}


def steps_of_equal_compute(config: str, values: Mapping[str, Any], steps: int) -> int:
    """Returns the number of steps that makes a changed config as expensive as the original config.

    Args:
      config: name of the original config, with its argument after a colon.
      values: overrides that change the config, with two underscores for a dot.
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
    """Returns overrides for a search's short runs, evaluated at the end on 5,000 `dev` images."""
    return {
        "data__test_split": "dev[:5000]",
        "steps": steps,
        "optimizer__warmup_steps": steps // 10,
        "evaluate_every": steps,
        "checkpoint__every": steps,
        "fewshot__every": 0,
    }


def mean_fewshot(point: Mapping[str, Any], prefix: str = "") -> list[float]:
    """Returns the mean few-shot accuracy over the four alphabets of `DOWNSTREAM`, for each seed.

    Args:
      prefix: `best ` for the highest value of each metric during a run; empty for the last value.
    """
    names = [f"{prefix}fewshot/{name}/{SHOTS}" for name in DOWNSTREAM]
    return [
        sum(values) / len(names) for values in zip(*(point[name] for name in names), strict=True)
    ]
