"""Comparisons of self-supervised objectives: runs of equal compute, and attention on objects."""

import numpy as np
import pytest

import vit_jax
from vit_jax.command import read_config
from vit_jax.ledger.laptop import config_name, steps_of_equal_compute
from vit_jax.ledger.looking import attention_jaccard, best_jaccard
from vit_jax.ledger.looking import test_images as images_and_masks

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


def test_steps_have_the_compute_of_the_plain_run():
    run = config_name("ViT-32x4/4")
    assert steps_of_equal_compute(run, {}, 100) == 100
    # A width of 64 instead of 32 needs nearly four times the compute.
    assert 25 <= steps_of_equal_compute(run, {"model__dim": 64, "model__mlp_dim": 256}, 100) <= 30


def test_attention_covers_an_object_as_far_as_its_largest_shares_do():
    heads = np.full((1, 2, 2, 2), 0.25)
    heads[0, 1] = [[0.5, 0.3], [0.15, 0.05]]
    mask = np.zeros((1, 4, 4), bool)
    mask[0, :2] = True
    # The second head's two largest patches have a weight of 0.8 and cover the object. The largest
    # one alone has 0.5.
    assert best_jaccard(heads, mask, 0.6) == pytest.approx([1.0])
    assert best_jaccard(heads[:, 1:], mask, 0.4) == pytest.approx([0.5])
    # Three patches of a uniform head have a weight of 0.75: two of the object, and one other.
    assert best_jaccard(heads[:, :1], mask, 0.6) == pytest.approx([2 / 3])


def test_attention_of_a_run_is_that_of_its_last_layer_on_its_images_and_masks(tmp_path):
    run = read_config(config_name("ViT-32x4/4", "digits", images=128, steps=2))
    run.data.test_split, run.optimizer.warmup_steps = "test[:128]", 0
    vit_jax.train(run, tmp_path / "run")
    model = vit_jax.load_model(tmp_path / "run", log=str)
    images, masks = images_and_masks(tmp_path / "run", lambda image: image)
    _, found = model(images.astype(np.float32) / 127.5 - 1, capture=("attention",))
    heads = np.asarray(found["attention"][-1])[:, :, 0, 1:]
    heads = (heads / heads.sum(-1, keepdims=True)).reshape(*heads.shape[:2], *model.grid)
    expected = best_jaccard(heads, masks, 0.6).mean()
    assert attention_jaccard(tmp_path / "run") == pytest.approx(expected)
