"""Stages of experiments: a run for each combination of factors, at the best of some values, over
seeds.

Values of the config are written with two underscores for a dot, as `Study.job` takes them.
"""

import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax.ledger.study import Experiment, Study, Trial, config_of
from vit_jax.ledger.tables import short
from vit_jax.models import parse_name
from vit_jax.recipes import bit_hyperrule, finetune
from vit_jax.runs.jobs import job_of
from vit_jax.runs.rate_search import held_out_splits
from vit_jax.runs.warm_start import has_resnet

HYPERRULE_RATE = bit_hyperrule("imagenet2012").optimizer.learning_rate  # Of all data sets.
Stage = Callable[[Study], list[Trial]]
# Makes a run's config and the values that it changes, of a study and the run's factors; None: there
# is none.
Make = Callable[..., tuple[str, Mapping[str, Any]] | None]


def grid(
    name: str, factors: Mapping[str, Sequence], make: Make, seeds: Sequence[int] = (0,)
) -> Stage:
    """A stage with a run for each combination of the factors and each seed.

    Args:
      name: of the stage, and of the folder that its runs are in.
      make: called as `make(study, **factors, seed=seed)`.
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
    """Two stages: all choices, compared on held-out images; then each combination at its best, over
    seeds.

    A combination that has one choice is not compared.

    Args:
      name, factors, make: as of `grid`; `make` is given the choices too.
      choices: values of the config by their keys, such as `optimizer__learning_rate`, or other
        factors.
      held_out: the splits on which the choices are trained and compared: the test images are not
        seen.
      seeds: the first of them compares the choices.
      alike: turns a combination of factors into that whose choice it takes over, such as a smaller
        model's.
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
    """The choices of the point with the highest mean accuracy, of equals the first; nothing of no
    points.
    """
    if not points:
        return {}
    winner = max(points, key=lambda point: statistics.mean(point["accuracy"]))
    return {key: winner[key] for key in choices}


def combinations(factors: Mapping[str, Sequence]) -> Iterator[dict[str, Any]]:
    """All combinations of the factors' values."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def trial_of(
    study: Study,
    stage: str,
    cell: Mapping[str, Any],
    make: Make,
    more: Mapping[str, Any] | None = None,
) -> Trial | None:
    """The run of one combination of factors; None where there is none, or what it starts from is
    missing.
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
    """A folder's name: the values of the factors, a number with the last word of its name."""
    parts = [
        str(value)
        if isinstance(value, str)
        else f"{re.split('_', key)[-1]}{short(value).replace(',', '')}"
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
    """Pre-training and fine-tuning as the paper's, its accuracies beside those of a published
    table.

    Args:
      models: by the columns of the table as `Table.by_model` names them: a config and values that
        it changes.
      data_sets: as of `fine_tuning`, by the table's rows.
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
    """Stages of fine-tuning from the runs of `pretraining`, as table 4: rates on held-out images
    first.

    The rates and the held-out images are those of `python -m vit_jax.sweep`; some are for ResNets
    alone. BiTs are fine-tuned by BiT-HyperRule too: the paper reports the better of the two. Here
    held-out images say which that is.

    Args:
      models: as of `pretraining`.
      data_sets: names in `TRANSFER`, or `vtab/NAME` of one of VTAB-1k's tasks.
      high_resolution: pixels of ImageNet's images by model, where they are not 384; with them the
        parameters are averaged (table 2).
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
            if recipe == "bit_hyperrule":  # Of models that are convolutional all through.
                rates = (HYPERRULE_RATE,) if parse_name(name)[0].any_size else ()
            if not checkpoint or optimizer__learning_rate not in rates:
                return None
            values = dict(
                finetune__checkpoint=checkpoint, optimizer__learning_rate=optimizer__learning_rate
            )
            if recipe == "bit_hyperrule":  # Whose size of image is the model's.
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
    """True for a config in configs/ whose model is a BiT or a hybrid."""
    return has_resnet(named_config(config))


@functools.cache
def named_config(config: str) -> ConfigDict:
    """The config of a name in configs/, perhaps with its argument: `bit_i1k:model=BiT-R50x1`."""
    return config_of(job_of(Path(), config, {}))


def by_model(study: Study, stage: str, figure: str = "accuracy") -> dict[str, float]:
    """The mean of a figure, in per cent, of a stage's finished runs, by the factor `model`."""
    points = study.points(stage, figure)
    return {point["model"]: 100 * statistics.mean(point[figure]) for point in points}
