"""The Python code of the documentation runs."""

import doctest

import pytest

from tests.pages import ROOT, blocks


def run(page: str, **names) -> int:
    """Runs the blocks of a page in order, and returns the number of blocks."""
    found = blocks(ROOT / page, "python")
    names |= {"__name__": "page"}
    for block in found:
        if block.text.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(block.text, names, page, page, 0)
            assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
        else:
            exec(compile(block.text, page, "exec"), names)
    return len(found)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert run("docs/python.md") == 8
    shown = capsys.readouterr().out
    assert "cat" in shown and "preprocessing" in shown
    assert (tmp_path / "pets_exported" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "count"), [("docs/models.md", 8), ("docs/ledger.md", 1), ("docs/growing_data.md", 1)]
)
def test_the_code_of_other_pages_runs(page, count):
    import vit_jax

    assert run(page, vit_jax=vit_jax) == count
