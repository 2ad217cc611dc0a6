"""The report of the experiment transfer_digits."""

from vit_jax.ledger.study import Study, write


def test_report_has_mean_and_deviation_over_seeds_of_both_starts(script, tmp_path, capsys):
    digits = script("transfer_digits")
    key = "optimizer__learning_rate"
    rates = {"pre-trained": (0.5, 0.75, 0.75, 0.25), "random": (0.1, 0.2, 0.3, 0.2)}
    held_out = [
        {"start": start, key: rate, "accuracy": [accuracy]}
        for start, accuracies in rates.items()
        for rate, accuracy in zip(digits.RATES, accuracies, strict=True)
    ]
    tests = [
        {"start": "pre-trained", key: 0.003, "accuracy": [0.9, 0.8, 1.0]},
        {"start": "random", key: 0.01, "accuracy": [0.5, 0.5, 0.5]},
    ]
    frozen = {start: {f"{shots}": [0.25, 0.35, 0.45] for shots in digits.SHOTS} for start in rates}
    penalties = {"pre-trained": 4.0, "random": 0.25}
    figures = dict(held_out=held_out, tests=tests, penalties=penalties, frozen=frozen)
    write("transfer_digits", digits.EXPERIMENT, Study(tmp_path, {}), figures)
    rows = (tmp_path / "transfer_digits.md").read_text().splitlines()
    assert rows[2] == "| trained on 14 or 15 | 90.00 ± 10.00 | 50.00 ± 0.00 |"
    assert "| least squares, 1 images of a class | 35.00 ± 10.00 | 35.00 ± 10.00 |" in rows
    assert rows[-1] == "| random | 10.00 | 20.00 | 30.00 | 20.00 |"
    assert rows[2] in capsys.readouterr().out
    assert (tmp_path / "transfer_digits.png").stat().st_size > 5000
