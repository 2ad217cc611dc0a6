"""A sweep compares only runs that were trained with the same config."""

import pytest

from tests.test_config import load
from vit_jax.config import run_options, to_json, with_values
from vit_jax.errors import UserError
from vit_jax.runs.jobs import Outcome, run_jobs
from vit_jax.runs.rate_search import (
    best_rate,
    check_begun,
    check_seeds,
    claim,
    rate_jobs,
    seed_jobs,
)


@pytest.mark.parametrize("split", ["train_split", "dev_split"])
def test_rates_of_one_folder_are_compared_on_the_same_images(split, tmp_path):
    config = run_options(load("quickstart"))
    claim(tmp_path, config)
    config = with_values(config, {f"sweep.{split}": "train[:7]"})
    with pytest.raises(UserError, match=rf"another config \(sweep.{split}: .* -> train\[:7\]\)"):
        claim(tmp_path, config)


def test_more_rates_may_be_compared_later(tmp_path):
    config = run_options(load("quickstart"))
    claim(tmp_path, config)
    more = {"sweep.rates": (0.1, 0.2), "sweep.resnet_rates": (0.3,), "sweep.seeds": (7,)}
    config = with_values(config, more)
    claim(tmp_path, config)


def test_seeds_of_another_rate_are_not_shown_as_those_of_the_best(tmp_path):
    config = run_options(load("quickstart"))
    config = with_values(config, {"optimizer.learning_rate": 0.01})
    jobs = seed_jobs(config, tmp_path, flags=(), rate=0.01)
    jobs[0].workdir.mkdir()
    (jobs[0].workdir / "config.json").write_text(to_json(config))
    check_seeds(jobs, 0.01)
    with pytest.raises(
        UserError, match="seed-0 was trained at the learning rate 0.01, but the best one is 0.03"
    ):
        check_seeds(jobs, 0.03)


def test_a_mistake_of_all_rates_is_printed_once(tmp_path, capfd):
    config = run_options(load("quickstart"))
    jobs = [*rate_jobs(config, tmp_path, flags=("--config=nowhere.py",)).values()]
    assert len(jobs) > 1
    with pytest.raises(
        UserError, match=r"^there is no config file nowhere.py.* \(rate-0.001; no other run"
    ):
        run_jobs(jobs, log=print, after_each=lambda: check_begun(jobs))
    assert capfd.readouterr().err.count("error:") == 1


def test_equal_accuracies_are_named_with_the_first_rate(capsys):
    outcomes = {
        rate: Outcome({"accuracy": accuracy})
        for rate, accuracy in {0.001: 0.5, 0.01: 0.9, 0.03: 0.9}.items()
    }
    assert best_rate(outcomes) == 0.01
    assert "0.01 (first of 0.01, 0.03, which are equal), 90.00%" in capsys.readouterr().out
    assert best_rate({0.1: Outcome({"accuracy": 0.25})}) == 0.1
    assert capsys.readouterr().out == (
        "== best of 1 learning rates: 0.1, 25.00% accuracy on held-out images\n"
    )
