"""The workload and cost of a run are computed without its data."""

import pytest
from PIL import Image

from vit_jax import published
from vit_jax.config import base_config, run_options, with_values
from vit_jax.errors import UserError
from vit_jax.experiment import load
from vit_jax.planning.compile import find_slice
from vit_jax.planning.cost import PRICES, Workload, cost, data_set_size, read_prices


def config_of(path, split="train", source="tfds", num_classes=None):
    config = base_config()
    config.data.source, config.data.path, config.data.train_split = source, path, split
    config.data.num_classes = num_classes
    return run_options(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of("imagenet2012", "train[:99%]"), (1_268_355, 1000)),
        (config_of("imagenet2012:/data/tfds"), (1_281_167, 1000)),
        (config_of("imagenet21k", "train[51200:]"), (14_145_922, 21_843)),
        (config_of("imagenet21k", num_classes=19_167), (14_197_122, 19_167)),
        (config_of("jft"), (303_000_000, 18_291)),
        (config_of("", source="digits"), (1437, 10)),
    ],
)
def test_a_known_data_set_need_not_be_here(config, expected):
    assert data_set_size(config, None) == expected


def test_images_and_classes_of_an_unknown_data_set_are_required():
    with pytest.raises(UserError, match="--images=N"):
        data_set_size(config_of("/data/pets", source="folder"), None)
    with pytest.raises(UserError, match=r"--config\.data\.num_classes=N"):
        data_set_size(config_of("/data/pets", source="folder"), 5000)
    assert data_set_size(config_of("/data/pets", source="folder", num_classes=37), 5000) == (
        5000,
        37,
    )


def test_images_and_classes_of_a_folder_are_counted(tmp_path):
    for number in range(6):
        for split in ("train", "test"):
            folder = tmp_path / split / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    config = config_of(str(tmp_path), source="folder")
    config = with_values(config, {"data.train_split": "train[:50%]", "data.test_split": "test"})
    assert data_set_size(config, None) == (3, 2)
    assert data_set_size(config, 50) == (50, 2)


def test_cost_of_a_run_is_that_of_its_chips_for_its_hours():
    job = Workload(images=0, num_classes=0, steps=3600, batch_size=1, parameters=0, multiply_adds=0)
    price = {"v3": {"dollars": 2.0, "of": "here"}}
    run = cost(job, find_slice("v3", "4x4"), 24.0, price)  # 16 chips of two cores for a day.
    assert (run.hours, run.chip_days, run.core_days, run.dollars) == (24, 16, 32, 16 * 24 * 2)
    assert cost(job, find_slice("v4", "2x2x1"), 24.0, price).dollars is None


def test_prices_that_cannot_be_read_are_one_line(tmp_path):
    (tmp_path / "prices.toml").write_text("[v5e]\ndollars = 'cheap'\nof = 'here'\n")
    with pytest.raises(UserError, match="cannot read prices"):
        read_prices(tmp_path / "prices.toml")
    assert read_prices(PRICES)["v5e"]["dollars"] > 0


@pytest.mark.parametrize(
    ("chip", "topology", "there_are"),
    [("v9", "2x2", "v5e"), ("v5e", "3x3", "4x4"), ("v4", None, "2x2x1")],
)
def test_error_of_an_unknown_slice_lists_the_known_ones(chip, topology, there_are):
    with pytest.raises(UserError, match=there_are):
        find_slice(chip, topology)


@pytest.mark.slow
def test_compute_of_the_papers_scaling_study_is_the_published():
    ours = load("table6").read(None)["exaFLOPs"]
    printed = published.table("table6").by_model()
    assert len(ours) == 18
    for column, count in ours.items():
        tolerance = 0.03 if "R" not in column.replace("pre", "") else 0.05
        assert count == pytest.approx(printed[column]["exaFLOPs"], rel=tolerance), column
