"""Tests of an evaluation's tables with the paper's results next to ours, and of stored results."""

import json

import pytest

from vit_jax.data.sources.vtab import TASKS
from vit_jax.errors import UserError
from vit_jax.evaluation.results import Results, draw
from vit_jax.evaluation.suite import Row

NAMES = [task.name for task in TASKS.values()]
H14 = 3  # Index of the first of the paper's columns.


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "out", "checkpoint", "ViT-L/16 of a run (here)")


def table(results: Results) -> dict[str, list[str]]:
    """Returns the rows of a Markdown table by first cell; all rows must have equally many cells."""
    lines = [line for line in results.markdown().splitlines() if line.startswith("|")]
    rows = [
        [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | ")]
        for line in lines
    ]
    assert {len(row) for row in rows} == {len(rows[0])}
    return {row[0]: row for row in rows}


def test_vtab_has_the_papers_means_of_groups_and_of_all(results):
    results.put(*(Row("vtab", name, 0.5, None, 30) for name in NAMES))
    found = table(results)
    assert found[""][1:3] + found[""][H14:] == [
        "ours, %",
        "images",
        "ViT-H/14, JFT-300M, paper",
        "ViT-L/16, JFT-300M, paper",
        "ViT-L/16, ImageNet-21k, paper",
        "note",
    ]
    assert found["Sun397"] == ["Sun397", "50.00", "30", "65.0", "63.5", "61.0", ""]
    assert found["**natural**"][1:6] == ["50.00", "", "86.69", "85.56", "83.27"]
    assert found["**specialized**"][H14:6] == ["87.0", "86.73", "84.65"]
    assert found["**structured**"][H14:6] == ["65.03", "62.96", "57.5"]
    assert found["**VTAB-19**"][1:6] == ["50.00", "", "77.63", "76.29", "72.71"]


def test_vtab_of_some_tasks_is_compared_with_the_same_tasks(results):
    results.put(
        Row("vtab", "DTD", 0.5), Row("vtab", "Pets", 0.7), Row("vtab", "SVHN", note="get it")
    )
    found = table(results)
    assert found["**natural, 2 of 7 tasks**"][1:4] == ["60.00", "", f"{(75.2 + 97.2) / 2:.1f}"]
    assert found["**VTAB-19, 2 of 19 tasks**"][1] == "60.00"
    assert not any("structured" in name for name in found)
    assert found["SVHN"][1:4] + found["SVHN"][6:] == ["", "", "88.9", "get it"]


def test_imagenets_rows_are_next_to_the_papers_results(results):
    names = ["ImageNet", "ImageNet, top-5", "ReaL", "ImageNet-v2", "ObjectNet", "ObjectNet, top-5"]
    results.put(*(Row("imagenet", name, 0.8765, None, 50_000) for name in names))
    found = table(results)
    assert found["ImageNet"] == ["ImageNet", "87.65", "50,000", "88.55", "87.76", "85.3", ""]
    assert found["ReaL"][H14:6] == ["90.72", "90.54", "88.62"]
    assert found["ObjectNet"][H14:6] == ["61.7", "", ""]
    assert found["ObjectNet, top-5"][H14:6] == ["82.1", "", ""]
    assert found["ImageNet, top-5"][H14:] == found["ImageNet-v2"][H14:] == ["", "", "", ""]


def test_a_std_of_zero_is_shown_and_a_missing_one_is_not(results):
    results.put(Row("fewshot", "a, 1 shot", 0.25, 0.0), Row("fewshot", "a, 5 shots", 0.5, None))
    found = table(results)
    assert (found["a, 1 shot"][1], found["a, 5 shots"][1]) == ("25.00 ± 0.00", "50.00")


def test_a_vertical_bar_in_a_note_does_not_end_its_cell(results):
    results.put(Row("probe", "a, linear probe", note="a|b"))
    assert table(results)["a, linear probe"][-1] == "a\\|b"


def test_the_figure_is_drawn_only_for_few_shot_results(results, tmp_path):
    path = tmp_path / "results.png"
    results.put(Row("probe", "a, linear probe", 0.5), Row("vtab", "DTD", note="get it"))
    assert not draw(path, results.rows) and not path.exists()
    results.put(Row("fewshot", "a, b, 5 shots", 0.5, 0.1), Row("fewshot", "c, 1 shot", 0.2))
    assert draw(path, results.rows) and path.stat().st_size > 5000


def again(results: Results, checkpoint: str = "checkpoint") -> Results:
    return Results(results.folder, checkpoint, "ViT-L/16")


def test_rows_are_restored_and_rows_without_images_are_not_results(results):
    results.put(Row("vtab", "DTD", 0.5, None, 30), Row("vtab", "Pets", note="get it"))
    later = again(results)
    assert later.rows == results.rows
    assert (
        later.has("vtab", "DTD")
        and not later.has("vtab", "DTD", "Pets")
        and not later.has("vtab", "SVHN")
    )
    # Five images were evaluated, but had no small objects.
    results.put(Row("detection", "a, APs", None, None, 5, "no object of this size"))
    assert again(results).has("detection", "a, APs")


def test_a_folder_of_a_suite_in_the_results_folder_is_accepted(results):
    (results.folder / "vtab").mkdir()
    again(results)


def test_remains_of_a_killed_first_write_are_ignored(tmp_path):
    (tmp_path / "results.tmp").write_text("{")
    assert not Results(tmp_path, "checkpoint", "ViT").rows


def test_results_of_another_step_or_content_are_dropped(tmp_path):
    def opened(step, content) -> Results:
        return Results(tmp_path / "out", "checkpoint", "ViT", {"step": step, "content": content})

    first = opened(6, "a")
    first.begin("knn", {"crop": "whole"})
    first.put(
        Row("knn", "digits, 10-NN", 0.5),
        Row("knn", "pets, 10-NN", note="get it"),
        data={"digits, 10-NN": "1"},
    )
    same = opened(6, "a")
    assert (same.rows, same.outdated) == (first.rows, "")
    assert (same.data_of("knn", "digits, 10-NN"), same.data_of("knn", "pets, 10-NN")) == ("1", None)
    assert same.markdown().startswith("# ViT\n")
    later = opened(400, "b")
    assert (
        not later.rows
        and "figures of step 6 of the checkpoint, which are removed: knn digits, 10-NN"
        in later.outdated
    )
    later.begin("knn", {"crop": "centre"})
    later.put(Row("knn", "digits, 10-NN", 0.9))
    assert "figures of another content of it" in opened(400, "c").outdated


def test_results_of_a_file_without_the_step_are_dropped(tmp_path):
    results = Results(tmp_path / "out", "checkpoint", "ViT", {"step": 6, "content": "a"})
    results.put(Row("vtab", "DTD", 0.5))
    file = results.folder / "results.json"
    saved = json.loads(file.read_text())
    del saved["version"], saved["data"]
    file.write_text(json.dumps(saved))
    assert not Results(tmp_path / "out", "checkpoint", "ViT", {"step": 6, "content": "a"}).rows


def test_other_checkpoint_is_refused(results):
    with pytest.raises(UserError, match="has results of checkpoint; give another --out"):
        again(results, "other")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"best_rate": 0.1}', '{"checkpoint": "checkpoint", "rows": 1}']
)
def test_files_with_other_content_are_refused(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match="results.json cannot be read as results of an evaluation"):
        Results(tmp_path, "checkpoint", "ViT")


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(
            UserError, match="contains files but no results; give a new or empty --out"
        ):
            Results(path, "checkpoint", "ViT")


def test_results_with_other_settings_are_refused(results):
    results.begin("fewshot", {"image_size": None, "seeds": [0, 1]})
    # Other settings are accepted as long as there are no results.
    results.begin("fewshot", {"image_size": None, "seeds": [0]})
    results.put(Row("fewshot", "a, 1 shot", 0.5))
    later = again(results)
    later.begin("fewshot", {"image_size": None, "seeds": [0]})
    later.begin("probe", {"image_size": 32})
    with pytest.raises(
        UserError, match=r"fewshot with other settings \(seeds: \[0\] -> \[1\]\); give another"
    ):
        later.begin("fewshot", {"image_size": None, "seeds": [1]})


def test_the_file_contains_all_values_of_a_row(results):
    results.put(Row("vtab", "DTD", 0.5, None, 30))
    saved = json.loads((results.folder / "results.json").read_text())
    assert (saved["checkpoint"], saved["model"]) == ("checkpoint", "ViT-L/16 of a run (here)")
    assert saved["rows"] == [
        {
            "suite": "vtab",
            "name": "DTD",
            "accuracy": 0.5,
            "deviation": None,
            "images": 30,
            "note": "",
            "unit": "%",
        }
    ]
