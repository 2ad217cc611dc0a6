"""Tokenisers that are trained by the command, and models that learn from their codes."""

import re

import numpy as np
import pytest

import vit_jax
from tests.system.test_interface import small
from tests.system.test_teacher import Killed, assert_same, kill

DVAE = {
    "model.name": "DVAE",
    "model.dim": None,
    "model.depth": None,
    "model.mlp_dim": None,
    "model.heads": None,
    "model.blocks": (1, 1, 1),
    "model.widths": (8, 8, 16),
    "data.image_size": 16,
    "data.test_resize": 16,
    "objective.name": "dvae",
    "dvae.codes": 12,
    "optimizer.average": 0.5,
}
BEIT = {
    "model.name": "ViT-Ti/4",
    "model.position": "bias",
    "model.position_at": "shared",
    "model.pooling": "gap",
    "model.cls_token": True,
    "data.image_size": 16,
    "data.test_resize": 16,
    "objective.name": "beit",
}


@pytest.mark.slow
def test_a_tokeniser_and_its_student_continue_bit_exactly(tmp_path):
    for name, values in {
        "dvae": DVAE,
        "beit": BEIT | {"objective.teacher": str(tmp_path / "dvae")},
    }.items():
        config = small(steps=4, evaluate_every=4, **values)
        vit_jax.train(config, tmp_path / name)
        with pytest.raises(Killed):
            vit_jax.train(config, tmp_path / f"{name} killed", on_log=kill)
        vit_jax.train(config, tmp_path / f"{name} killed")
        assert_same(tmp_path / f"{name} killed", tmp_path / name)


@pytest.mark.slow
def test_a_run_from_an_averaged_tokeniser_begins_with_both_averages(tmp_path):
    config = small(steps=6, evaluate_every=6, **DVAE)
    first = vit_jax.train(config, tmp_path / "first")
    still = {"optimizer.learning_rate": 0.0, "finetune.checkpoint": str(tmp_path / "first")}
    kept = {"finetune.head": "kept", "finetune.objective": "kept"}
    again = vit_jax.train(
        small(steps=2, evaluate_every=2, **DVAE | still | kept), tmp_path / "again"
    )
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-5)
    as_trained = vit_jax.train(
        small(steps=6, evaluate_every=6, **DVAE | {"optimizer.average": 0.0}),
        tmp_path / "as trained",
    )
    assert as_trained["loss"] != pytest.approx(first["loss"], rel=1e-5)


@pytest.mark.slow
def test_from_images_without_labels_to_a_classifier_by_the_command(run, tmp_path):
    def train(config, name, *more):
        done = run(f"--config=configs/{config}", f"--workdir={tmp_path / name}", *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = train("dvae.py:smoke", "tokeniser")
    assert re.search(r"^trains   dvae, [0-9,]+ parameters of its own$", said, re.MULTILINE)
    assert "codes used" in said and "perplexity" in said and "classes" not in said
    assert "it trains without labels" in (tmp_path / "tokeniser" / "report.html").read_text()
    assert list((tmp_path / "tokeniser" / "reconstructions").iterdir())
    said = train(f"beit.py:teacher={tmp_path / 'tokeniser'},smoke", "beit")
    assert re.search(r"^frozen   DVAE .* 32x32 pixels with mean -0.125", said, re.MULTILINE)
    assert "test accuracy" in said
    started = f"--config.finetune.checkpoint={tmp_path / 'beit'}"
    said = train("beit.py:task=finetune,smoke", "classifier", started)
    assert "copied into each layer: bias_table" in said
    shared, own = (vit_jax.load_model(tmp_path / name, log=str) for name in ("beit", "classifier"))
    assert (shared.num_classes, own.num_classes) == (0, 10)
    assert (
        own.bias_table is None
        and own.blocks["00"].attention.bias_table.shape == shared.bias_table.shape
    )
    assert np.isfinite(own(np.zeros((1, *own.image_size, 3), np.float32))).all()
