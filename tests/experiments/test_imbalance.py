"""The comparison of corrections for unequal classes: its images and its table."""

from vit_jax.data.sources import open_source
from vit_jax.ledger.study import Study, write


def test_training_images_are_unequal_and_all_test_images_are_kept(script, tmp_path):
    imbalance = script("imbalance")
    folder = imbalance.lay_out(Study(tmp_path, {}), 20)
    train, test = (open_source("folder", split, path=folder) for split in ("train", "test"))
    counts = [train.labels.count(label) for label in range(10)]
    assert counts == [139, *imbalance.counts_of(20)[1:]] and counts[-1] == 7
    assert len(test) == 360


def test_table_has_a_line_for_each_correction(script, tmp_path):
    imbalance = script("imbalance")
    points = [
        {"ratio": 20.0, "correction": name}
        | {figure: [0.8, 0.9, 1.0] for figure in imbalance.FIGURES}
        for name in imbalance.CORRECTIONS
    ]
    write("imbalance", imbalance.EXPERIMENT, Study(tmp_path, {}), points)
    rows = (tmp_path / "imbalance.md").read_text().splitlines()
    assert rows[0] == "| ratio | correction | accuracy, % | balanced accuracy, % | macro f1, % |"
    assert rows[2] == "| 20 | none | 90.00 ± 10.00 | 90.00 ± 10.00 | 90.00 ± 10.00 |"
    assert len(rows) == 2 + len(imbalance.CORRECTIONS)
