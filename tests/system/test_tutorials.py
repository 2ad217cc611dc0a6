"""All code blocks of the tutorials run, with fewer steps and fewer test images."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_runs(page, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    found = blocks(page, "python", "sh")
    assert len(found) >= 3
    for language, _, block in found:
        block = re.sub(r"\bsteps=\d{2,}", "steps=8", block)
        block = block.replace("warmup_steps = 20, 10", "warmup_steps = 4, 2")
        # The split has 5,000 images.
        fewer = "--workdir=runs/letters --config.data.test_split='test[:100]'"
        block = re.sub(r"--workdir=runs/letters$", fewer, block, flags=re.MULTILINE)
        if "vit_jax.main --config=" in block and language == "sh":
            # The last flag takes precedence.
            block = block.rstrip() + " --config.optimizer.warmup_steps=2"
        command = [sys.executable, "-c", block] if language == "python" else ["bash", "-euc", block]
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
