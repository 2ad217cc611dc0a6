"""The command `vit_jax.plan`."""

import importlib.util
import json

import pytest

from tests.system.test_bad_input import fails

TINY = ("--config=configs/quickstart.py", "--config.model.depth=1", "--config.model.dim=32")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
)
def test_plan_prints_a_table_and_writes_json(run, tmp_path):
    flags = *TINY, "--chip=v5e", "--topology=2x2", f"--json={tmp_path / 'plan.json'}"
    result = run(*flags, module="vit_jax.plan")
    assert result.returncode == 0, result.stderr
    (plan,) = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] and plan["total_bytes"] < plan["limit_bytes"]
    assert f"{plan['cost']['hours']:,.1f}" in result.stdout
    assert "of 15.75: fits" in result.stdout


def test_an_unknown_chip_is_one_line_with_the_known_chips(run):
    line = fails(run, *TINY, "--chip=v9", "--topology=2x2", module="vit_jax.plan")
    assert "unknown chip 'v9'" in line and "v5e" in line and "h100" in line


@pytest.mark.parametrize(
    ("flag", "chip", "remedy"),
    [("--topology=2x2", "h100", "--devices=8"), ("--devices=4", "v5e", "--topology=16x16")],
)
def test_the_size_of_another_kind_of_machine_is_an_error(flag, chip, remedy, run):
    """If the flag was ignored, the plan would be that of a single device."""
    line = fails(run, *TINY, f"--chip={chip}", flag, module="vit_jax.plan")
    assert f"{flag} does not apply to --chip={chip}: " in line and remedy in line
