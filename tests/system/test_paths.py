"""A run can be referred to by different paths."""

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import HANG
from tests.system.conftest import parameters
from vit_jax.data.sources.digits import digits
from vit_jax.runs.checkpoints import DAMAGED


@pytest.fixture
def there(finished, tmp_path, monkeypatch):
    """Returns the working and home directory.

    It contains a copy of the finished run in `runs/one`, and a symbolic link to it.
    """
    shutil.copytree(finished, tmp_path / "runs" / "one")
    (tmp_path / "link").symlink_to("runs/one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


NAMES = (
    *(
        "runs/one",
        "runs/one/",
        "./runs/../runs/one",
        "runs/one@best",
        "runs/one@40",
        "runs/one/@40",
    ),
    *("~/runs/one", "~/runs/one@best", "link", "link@40"),
)


@pytest.mark.one_variant
@pytest.mark.parametrize("name", NAMES)
def test_run_loads_by_any_path(there, finished, name):
    for got, expected in zip(parameters(name), parameters(finished), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not (there / "runs" / "one" / "checkpoints" / DAMAGED).exists()


@pytest.mark.slow
def test_commands_take_a_relative_workdir(run, there):
    Image.fromarray(digits("test")[0].image).save("digit.png")
    for module, *arguments in (
        ("vit_jax.predict", "--checkpoint=runs/one", "digit.png"),
        ("vit_jax.convert", "runs/one", "out.npz"),
    ):
        process = run.start(*arguments, module=module, cwd=there)
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
        assert ("digit.png" if "predict" in module else "out.npz") in out


def test_error_of_a_missing_run_contains_its_path(there):
    with pytest.raises(ValueError, match=f"there is no {there}/runs/two"):
        parameters("runs/two")
