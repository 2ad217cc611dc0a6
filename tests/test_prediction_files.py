"""Files of predictions are read by other libraries, and contain no cells that a spreadsheet would
evaluate.
"""

import csv
import io
import json

import pyarrow.csv
import pytest

from vit_jax.models.prediction import Prediction
from vit_jax.prediction_files import most_named, written_to
from vit_jax.spreadsheet import write_csv

PREDICTIONS = [
    Prediction('photos/Käse, "gross".jpg', ("cheese", "猫"), (0.75, 0.2)),
    Prediction("=HYPERLINK(1).png", ("=1+1",), (0.6,)),
    Prediction("-x.png", (), ()),
    Prediction("caf\udce9\n.png", ("cat",), (1.0,)),
]


def written(file, form):
    with written_to(file, form, columns=2) as write:
        for prediction in PREDICTIONS:
            write(prediction)
    return file


def test_arrow_reads_a_row_for_each_image(tmp_path):
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    rows = pyarrow.csv.read_csv(
        written(tmp_path / "p.csv", "csv"), parse_options=options
    ).to_pylist()
    assert [*rows[0]] == ["file", "class", "probability", "class_2", "probability_2"]
    assert [*rows[0].values()] == [PREDICTIONS[0].image, "cheese", 0.75, "猫", 0.2]
    assert [rows[2][name] for name in ("class", "probability")] == ["", None]
    assert rows[3]["file"] == "caf\\udce9\n.png"


def test_csv_is_utf_8_with_a_byte_order_mark_and_without_formulas(tmp_path):
    """Excel detects UTF-8 by the byte order mark, and evaluates cells by their first character."""
    content = written(tmp_path / "p.csv", "csv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbf")
    rows = list(csv.reader(io.StringIO(content.decode("utf-8-sig"))))
    assert not [
        cell for row in rows for cell in row if cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    ]
    # Paths that start with `./` refer to the same files.
    assert [row[0] for row in rows[2:4]] == ["./=HYPERLINK(1).png", "./-x.png"]
    assert rows[2][1] == "'=1+1"


def test_numbers_stay_numbers_in_any_table(tmp_path):
    write_csv(tmp_path / "t.csv", ("name", "value"), [("@a", -0.5)])
    assert (tmp_path / "t.csv").read_text(encoding="utf-8-sig") == '"name","value"\n"\'@a",-0.5\n'


def test_lines_of_a_file_are_those_of_standard_output(tmp_path, capsys):
    lines = written(tmp_path / "p.txt", "text").read_bytes().splitlines()
    assert lines[1:3] == [b"=HYPERLINK(1).png  =1+1 60.0%", b"-x.png  (no class)"]
    assert lines[3] == b"caf\xe9\\n.png  cat 100.0%"
    first, *_ = written(tmp_path / "p.jsonl", "json").read_text().splitlines()
    assert json.loads(first)["predictions"] == [
        {"class": "cheese", "probability": 0.75},
        {"class": "猫", "probability": 0.2},
    ]


def test_file_that_is_not_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text("mine")
    with pytest.raises(KeyError), written_to(file, "csv", columns=1) as write:
        write(PREDICTIONS[2])
        raise KeyError
    assert file.read_text() == "mine" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("probabilities", "threshold", "count"),
    [("softmax", None, 1000), ("softmax", 0.1, 10), ("softmax", 1.0, 1), ("sigmoid", 0.1, 1000)],
)
def test_rows_are_as_wide_as_a_threshold_allows(probabilities, threshold, count):
    assert most_named(1000, threshold, probabilities) == count
