"""Runs with teachers end with the same bits after a restart, which requires the same frozen
teacher.
"""

import shutil

import numpy as np
import pytest

import vit_jax
from tests.system.conftest import parameters
from tests.system.test_interface import small
from tests.system.test_resume import figures
from tests.training.objectives.small import dotted
from tests.training.objectives.test_beitv2 import write_tokeniser
from tests.training.objectives.test_frozen_teacher import write_teacher
from vit_jax.command import read_config
from vit_jax.interop.open import open_checkpoint


def make_teacher(folder, seed: int):
    model = vit_jax.create_model(
        "ViT-Ti/4", num_classes=10, image_size=16, dim=16, depth=1, mlp_dim=16, heads=2
    )
    model.head.kernel[...] += np.random.default_rng(seed).normal(size=model.head.kernel.shape)
    vit_jax.save_model(model, folder, library="timm")


class Killed(Exception):
    pass


def kill(step, row):
    if step == 2:
        raise Killed


def assert_same(workdir, expected):
    for one, other in zip(parameters(workdir), parameters(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert figures(workdir) == figures(expected)


def assert_continues_bit_exactly(config, folder):
    """Trains a run in one piece, and one that is killed and started again; asserts that both are
    equal.
    """
    vit_jax.train(config, folder / "whole")
    with pytest.raises(Killed):
        vit_jax.train(config, folder / "killed", on_log=kill)
    vit_jax.train(config, folder / "killed")
    assert_same(folder / "killed", folder / "whole")


@pytest.mark.slow
def test_run_with_a_teacher_continues_bit_exactly_and_only_with_the_same_teacher(tmp_path):
    make_teacher(tmp_path / "teacher", 0)

    def config_of(teacher):
        values = {"objective.name": "distillation", "objective.teacher": str(teacher)}
        values |= {"model.distillation": "heads", "data.repeats": 3}
        return small(steps=4, evaluate_every=4, **{"optimizer.average": 0.5}, **values)

    config = config_of(tmp_path / "teacher")
    vit_jax.train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        vit_jax.train(config, tmp_path / "killed", on_log=kill)
    shutil.move(tmp_path / "teacher", tmp_path / "moved")
    make_teacher(tmp_path / "teacher", 1)
    with pytest.raises(
        vit_jax.UserError, match="belongs to a run with other frozen model .*parameters"
    ):
        vit_jax.train(config, tmp_path / "killed")
    vit_jax.train(config_of(tmp_path / "moved"), tmp_path / "killed")
    assert_same(tmp_path / "killed", tmp_path / "whole")
    shutil.rmtree(tmp_path / "moved")
    assert vit_jax.load_model(tmp_path / "killed", log=str).num_classes == 10


# Options that add state: a centre of the patches' outputs, a Gram teacher, a warm-up of the
# temperature, and frozen prototypes.
OF_PATCHES = {
    "patch_weight": 1.0,
    "patch_prototypes": 8,
    "gram": 1.0,
    "gram_from": 1,
    "gram_every": 2,
    "gram_size": 32,
    "koleo": 0.1,
    "teacher_temperature_end": 0.07,
    "teacher_temperature_steps": 3,
    "frozen_prototype_steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, OF_PATCHES], ids=["DINO", "DINOv2 with Gram anchoring"])
def test_run_with_views_of_two_sizes_continues_bit_exactly(tmp_path, more):
    values = {
        "name": "dino",
        "head_hidden": 16,
        "prototypes": 12,
        "local_crops": 2,
        "local_size": 8,
    } | more
    config = small(steps=4, evaluate_every=4, **dotted(**values))
    assert_continues_bit_exactly(config, tmp_path)


@pytest.mark.slow
def test_student_of_a_frozen_teacher_with_heads_continues_bit_exactly_and_is_loaded(tmp_path):
    write_teacher(tmp_path / "teacher")
    values = {
        "name": "dino",
        "head_hidden": 16,
        "bottleneck": 8,
        "prototypes": 12,
        "patch_weight": 1.0,
    }
    values |= {"patch_prototypes": 9, "patch_bottleneck": 6, "teacher": str(tmp_path / "teacher")}
    config = small(steps=4, evaluate_every=4, **dotted(**values))
    assert_continues_bit_exactly(config, tmp_path)
    assert vit_jax.load_model(tmp_path / "whole", log=str).dim == 16


@pytest.mark.slow
def test_a_tokeniser_with_its_codebook_continues_bit_exactly(tmp_path):
    make_teacher(tmp_path / "teacher", 0)
    values = {"name": "vqkd", "teacher": str(tmp_path / "teacher"), "codes": 40, "code_dim": 4}
    values |= {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "revive_below": 0.5}
    config = small(steps=4, evaluate_every=4, **dotted(**values))
    assert_continues_bit_exactly(config, tmp_path)
    codebooks = [
        open_checkpoint(tmp_path / name).objective.state["codebook"].read()
        for name in ("killed", "whole")
    ]
    np.testing.assert_array_equal(*codebooks)


@pytest.mark.slow
def test_a_student_of_a_tokeniser_with_patch_aggregation_continues_bit_exactly(tmp_path):
    values = {
        "name": "beitv2",
        "teacher": write_tokeniser(tmp_path / "tokeniser"),
        "aggregate_from": 1,
    }
    model = {"position": "bias", "position_at": "shared", "stochastic_depth": 0.2, "depth": 2}
    config = small(
        steps=4,
        evaluate_every=4,
        **dotted(**values),
        **{f"model.{key}": x for key, x in model.items()},
    )
    assert_continues_bit_exactly(config, tmp_path)


@pytest.mark.slow
def test_a_run_without_centring_warns_in_its_first_tenth_that_it_collapsed(tmp_path, capfd):
    config = read_config("configs/dino_digits.py").copy_and_resolve_references().unlock()
    config.update(dict(epochs=None, steps=500, batch_size=32, log_every=5))
    config.model.update(dict(dim=32, depth=1, mlp_dim=32, heads=2))
    config.dino.update(dict(centring="none", head_hidden=32, prototypes=64))
    config.optimizer.update(dict(learning_rate=3e-3, warmup_steps=5))

    def stop(step, row):
        if step == 50:
            raise Killed

    with pytest.raises(Killed):
        vit_jax.train(config.lock(), tmp_path, on_log=stop)
    said = capfd.readouterr()
    assert "this run has collapsed: all images are given the same prototype" in said.out + said.err
