"""The photographs of solar cells: their layout in folders, and the figures of the report."""

import itertools
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from vit_jax.errors import UserError

PROBABILITIES = ("0.0", "0.3333333333333333", "0.6666666666666666", "1.0")


@pytest.fixture(scope="module")
def elpv(script):
    return script("elpv")


@pytest.fixture
def cells(tmp_path, monkeypatch, elpv):
    """Returns the cells of a fake package elpv-dataset.

    It has 8 tiny photographs of each type and probability. Defective cells are dark.
    """
    data = tmp_path / "site" / "elpv_dataset" / "data"
    (data / "images").mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    rows = []
    for kind, probability, _ in itertools.product(("mono", "poly"), PROBABILITIES, range(8)):
        file = f"images/cell{len(rows) + 1:04d}.png"
        grey = np.full((8, 8), 50 if float(probability) > 0.5 else 200, np.uint8)
        grey += np.random.default_rng(len(rows)).integers(0, 20, grey.shape, np.uint8)
        Image.fromarray(grey).save(data / file)
        rows.append(f"{file}  {probability}                 {kind}")
    (data / "labels.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return elpv.read_cells()


def found(images) -> dict[str, tuple[str, str]]:
    """Returns split and class of each readable photograph."""
    return {path.name: path.parts[-3:-1] for path in images.rglob("*.png") if path.is_file()}


def test_every_photograph_is_laid_out_once_in_its_class(cells, elpv, tmp_path):
    elpv.lay_out(cells, tmp_path / "images")
    there = found(tmp_path / "images")
    assert len(there) == len(cells) == 64
    for cell in cells:
        assert there[cell.file.name][1] == ("defective" if cell.probability > 0.5 else "functional")


def test_a_quarter_of_each_type_and_probability_is_for_testing_and_always_the_same(
    cells, elpv, tmp_path
):
    elpv.lay_out(cells, tmp_path / "images")
    there = found(tmp_path / "images")
    tested = Counter(
        (cell.kind, cell.probability) for cell in cells if there[cell.file.name][0] == "test"
    )
    assert len(tested) == 8 and set(tested.values()) == {2}
    elpv.lay_out(cells, tmp_path / "again")
    assert found(tmp_path / "again") == there


def test_an_interrupted_layout_is_not_used(cells, elpv, tmp_path):
    broken = [cells[0], cells[0], *cells[1:]]  # The second link with the same name fails.
    with pytest.raises(FileExistsError):
        elpv.lay_out(broken, tmp_path / "images")
    assert not (tmp_path / "images").exists()
    elpv.lay_out(cells, tmp_path / "images")
    assert len(found(tmp_path / "images")) == 64


@pytest.mark.usefixtures("cells")
def test_values_of_its_runs_are_valid(check_runs):
    assert check_runs("elpv") == 1


def test_error_of_a_missing_package_contains_the_command_to_install_it(elpv, monkeypatch):
    monkeypatch.setitem(sys.modules, "elpv_dataset", None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[examples\]"'):
        elpv.read_cells()


def test_logistic_regression_tells_dark_cells_from_bright_ones(cells, elpv, tmp_path):
    elpv.lay_out(cells, tmp_path / "images")
    predicted, truth = elpv.logistic_regression(tmp_path / "images")
    np.testing.assert_array_equal(elpv.confusion(truth, predicted), [[8, 0], [0, 8]])


def test_table_shows_the_confusion_matrices_and_the_mean_of_the_seeds(elpv):
    truth = np.array([0, 0, 1, 1, 1])
    rows = {
        "ViT, seed0": elpv.confusion(truth, np.array([0, 1, 1, 1, 1])),
        "ViT, seed1": elpv.confusion(truth, np.array([1, 1, 0, 1, 1])),
        "the likelier class": elpv.confusion(truth, np.ones(5, int)),
    }
    assert elpv.table(rows).splitlines()[2:] == [
        "| ViT, seed0 | 80.00 | 1 | 1 | 3 | 0 |",
        "| ViT, seed1 | 40.00 | 0 | 2 | 2 | 1 |",
        "| **ViT, mean of 2** | **60.00 ± 28.28** | 0.5 | 1.5 | 2.5 | 0.5 |",
        "| the likelier class | 60.00 | 0 | 2 | 3 | 0 |",
    ]
