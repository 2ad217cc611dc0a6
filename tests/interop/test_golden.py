"""Checkpoints written by timm and Transformers have their recorded logits (see make_golden.py)."""

from pathlib import Path

import numpy as np
import pytest
from helpers import logits_of

import vit_jax

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("timm_vit", "timm"),
        ("timm_deit", "timm"),
        ("transformers_vit", "Transformers"),
        ("transformers_deit", "Transformers"),
        ("google_vit/model.npz", "Google's npz"),
        ("big_vision_vit/model.npz", "Google's npz"),
    ],
)
def test_golden_checkpoint_has_its_recorded_logits(name, library):
    said = []
    model = vit_jax.load_model(GOLDEN / name, log=said.append)
    assert library in said[0]
    logits = np.load(GOLDEN / name.split("/")[0] / "logits.npy")
    # The libraries got these images as already normalized, so the normalization is inverted here.
    images = np.asarray(model.denormalize(np.load(GOLDEN / "images.npy"))) / 127.5 - 1
    np.testing.assert_allclose(logits_of(model, images), logits, rtol=0, atol=2e-5)
