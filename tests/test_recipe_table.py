"""Configs have the values of the authors' recipes; `recipes.toml` cites a line of code for each."""

import ast
import math
import operator
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.test_config import load
from vit_jax.config import check, leaves
from vit_jax.models import parse_name
from vit_jax.recipes import IMAGENET_21K_IMAGES, IMAGENET_IMAGES

TABLE = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())
OPERATORS = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}


def by_config() -> dict[str, list[list]]:
    """Returns the rows of `recipes.toml` for each config, by the config's name and argument."""
    rows = defaultdict(list)
    for recipe in TABLE["recipes"]:
        for config in recipe["configs"]:
            rows[config] += recipe["values"]
    return rows


RECIPES = by_config()


def value_of(text: Any) -> Any:
    """Parses a value of the table: evaluates arithmetic, and converts lists to tuples and "None" to
    None.
    """
    if isinstance(text, list):
        return tuple(map(value_of, text))
    if not isinstance(text, str) or not text[:1].isdigit():
        return None if text == "None" else text

    def compute(node: ast.expr) -> float:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Call) and node.func.id == "sqrt":
            return math.sqrt(compute(node.args[0]))
        return OPERATORS[type(node.op)](compute(node.left), compute(node.right))

    return compute(ast.parse(text, mode="eval").body)


def found_in(config, epoch: float) -> dict[str, Any]:
    """Returns a config's values by option name.

    Values that the model name implies are included. Lengths are also given in epochs.
    """
    found = dict(leaves(config))
    if config.model.name:
        named = parse_name(config.model.name)[1]
        found |= {
            f"model.{key}": value
            for key, value in named.items()
            if found.get(f"model.{key}") is None
        }
    steps = dict(
        warmup_epochs=config.optimizer.warmup_steps,
        frozen_epochs=config.dino.frozen_prototype_steps,
        temperature_epochs=config.dino.teacher_temperature_steps,
    )
    found |= {name: count / epoch for name, count in steps.items()}
    found["epochs"] = config.epochs or config.steps / epoch
    options = config.get(config.objective.name, {})
    if "mask_ratio" in options:
        patches = (config.data.image_size // (found.get("model.patch_size") or 32)) ** 2
        found["masked_patches"] = round(options["mask_ratio"] * patches)
    if config.objective.name == "beitv2":
        found["early_layers"] = options.aggregate_from or found["model.depth"] - 3
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_config_has_the_values_of_its_authors(name):
    file, _, argument = name.partition(":")
    config = load(file, argument)
    if config.finetune.head == "kept":
        config.finetune.checkpoint = "DIR"
    check(config)
    images = IMAGENET_21K_IMAGES if "21k" in (config.data.path or "") else IMAGENET_IMAGES
    epoch = TABLE["epochs"].get(name, images / config.batch_size)
    found = found_in(config, epoch)
    for option, text, line, part in RECIPES[name]:
        expected, value = value_of(text), found[option]
        if isinstance(expected, str | bool | None):
            same = value == expected
        elif isinstance(expected, tuple):
            same = tuple(value) == pytest.approx(expected)
        else:
            # Epochs are rounded to steps. Disabled options are 0 or None.
            close = 2 / epoch / expected if option.endswith("epochs") and expected else 1e-6
            same = (value or 0) == pytest.approx(expected, rel=close, abs=1e-12)
        assert same, f"{option}: {value} here, {expected} in {line}: {part}"


def test_every_recipe_that_has_authors_code_is_in_the_table():
    """The other configs follow papers without published training code, or are our own."""
    others = {"bit_", "vit_", "r50_"}
    others |= {
        "clip",  # Its training code is not published.
        "composed",
        "dino_digits",
        "dvae",
        "finetune",
        "finetune_elpv",
        "masked_patch_b16",
        "my_images",
        "my_images_unlabelled",
        "siglip2",  # Its training code is not published.
    }
    others |= {"quickstart"}
    configs = {path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.py")}
    own = {name for name in configs if name in others or name[:4] in others} - {"vit_s16_i1k"}
    assert configs - own == {name.partition(":")[0] for name in RECIPES}
