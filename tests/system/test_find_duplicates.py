"""The command that finds near-duplicates writes a page and a table."""

import shutil

import pytest


@pytest.mark.slow
def test_page_and_table_are_written_and_not_overwritten_by_default(run, tmp_path):
    data = pytest.importorskip("skimage").data_dir
    for name in ("chelsea.png", "coffee.png"):
        for split in ("train", "test")[: 1 + (name == "coffee.png")]:
            (tmp_path / split / "a").mkdir(parents=True, exist_ok=True)
            shutil.copy(f"{data}/{name}", tmp_path / split / "a")
    flags = (str(tmp_path), f"--out={tmp_path / 'out'}")
    result = run(*flags, module="vit_jax.find_duplicates")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 of 3 images are near-duplicates of others, in 1 group: ")
    assert "In several splits" in (tmp_path / "out" / "duplicates.html").read_text()
    again = run(*flags, module="vit_jax.find_duplicates")
    assert (
        again.returncode == 2
        and "duplicates.html exists; give --overwrite or another --out" in again.stderr
    )
