"""Every notebook, from its first cell to its last, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What the last cells must have come to.
PROMISES = {
    "pretrain": "assert figures['accuracy'] > 0.6 and len(predictions) == 12",
    "finetune": "assert accuracy > 0.6 and figures['images'] == confusion.sum()",
    "inspect": "assert similarity.shape == (4,) * 4 and distances.shape == (2, 4) and len(seen) == 6",
}


def code(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_start_to_end(notebook, run, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join([*code(notebook), PROMISES[notebook.stem]]))
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "MPLBACKEND": "agg"}
    process = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=run.environment | places,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr


def test_every_notebook_has_a_promise():
    assert [path.stem for path in NOTEBOOKS] == sorted(PROMISES)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(notebook):
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
