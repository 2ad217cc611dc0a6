"""The report of what images without labels are worth."""

import json

from vit_jax.runs.study import Study, write


def test_report_has_mean_and_deviation_of_each_start_and_all_rates(script, tmp_path, capsys):
    digits = script("self_supervised_digits")
    rates = {0.001: 0.5, 0.003: 0.75, 0.01: 0.6, 0.03: 0.25}
    held_out = {start: rates for start in digits.STARTS}
    tests = {start: {0: 0.9, 1: 0.8, 2: 1.0} for start in digits.STARTS}
    write(digits.EXPERIMENT, Study(tmp_path, {}), {"held_out": held_out, "tests": tests})
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[2].startswith("| random parameters | 90.00 ± 10.00 | 90.00, 80.00, 100.00 | 50.00 | 75.00 |")
    assert [line.split(" | ")[0] for line in lines[3:]] == [f"| {start}" for start in digits.OBJECTIVES]
    assert lines[2] in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["tests"]["random parameters"]["1"] == 0.8
    assert (tmp_path / "results.png").stat().st_size > 5000
