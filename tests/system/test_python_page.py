"""The code on the page of the Python interface runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {"__name__": "page"})
    shown = capsys.readouterr().out
    assert "cat" in shown and "preprocessing" in shown
    assert (tmp_path / "pets_exported" / "model.safetensors").is_file()
    assert len(blocks) == 6
