"""Stages of experiments: a run for each combination of factors, at the best of some values, over seeds.

Values of the config are written with two underscores for a dot, as `Study.job` takes them.
"""

import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vit_jax.command import read_config
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import short
from vit_jax.recipes import finetune
from vit_jax.runs.rate_search import held_out_splits
from vit_jax.runs.warm_start import has_resnet
from vit_jax.shipped import CONFIGS

Stage = Callable[[Study], list[Trial]]
# Makes a run's config and the values that it changes, of a study and the run's factors; None: there is none.
Make = Callable[..., tuple[str, Mapping[str, Any]] | None]


def grid(name: str, factors: Mapping[str, Sequence], make: Make, seeds: Sequence[int] = (0,)) -> Stage:
    """A stage with a run for each combination of the factors and each seed.

    Args:
      name: of the stage, and of the folder that its runs are in.
      make: called as `make(study, **factors, seed=seed)`.
    """

    def stage(study: Study) -> list[Trial]:
        varied = dict(factors) | {"seed": seeds}
        return [trial for cell in combinations(varied) if (trial := trial_of(study, name, cell, make))]

    return stage


def at_best(
    name: str,
    factors: Mapping[str, Sequence],
    make: Make,
    choices: Mapping[str, Sequence],
    held_out: Mapping[str, Any],
    seeds: Sequence[int] = (0, 1, 2),
    alike: Callable[[dict[str, Any]], dict[str, Any]] = lambda cell: cell,
) -> tuple[Stage, Stage]:
    """Two stages: all choices, compared on held-out images; then each combination at its best, over seeds.

    Args:
      name, factors, make: as of `grid`; `make` is given the choices too.
      choices: values of the config by their keys, such as `optimizer__learning_rate`, or other factors.
      held_out: the splits on which the choices are trained and compared: the test images are not seen.
      seeds: the first of them compares the choices.
      alike: turns a combination of factors into that whose choice it takes over, such as a smaller model's.
    """
    comparison = f"{name}-choices"

    def compare(study: Study) -> list[Trial]:
        compared = list({slug(cell): cell for cell in map(alike, combinations(factors))}.values())
        chosen = list(combinations(dict(choices) | {"seed": seeds[:1]}))
        cells = [cell | choice for cell in compared for choice in chosen]
        return [trial for cell in cells if (trial := trial_of(study, comparison, cell, make, held_out))]

    def conduct(study: Study) -> list[Trial]:
        trials = []
        for cell in combinations(factors):
            if chosen := best(study.points(comparison, "accuracy", **alike(cell)), choices):
                for seed in seeds:
                    trial = trial_of(study, name, cell | chosen | {"seed": seed}, make)
                    trials += [trial] if trial else []
        return trials

    return compare, conduct


def best(points: Sequence[Mapping[str, Any]], choices: Mapping[str, Sequence]) -> dict[str, Any]:
    """The choices of the point with the highest mean accuracy, of equals the first; nothing of no points."""
    if not points:
        return {}
    winner = max(points, key=lambda point: statistics.mean(point["accuracy"]))
    return {key: winner[key] for key in choices}


def combinations(factors: Mapping[str, Sequence]) -> Iterator[dict[str, Any]]:
    """All combinations of the factors' values."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def trial_of(
    study: Study, stage: str, cell: Mapping[str, Any], make: Make, more: Mapping[str, Any] | None = None
) -> Trial | None:
    """The run of one combination of factors; None where there is none, or what it starts from is missing."""
    made = make(study, **cell)
    if made is None:
        return None
    config, values = made
    name = f"{stage}/{slug(cell)}"
    return Trial(stage, cell, study.job(name, config, **values | (more or {}), seed=cell.get("seed", 0)))


def slug(cell: Mapping[str, Any]) -> str:
    """A folder's name: the values of the factors, a number with the last word of its name."""
    parts = [
        str(value) if isinstance(value, str) else f"{re.split('_', key)[-1]}{short(value).replace(',', '')}"
        for key, value in cell.items()
    ]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-")


# The paper's own scale: pre-training by configs/, fine-tuning by table 4.


def transfer(
    models: Mapping[str, tuple],
    data_sets: Mapping[str, str],
    table: str,
    high_resolution: Mapping[str, int] | None = None,
) -> Experiment:
    """Pre-training and fine-tuning as the paper's, its accuracies beside those of a published table.

    Args:
      models: by the columns of the table as `Table.by_model` names them: a config and values that it changes.
      data_sets: names in `TRANSFER`, by the table's rows.
      table: of `vit_jax.published`.
      high_resolution: as of `fine_tuning`.
    """
    return Experiment(
        claim="",
        stages=(
            pretraining(models),
            *fine_tuning(models, tuple(data_sets.values()), high_resolution=high_resolution or {}),
        ),
        read=lambda study: {row: by_model(study, name) for row, name in data_sets.items()},
        published=table,
    )


def pretraining(models: Mapping[str, tuple]) -> Stage:
    """A stage of pre-training runs.

    Args:
      models: for each name a config in configs/ and the values that it changes.
    """

    def make(study, model, seed):
        config, *values = models[model]
        return config, values[0] if values else {}

    return grid("pretrained", {"model": tuple(models)}, make)


def fine_tuning(
    models: Mapping[str, tuple],
    data_sets: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    high_resolution: Mapping[str, int] = {},
) -> list[Stage]:
    """Stages of fine-tuning from the runs of `pretraining`, as table 4: rates on held-out images first.

    The rates and the held-out images are those of `python -m vit_jax.sweep`; some are for ResNets alone.

    Args:
      models: as of `pretraining`.
      high_resolution: pixels of ImageNet's images by model, where they are not 384; with them the parameters
        are averaged (table 2).
    """
    stages = []
    for data_set in data_sets:
        recipe = finetune(data_set)

        def make(study, model, optimizer__learning_rate, seed, data_set=data_set, recipe=recipe):
            checkpoint = study.workdir("pretrained", model=model)
            if optimizer__learning_rate not in recipe.sweep.rates and not is_resnet(models[model][0]):
                return None
            values = dict(finetune__checkpoint=checkpoint, optimizer__learning_rate=optimizer__learning_rate)
            size = high_resolution.get(model, 0) if data_set == "imagenet2012" else 0
            values |= {"optimizer__average": 0.9999} if size else {}
            config = f"finetune:dataset={data_set}" + (f",size={size}" if size else "")
            return checkpoint and (config, values)

        train_split, dev_split = held_out_splits(recipe)
        held_out = dict(data__train_split=train_split, data__test_split=dev_split)
        choices = {"optimizer__learning_rate": (*recipe.sweep.rates, *recipe.sweep.resnet_rates)}
        stages += at_best(data_set, {"model": tuple(models)}, make, choices, held_out, seeds)
    return stages


@functools.cache
def is_resnet(config: str) -> bool:
    """True for a config in configs/ whose model is a BiT or a hybrid."""
    return has_resnet(read_config(str(CONFIGS / f"{config}.py")))


def vtab(models: Mapping[str, tuple], tasks: Mapping[str, str]) -> Experiment:
    """Pre-training, and fine-tuning on VTAB-1k's tasks by the one rate that all of them have (table 9).

    Args:
      models: as of `transfer`.
      tasks: names of `configs/finetune.py:dataset=vtab/NAME`, by the table's rows.
    """

    def make(study, model, task, seed):
        checkpoint = study.workdir("pretrained", model=model)
        return checkpoint and (f"finetune:dataset=vtab/{task}", {"finetune__checkpoint": checkpoint})

    factors = {"model": tuple(models), "task": tuple(tasks.values())}
    return Experiment(
        claim="",
        stages=(pretraining(models), grid("finetuned", factors, make, (0, 1, 2))),
        read=lambda study: {row: by_model(study, "finetuned", task=task) for row, task in tasks.items()},
        published="table9",
    )


def by_model(study: Study, stage: str, **factors: Any) -> dict[str, float]:
    """Mean accuracy, in per cent, of a stage's finished runs with these factors, by the factor `model`."""
    points = study.points(stage, "accuracy", **factors)
    return {point["model"]: 100 * statistics.mean(point["accuracy"]) for point in points}
