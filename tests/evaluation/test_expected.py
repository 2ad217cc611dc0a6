"""The paper's tables as data: of one form, and agreeing where they show the same."""

import json
from pathlib import Path

import numpy as np
import pytest

import vit_jax
from vit_jax.data.vtab import GROUPS, TASKS

FOLDER = Path(__file__).parents[2] / "experiments" / "expected"
TABLES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("table*.json"))}


@pytest.mark.parametrize("name", ["table2", "table5", "table6", "table9"])
def test_table_has_a_figure_for_every_column(name):
    table = TABLES[name]
    assert table["table"] == f"Table {name[5:]}"
    for row in (*table["rows"].values(), *table.get("std", {}).values()):
        assert len(row) == len(table["columns"])
    models = {column["model"] for column in table["columns"]} - {"EfficientNet-L2 (Noisy Student)"}
    assert models <= set(vit_jax.MODELS)


def column(name: str, **wanted: str) -> dict[str, float]:
    """The figures of one column by row."""
    table = TABLES[name]
    (index,) = (i for i, head in enumerate(table["columns"]) if wanted.items() <= head.items())
    return {row: figures[index] for row, figures in table["rows"].items()}


def test_objectnet_has_the_figures_of_the_papers_text():
    table = json.loads((FOLDER / "objectnet.json").read_text())
    assert table["columns"][0] == {"model": "ViT-H/14", "pretraining": "JFT-300M"}
    assert {row: figures[0] for row, figures in table["rows"].items()} == {
        "ObjectNet": 61.7,
        "ObjectNet, top-5": 82.1,
    }


@pytest.mark.parametrize("model, epochs", [("B/16", 7), ("B/32", 7), ("L/16", 14), ("L/32", 7)])
def test_scaling_study_has_the_same_figures(model, epochs):
    wanted = dict(model=f"ViT-{model}", pretraining="JFT-300M", epochs=epochs)
    assert column("table5", **wanted).items() <= column("table6", **wanted).items()


@pytest.mark.parametrize(
    "wanted, groups",
    [
        (dict(model="ViT-H/14", pretraining="JFT-300M"), (86.69, 87.00, 65.03)),
        (dict(model="ViT-L/16", pretraining="JFT-300M"), (85.56, 86.73, 62.96)),
        (dict(model="ViT-L/16", pretraining="ImageNet-21k"), (83.27, 84.65, 57.50)),
    ],
)
def test_vtab_tasks_have_the_papers_means(wanted, groups):
    figures = column("table9", **wanted)
    for group, mean in zip(GROUPS, groups, strict=True):
        names = [task.name for task in TASKS.values() if task.group == group]
        assert np.mean([figures[name] for name in names]) == pytest.approx(mean, abs=0.0051)
    # Table 2's are means of unrounded accuracies.
    assert np.mean([*figures.values()]) == pytest.approx(column("table2", **wanted)["VTAB-19"], abs=0.015)
