"""Benchmarks that show others' code beside ours."""

import importlib.util
import textwrap

import pytest

from vit_jax.benchmarks import peers, train
from vit_jax.errors import UserError

TINY = dict(models=["ViT-mu/16"], images=2, image_size=32, turns=1, seconds=0)
# What big_vision's file offers, of a model that is as small as can be.
MODEL = """
    import flax.linen as nn
    from big_vision import utils
    from big_vision.models import common

    class Tiny(nn.Module):
        classes: int
        scan: bool = False

        @nn.compact
        def __call__(self, image, *, train=False):
            return nn.Dense(self.classes)(image.mean((1, 2))), {}

    def Model(num_classes, *, variant, pool_type, dtype_mm, scan=False, remat_policy=""):
        assert (variant, pool_type) == ("mu/16", "tok") and dtype_mm in ("float32", "bfloat16")
        return Tiny(num_classes, scan)
"""


@pytest.fixture
def checkouts(tmp_path):
    path = tmp_path / "big_vision" / "big_vision" / "models" / "vit.py"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(MODEL))
    return tmp_path


def rows(printed: str) -> dict[str, list[str]]:
    """Cells of the rows by the first."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


def test_a_checkout_is_timed_beside_ours_and_an_absent_one_is_a_row_that_says_how_to_get_it(
    checkouts, capsys
):
    train.measure(**TINY, against=["vision_transformer", "big_vision"], checkouts=str(checkouts))
    table = rows(capsys.readouterr().out)
    ours, theirs = (
        float(table[name][2].replace(",", "")) for name in ("ViT-mu/16 32", "big_vision, unrolled")
    )
    assert float(table["big_vision, unrolled"][5]) == pytest.approx(ours / theirs, rel=0.02, abs=0.01)
    assert (
        "git clone https://github.com/google-research/vision_transformer"
        in (table["vision_transformer: skipped"][0])
    )


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"')
def test_a_checkout_is_compiled_for_tpus_beside_ours(run, checkouts):
    result = run(
        "tpu",
        "--models=ViT-mu/16",
        "--images=1",
        "--image_size=32",
        "--slices=v5e:1x1",
        "--against=big_vision",
        f"--checkouts={checkouts}",
        module="vit_jax.benchmark",
    )
    assert result.returncode == 0, result.stderr
    table = rows(result.stdout)
    # One dense layer: ours takes more.
    for option in peers.PEERS["big_vision"].options:
        assert float(table[f"big_vision, {option}"][6]) > 1


def test_a_folder_that_is_not_the_checkout_is_named(tmp_path):
    (tmp_path / "big_vision").mkdir()
    with pytest.raises(UserError, match="vit.py: it is not the checkout"):
        peers.PEERS["big_vision"].make(tmp_path / "big_vision", "ViT-mu/16", "float32")


def test_unknown_peer_is_one_line(run):
    result = run("train", "--against=nobody", module="vit_jax.benchmark")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: unknown 'nobody' (--against); there are: ")
