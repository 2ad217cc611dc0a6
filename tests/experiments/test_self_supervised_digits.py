"""The report of the experiment self_supervised_digits."""

from vit_jax.ledger.study import Study, write


def test_report_has_mean_and_deviation_of_each_start_and_all_rates(script, tmp_path, capsys):
    digits = script("self_supervised_digits")
    key = "optimizer__learning_rate"
    held_out = [
        {"start": start, key: rate, "accuracy": [rate * 10]}
        for start in digits.STARTS
        for rate in digits.RATES
    ]
    tests = [{"start": start, key: 0.003, "accuracy": [0.9, 0.8, 1.0]} for start in digits.STARTS]
    study = Study(tmp_path, {})
    write("digits", digits.EXPERIMENT, study, {"held_out": held_out, "tests": tests})
    rows = (tmp_path / "digits.md").read_text().splitlines()
    assert rows[2] == "| random parameters | 0.003 | 90.00 ± 10.00 |"
    assert [row.split(" | ")[0] for row in rows[3:7]] == [
        f"| {start}" for start in digits.OBJECTIVES
    ]
    assert "| random parameters | 1.00 | 3.00 | 10.00 | 30.00 |" in rows
    assert rows[2] in capsys.readouterr().out
    assert (tmp_path / "digits-self_supervised_digits.png").stat().st_size > 5000
