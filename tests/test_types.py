"""Type annotations of the public interface are complete and correct."""

import dataclasses
import shutil
import subprocess
import sys

import pytest

from tests.pages import ROOT
from vit_jax.config_page import types
from vit_jax.models.prediction import Prediction
from vit_jax.shipped import PACKAGE

SCRIPTS = (
    ROOT / "tests" / "typed"
)  # Ten scripts like those of docs/python.md, docs/models.md and docs/extending.md.


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")
def test_pyright_finds_no_errors_in_scripts_of_the_documentation_in_strict_mode():
    assert len([*SCRIPTS.glob("*.py")]) == 10
    command = ["pyright", "-p", SCRIPTS, "--pythonpath", sys.executable]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_types_of_configs_are_those_of_the_options():
    assert (PACKAGE / "config_types.py").read_text() == types(), "run python docs/write_config.py"


def test_a_prediction_is_read_by_names_and_not_changed():
    prediction = Prediction("cat.jpg", ("cat", "dog"), (0.75, 0.25))
    assert str(prediction) == "cat.jpg  cat 75.0%  dog 25.0%"
    assert prediction == dataclasses.replace(prediction, image="cat.jpg")
    with pytest.raises(dataclasses.FrozenInstanceError):
        prediction.image = "dog.jpg"
