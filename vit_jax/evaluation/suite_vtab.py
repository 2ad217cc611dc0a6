"""The suite `vtab`: fine-tuning on the 19 tasks of VTAB-1k by the recipe in configs/finetune.py."""

import ast
import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence

from vit_jax.config import OPERATIONAL, ConfigMistake, base_config, check
from vit_jax.data.sources import open_source
from vit_jax.data.sources.vtab import GROUPS, TASKS
from vit_jax.errors import UserError
from vit_jax.evaluation.fewshot import fingerprints
from vit_jax.evaluation.suite import (
    DATA_DIR,
    Measurement,
    Options,
    Row,
    Stopped,
    Subject,
    Suite,
    SuiteOption,
    digest_of,
    mean,
)
from vit_jax.recipes import finetune


def set_value(config, text: str) -> None:
    """Sets a config value from text such as `batch_size=128`."""
    key, _, value = text.partition("=")
    # A value that is no Python literal, such as float32, stays a string.
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    try:
        config.update_from_flattened_dict({key: value})
    except ConfigMistake as error:
        raise UserError(f"--value={text}: {error}") from error


def parse_values(texts: Sequence[str]) -> list[str]:
    """Checks texts that set config values, such as `batch_size=128`, and returns them."""
    for text in texts:
        set_value(base_config(), text)
    return list(texts)


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the `Measurement` of each VTAB task, which fine-tunes the model in this process."""

    def path_of(key: str) -> str:
        return f"{key}:{options['data_dir']}" if options["data_dir"] else key

    @functools.cache
    def fingerprint_of(key: str) -> dict[str, int | str]:
        train, test = (
            open_source("vtab", split, path=path_of(key)) for split in ("train800val200", "test")
        )
        return fingerprints(train, test)

    def measure(key: str, name: str, subject: Subject, digest: str) -> list[Row]:
        config = finetune(f"vtab/{key}", size=options["image_size"] or 384)
        config.finetune.checkpoint = subject.name
        config.data.path = path_of(key)
        recipe = config.copy_and_resolve_references()
        for value in options["value"]:
            set_value(config, value)
        figures = subject.finetune(check(config, file=recipe), f"vtab/{key}-{digest}")
        if not figures:  # A signal stopped the training run. It has saved a checkpoint.
            raise Stopped
        return [Row("vtab", name, figures["accuracy"], None, int(figures["images"]))]

    return [
        Measurement(
            (task.name,),
            lambda names, key=key: digest_of(fingerprint_of(key)),
            functools.partial(measure, key, task.name),
            identify=lambda name, key=key: fingerprint_of(key),
        )
        for key, task in TASKS.items()
    ]


def groups(there: Collection[str]) -> dict[str, list[str]]:
    """Returns the available tasks of each group of VTAB tasks, such as `natural`.

    Returns:
      A dict from the name of a group to the names of its available tasks. Groups without available
      tasks are omitted. If some tasks of a group are missing, the number of available tasks is
      appended to the group's name, as in `VTAB-19, 12 of 19 tasks`.
    """
    all_groups = {"VTAB-19": [task.name for task in TASKS.values()]}
    all_groups |= {
        group: [task.name for task in TASKS.values() if task.group == group] for group in GROUPS
    }
    present = {}
    for group, tasks in all_groups.items():
        if names := [name for name in tasks if name in there]:
            lack = f", {len(names)} of {len(tasks)} tasks" if len(names) < len(tasks) else ""
            present[group + lack] = names
    return present


def draw(axes, rows: Sequence[Row], printed: Mapping[str, Mapping[str, float]]) -> None:
    """Draws a bar for each model and task group, as in the ViT paper's figure 2."""
    figures = {"ours": {row.name: 100 * row.accuracy for row in rows}} | printed
    by_group = groups(figures["ours"])
    width = 0.84 / len(figures)
    for place, (model, values) in enumerate(figures.items()):
        lefts = [x + place * width for x in range(len(by_group))]
        heights = [mean(values, tasks) for tasks in by_group.values()]
        bars = axes.bar(lefts, heights, width, label=model, align="edge")
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks(
        [x + 0.42 for x in range(len(by_group))], [name.replace(", ", "\n") for name in by_group]
    )
    axes.set(ylabel="top-1, %", ylim=(0, 100))
    axes.legend(
        frameon=False, fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1)
    )


SUITE = Suite(
    name="vtab",
    title="VTAB-1k, top-1 after fine-tuning on 1,000 images",
    needs="the 19 tasks' data sets, prepared by TFDS",
    measurements=measurements,
    options={
        "value": SuiteOption(
            (),
            "Override of the config of VTAB's runs, such as batch_size=128.",
            parse_values,
            repeated=True,
        ),
        "data_dir": DATA_DIR,
    },
    # The overrides that affect the metrics.
    settings=lambda subject, options: {
        "value": sorted(
            value for value in options["value"] if value.partition("=")[0] not in OPERATIONAL
        )
    },
    published=("table9",),
    means=groups,
    draw=draw,
    in_training=False,
)
