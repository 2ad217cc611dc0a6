"""A run that is resumed with another value of VIT_JAX_KERNELS logs a line."""

import pytest

from vit_jax.config import base_config, run_options
from vit_jax.models import model_options
from vit_jax.parallel.sharding import KERNELS
from vit_jax.runs.workdir import claim, make_manifest, saved_run


@pytest.fixture
def resume(tmp_path, monkeypatch, capsys):
    """Returns a function `resume(value)`, which resumes a run and returns its output."""
    options = model_options("Swin-T", image_size=32, num_classes=0)

    def resume(value: str | None) -> str:
        if value is None:
            monkeypatch.delenv(KERNELS, raising=False)
        else:
            monkeypatch.setenv(KERNELS, value)
        manifest = make_manifest(20, (), {}, options, "bilinear", {}, 1.0)
        with claim(tmp_path / "run", run_options(base_config()), manifest):
            (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
        return capsys.readouterr().out

    return resume


@pytest.mark.parametrize(("began", "other", "remedy"), [("1", None, "set"), ("0", "1", "unset")])
def test_a_run_resumed_with_other_kernels_logs_a_line(began, other, remedy, resume, tmp_path):
    assert resume(began) == resume(began) == ""
    assert f"differ from the earlier ones by rounding; {remedy} the variable" in resume(other)
    assert saved_run(tmp_path / "run").manifest["kernels"] is (began == "1")
    assert resume(began) == ""
