"""The report of the transfer between digits."""

import json

from vit_jax.runs.study import Study, write


def test_report_has_the_best_rates_and_mean_and_deviation_over_seeds(script, tmp_path, capsys):
    digits = script("transfer_digits")
    held_out = {
        "pre-trained": {0.001: 0.5, 0.003: 0.75, 0.01: 0.75, 0.03: 0.25},
        "random": {0.001: 0.1, 0.003: 0.2, 0.01: 0.3, 0.03: 0.2},
    }
    tests = {"pre-trained": {0: 0.9, 1: 0.8, 2: 1.0}, "random": {0: 0.5, 1: 0.5, 2: 0.5}}
    frozen = {start: {shots: [0.25, 0.35, 0.45] for shots in digits.SHOTS} for start in tests}
    penalties = {"pre-trained": 4.0, "random": 0.25}
    figures = dict(held_out=held_out, tests=tests, penalties=penalties, frozen=frozen)
    write(digits.EXPERIMENT, Study(tmp_path, {}), figures)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert "learning rates 0.003, 0.01 " in lines[2]
    assert lines[2].endswith("| 90.00 ± 10.00 | 50.00 ± 0.00 |")
    assert (
        lines[3]
        == "| least squares, the network frozen, penalties 4, 0.25 | 1 | 35.00 ± 10.00 | 35.00 ± 10.00 |"
    )
    assert lines[-1] == "| from random parameters | 10.00 | 20.00 | 30.00 | 20.00 |"
    assert lines[2] in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["tests"]["pre-trained"]["1"] == 0.8
    assert (tmp_path / "results.png").stat().st_size > 5000
