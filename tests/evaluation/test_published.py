"""The paper's tables as data have one format, and tables with the same values agree."""

import json

import numpy as np
import pytest

import vit_jax
from vit_jax import published
from vit_jax.data.sources.vtab import GROUPS, TASKS
from vit_jax.errors import UserError


@pytest.mark.parametrize(
    "name", ["table2", "table3", "table5", "table6", "table7", "table8", "table9"]
)
def test_every_row_of_a_table_has_a_value_for_every_column(name):
    table = published.table(name)
    assert table.source == f"An Image is Worth 16x16 Words, arXiv 2010.11929 v2, table {name[5:]}"
    deviations = json.loads((published.FOLDER / f"{name}.json").read_text()).get("std", {})
    for row in (*table.rows.values(), *deviations.values()):
        assert len(row) == len(table.columns)
    models = {column["model"] for column in table.columns} - {"EfficientNet-L2 (Noisy Student)"}
    assert models <= set(vit_jax.MODELS)


def column(name: str, **wanted: str) -> dict[str, float]:
    """Returns the values of one column by row."""
    table = published.table(name)
    return {row: table.figure(row, **wanted) for row in table.rows}


def test_objectnet_has_the_values_in_the_papers_text():
    figures = published.table("objectnet").by_model()
    assert figures == {"ViT-H/14, JFT-300M": {"ObjectNet": 61.7, "ObjectNet, top-5": 82.1}}


def test_every_file_has_a_source_and_a_value_for_every_column():
    for name in published.TABLES:
        table = published.table(name)
        assert table.source and table.unit and table.columns
        for row, figures in table.rows.items():
            assert len(figures) == len(table.columns), f"{name}, {row}"


def test_columns_of_the_same_model_have_different_names():
    for name in set(published.TABLES) - {"table4"}:  # The columns of table 4 are data sets.
        table = published.table(name)
        shown = [column for column in table.columns if not column.get("baseline")]
        assert len(table.by_model()) == len(shown), name
    assert published.table("table7").by_model()["BiT-R152x2, JFT-300M, SGD"]["Flowers"] == 99.32


def test_figure_2_has_the_means_of_table_9():
    for head in published.table("figure2").columns:
        figures = column("table9", **head)
        for group in GROUPS:
            names = [task.name for task in TASKS.values() if task.group == group]
            mean = published.table("figure2").figure(group, **head)
            assert mean == pytest.approx(np.mean([figures[name] for name in names]), abs=0.006)


def test_errors_about_missing_rows_or_columns_name_them():
    with pytest.raises(UserError, match="table 2 has no row 'Imagenet'; did you mean 'ImageNet'"):
        published.table("table2").figure("Imagenet", model="ViT-H/14")
    with pytest.raises(UserError, match="table 2 has 2 columns with"):
        published.table("table2").figure("ImageNet", model="ViT-L/16")


@pytest.mark.parametrize("model, epochs", [("B/16", 7), ("B/32", 7), ("L/16", 14), ("L/32", 7)])
def test_tables_of_the_scaling_study_agree(model, epochs):
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
    # Table 2 has means of unrounded accuracies.
    assert np.mean([*figures.values()]) == pytest.approx(
        column("table2", **wanted)["VTAB-19"], abs=0.015
    )
