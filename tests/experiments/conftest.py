"""Fixtures that load scripts of experiments/ and check the configs of their runs."""

import importlib.util
from pathlib import Path

import pytest

from vit_jax import experiment
from vit_jax.config import check_options
from vit_jax.ledger import study

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="session")
def script():
    """Returns a function that loads a script by its name."""

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def check_runs(tmp_path):
    """Returns a function that checks the configs of an experiment's runs, and returns their number.

    Only one run of each kind is checked and counted.
    """

    def check_all(name: str) -> int:
        found = experiment.load(name)
        options = {option: values.get("default") for option, values in found.options.items()}
        scale = "paper" if name == "objectnet" else "laptop"
        trials = study.rehearsed(found.at(scale), tmp_path / "runs", options, scale)
        # Runs with the same options differ only in seeds and other numbers.
        kinds = {
            tuple(flag.partition("=")[0] for flag in trial.job.flags[1:]): trial.job
            for trial in trials
        }
        for job in kinds.values():
            check_options(study.config_of(job))
        return len(kinds)

    return check_all
