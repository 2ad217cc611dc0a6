"""Runs notebooks and stores what their cells show: python notebooks/run.py [NAME ...].

A notebook runs in an empty folder, by the vit_jax of this environment. Its metadata then hold the checksum
of its cells, by which tests/system/test_notebooks.py tells whether what it shows is of them.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def checksum(cells) -> str:
    """The SHA-256 of the code of a notebook's cells."""
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def joined(outputs, folder: str):
    """Yields outputs, what was printed in one; without the name of the folder in which a notebook ran."""
    printed = None
    for output in outputs:
        if output["output_type"] != "stream":
            printed = None
            yield output
            continue
        text = output["text"].replace(f"{folder}/", "")
        if printed is None:
            printed = output
            output["text"] = text
            yield output
        else:
            printed["text"] += text


def run(path: Path) -> None:
    """Runs a notebook and writes it anew, with its outputs."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(book, timeout=900, resources={"metadata": {"path": folder}}).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # Times of day.
        if cell.cell_type == "code":
            cell.outputs = [*joined(cell.outputs, folder)]
    book.metadata["language_info"] = {"name": "python"}
    book.metadata["vit_jax"] = {"ran": checksum(book.cells)}
    nbformat.write(book, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb")):
        print(name, flush=True)
        run(HERE / f"{name}.ipynb")
