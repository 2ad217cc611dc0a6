"""Functions that define the stages of an experiment. A stage is a set of training runs.

The runs of a stage differ in their factors and seeds. A factor is a property that varies between
runs, such as the model or the number of images. Some stages search for the best hyperparameters,
and later stages use the hyperparameters that were found. Config keys have two underscores in place
of a dot, as in `Study.job`.
"""

import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.ledger.study import Experiment, Study, Trial, config_of
from vit_jax.ledger.tables import short
from vit_jax.models import parse_name
from vit_jax.options.run import RunOptions
from vit_jax.recipes import bit_hyperrule, finetune
from vit_jax.runs.jobs import job_of
from vit_jax.runs.rate_search import held_out_splits
from vit_jax.runs.warm_start import has_resnet

HYPERRULE_RATE = bit_hyperrule("imagenet2012").optimizer.learning_rate  # Of all data sets.
Stage = Callable[[Study], list[Trial]]
# A function `(study, **factors) -> (config, overrides)` that defines the run for a combination of
# factors. It returns None if there is no such run.
Make = Callable[..., tuple[str, Mapping[str, Any]] | None]


def grid(
    name: str, factors: Mapping[str, Sequence], make: Make, seeds: Sequence[int] = (0,)
) -> Stage:
    """Returns a stage with a run for each combination of factors and each seed.

    Args:
      make: function that returns the config and overrides of a run. It is called as
        `make(study, **factors, seed=seed)` with one value of each factor.
    """

    def stage(study: Study) -> list[Trial]:
        varied = dict(factors) | {"seed": seeds}
        return [
            trial for cell in combinations(varied) if (trial := trial_of(study, name, cell, make))
        ]

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
    """Returns two stages: a search for the best values, and the runs with these values.

    The first stage runs each combination of factors with each of the `choices`, such as four
    learning rates, and evaluates validation images. The second stage runs each combination with its
    best choice and with each seed. The search is skipped for combinations that have only one
    choice.

    Args:
      make: function that returns the config and overrides of a run, given the study, a value of
        each factor, a value of each choice, and the seed.
      choices: values to choose from, by config key (such as `optimizer__learning_rate`) or by
        another argument of `make`.
      held_out: config overrides for the runs of the search. They replace the test split by
        validation images.
      seeds: random seeds of the runs; the search uses only the first one.
      alike: function that maps a combination of factors to the combination whose search results it
        uses. For example, all models can use the learning rate that is best for the smallest model.
        By default, each combination has its own search.
    """
    comparison = f"{name}-choices"

    def compared(study: Study, cell: dict[str, Any]) -> list[Trial]:
        chosen = combinations(dict(choices) | {"seed": seeds[:1]})
        found = [trial_of(study, comparison, cell | choice, make, held_out) for choice in chosen]
        return [trial for trial in found if trial]

    def compare(study: Study) -> list[Trial]:
        cells = {slug(cell): cell for cell in map(alike, combinations(factors))}.values()
        groups = [compared(study, cell) for cell in cells]
        return [trial for group in groups if len(group) > 1 for trial in group]

    def conduct(study: Study) -> list[Trial]:
        trials = []
        for cell in combinations(factors):
            found = compared(study, alike(cell))
            if len(found) == 1:
                chosen = {key: found[0].factors[key] for key in choices}
            else:
                chosen = best(study.points(comparison, "accuracy", **alike(cell)), choices)
            if chosen:
                for seed in seeds:
                    trial = trial_of(study, name, cell | chosen | {"seed": seed}, make)
                    trials += [trial] if trial else []
        return trials

    return compare, conduct


def best(points: Sequence[Mapping[str, Any]], choices: Mapping[str, Sequence]) -> dict[str, Any]:
    """Returns the hyperparameters with the highest mean accuracy; empty: no points.

    Args:
      points: results from `Study.points`: a point for each tried combination of hyperparameters.
      choices: the values that were tried, by name of the hyperparameter. The result contains the
        best value of each.
    """
    if not points:
        return {}
    winner = max(points, key=lambda point: statistics.mean(point["accuracy"]))
    return {key: winner[key] for key in choices}


def combinations(factors: Mapping[str, Sequence]) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the factors' values."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def trial_of(
    study: Study,
    stage: str,
    cell: Mapping[str, Any],
    make: Make,
    more: Mapping[str, Any] | None = None,
) -> Trial | None:
    """Returns the run for a combination of factors.

    None: `make` returned None, because there is no such run or its checkpoint is missing.

    Args:
      make: function that returns the run's config and overrides.
    """
    made = make(study, **cell)
    if made is None:
        return None
    config, values = made
    name = f"{stage}/{slug(cell)}"
    return Trial(
        stage, cell, study.job(name, config, **values | (more or {}), seed=cell.get("seed", 0))
    )


def slug(cell: Mapping[str, Any]) -> str:
    """Returns a run's folder name from its factors' values, with numbers as in `rate0.001`."""
    parts = [
        str(value)
        if isinstance(value, str)
        else f"{re.split('_', key)[-1]}{short(value).replace(',', '')}"
        for key, value in cell.items()
    ]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-")


# The paper's scale: pre-training with configs/, fine-tuning as in table 4.


def transfer(
    models: Mapping[str, tuple],
    data_sets: Mapping[str, str],
    table: str,
    high_resolution: Mapping[str, int] | None = None,
) -> Experiment:
    """Returns an experiment of pre-training and fine-tuning, for comparison with a paper's table.

    Args:
      models: config and overrides of each model, by the table's column (a key of
        `Table.by_model`).
      data_sets: for each row of the table, a name in `TRANSFER`, or `vtab/NAME` for a task of
        VTAB-1k.
      high_resolution: image size in pixels for runs on ImageNet, by model. None: 384 for all
        models.
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
    """Returns a stage of pre-training runs, from a config and its overrides by model name."""

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
    """Returns stages that fine-tune the models of `pretraining` as in table 4.

    The first stages choose learning rates, with the values and validation images of
    `python -m vit_jax.sweep`. On ImageNet, BiTs and hybrids have an additional learning rate. BiTs
    are fine-tuned with a second recipe, BiT-HyperRule. The paper reports the better result of both
    recipes; here the recipe is chosen on validation images.

    Args:
      data_sets: names in `TRANSFER`, or `vtab/NAME` for a task of VTAB-1k.
      high_resolution: image size in pixels for runs on ImageNet, by model; 384 for other models.
        These runs evaluate averaged parameters (table 2).
    """
    stages = []
    for data_set in data_sets:
        sweep = finetune(data_set).sweep

        def make(
            study, model, recipe, optimizer__learning_rate, seed, data_set=data_set, sweep=sweep
        ):
            checkpoint = study.workdir("pretrained", model=model)
            name = named_config(models[model][0]).model.name
            rates = (*sweep.rates, *(sweep.resnet_rates if is_resnet(models[model][0]) else ()))
            if recipe == "bit_hyperrule":  # Only for fully convolutional models.
                rates = (HYPERRULE_RATE,) if parse_name(name)[0].any_size else ()
            if not checkpoint or optimizer__learning_rate not in rates:
                return None
            values = dict(
                finetune__checkpoint=checkpoint, optimizer__learning_rate=optimizer__learning_rate
            )
            if recipe == "bit_hyperrule":  # This recipe defines the image size.
                return f"bit_hyperrule:dataset={data_set},model={name}", values
            size = high_resolution.get(model, 0) if data_set == "imagenet2012" else 0
            values |= {"optimizer__average": 0.9999} if size else {}
            return f"finetune:dataset={data_set}" + (f",size={size}" if size else ""), values

        train_split, dev_split = held_out_splits(finetune(data_set))
        held_out = dict(data__train_split=train_split, data__test_split=dev_split)
        rates = dict.fromkeys((*sweep.rates, *sweep.resnet_rates, HYPERRULE_RATE))
        choices = {
            "recipe": ("finetune", "bit_hyperrule"),
            "optimizer__learning_rate": tuple(rates),
        }
        stages += at_best(data_set, {"model": tuple(models)}, make, choices, held_out, seeds)
    return stages


@functools.cache
def is_resnet(config: str) -> bool:
    """Returns True if the model of a config in configs/ is a BiT or a hybrid."""
    return has_resnet(named_config(config))


@functools.cache
def named_config(config: str) -> RunOptions:
    """Reads a config in configs/ by name, with an optional argument: `bit_i1k:model=BiT-R50x1`."""
    return config_of(job_of(Path(), config, {}))


def by_model(study: Study, stage: str, figure: str = "accuracy") -> dict[str, float]:
    """Returns the mean of a metric over a stage's finished runs, for each model, in per cent."""
    points = study.points(stage, figure)
    return {point["model"]: 100 * statistics.mean(point[figure]) for point in points}
