"""Every notebook runs from its first to its last cell, and its stored outputs are current."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vit_jax
from tests.conftest import HANG, SOME_SPEED, python_path
from tests.system.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The code that is run after each notebook's last cell, to test its results.
PROMISES = {
    "pretrain": "assert figures['accuracy'] > 0.6 and len(predictions) == 12",
    "finetune": "assert accuracy > 0.6 and figures['images'] == confusion.sum()",
    "image_text": "assert right[:, 0].mean() > 0.9 and similarities.shape == (4, len(shown))",
    "inspect": "assert similarity.shape == (4,) * 4 and distances.shape == (3, 4) and len(seen) == 6",
    "self_supervised": "assert accuracy > 0.6 and (nearest[:, 0] == range(6)).all()",
    "scaling": (
        "assert own['exponent'] > 0 and all(abs(accuracies[n] - recorded[n]) < 0.2 for n in "
        "recorded)"
    ),
}
# Replacements in the notebooks' code that reduce the number of steps. The stored outputs are those
# of all steps.
SHORTER = {
    "image_text": [
        ("config.steps = 128, 1000", "config.steps = 64, 250"),
        ("warmup_steps=100", "warmup_steps=25"),
    ],
    "scaling": [("STEPS = (150, 300, 600)", "STEPS = (100, 300)")],
    "self_supervised": [("config.epochs = 40.0", "config.epochs = 20.0")],
}


def code(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_start_to_end(notebook, run, tmp_path):
    script, text = tmp_path / "notebook.py", "\n\n".join([*code(notebook), PROMISES[notebook.stem]])
    for steps, fewer in SHORTER.get(notebook.stem, ()):
        assert text.count(steps) == 1
        text = text.replace(steps, fewer)
    script.write_text(text)
    own = {
        "PYTHONPATH": python_path(ROOT),
        "TMPDIR": str(tmp_path),
        "MPLBACKEND": "agg",
        "XLA_FLAGS": SOME_SPEED,
    }
    process = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=run.environment | own,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert process.returncode == 0, process.stderr


def test_every_notebook_has_assertions():
    assert [path.stem for path in NOTEBOOKS] == sorted(PROMISES)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_the_current_cells(notebook):
    book = json.loads(notebook.read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert (
        book["metadata"]["vit_jax"]["ran"]
        == hashlib.sha256("\n\n".join(code(notebook)).encode()).hexdigest()
    ), "run python notebooks/run.py"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


def test_all_notebooks_have_the_same_first_cell():
    assert len({code(notebook)[0] for notebook in NOTEBOOKS}) == 1


@pytest.mark.parametrize(
    ("where", "installed"),
    [
        ("", "vit_jax-0.1.0-py3-none-any.whl"),
        ("git+https://host/ada/vit_jax", "git+https://host/ada/vit_jax@v0.1.0"),
        ("https://host/another.whl", "https://host/another.whl"),
    ],
)
def test_first_cell_installs_its_version_from_a_wheel_or_an_address(where, installed, tmp_path):
    """The cell runs in a process without vit_jax, next to a folder `vit_jax` that is not a package.

    A checkout of the repository next to the notebook is such a folder.
    """
    for version in ("0.0.9", "0.1.0"):
        (tmp_path / f"vit_jax-{version}-py3-none-any.whl").write_bytes(b"")
    (tmp_path / "vit_jax").mkdir()
    script = tmp_path / "cell.py"
    caught = "subprocess.run = lambda command, check: print('runs', *command[-2:]) or exit()\n"
    cell = code(NOTEBOOKS[0])[0].replace('WHERE = ""', f'WHERE = "{where}"')
    script.write_text(f"import subprocess\n{caught}{cell}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"runs --quiet {installed}\n", done.stderr


def test_notebooks_contain_the_current_version():
    assert f'VERSION = "{vit_jax.__version__}"' in code(NOTEBOOKS[0])[0]
