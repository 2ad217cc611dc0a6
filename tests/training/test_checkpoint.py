"""Checkpoints on a real disk."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.training.checkpoint import Checkpoints, load_params


def items(value: float, width: int = 3) -> dict:
    return {
        "params": {"head": {"kernel": jnp.full((width, 2), value), "bias": jnp.arange(2.0)}},
        "run": {"step": jnp.int32(value)},
    }


def test_what_is_saved_is_restored(tmp_path):
    with Checkpoints(tmp_path / "c", kept=3) as checkpoints:
        checkpoints.save(7, items(0.1))
    with Checkpoints(tmp_path / "c", kept=3) as checkpoints:
        assert checkpoints.latest == 7
        restored = checkpoints.restore(7, items(0.0))
    np.testing.assert_array_equal(
        restored["params"]["head"]["kernel"], items(0.1)["params"]["head"]["kernel"]
    )


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, items(step))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["3", "4"]


def test_rest_of_an_unfinished_write_is_swept_away(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
    rest = tmp_path / "c" / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "1", rest)
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        assert checkpoints.latest == 1
    assert not rest.exists()


def test_reading_leaves_an_unfinished_write_alone(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        checkpoints.save(1, items(1))
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "2.orbax-checkpoint-tmp")
    load_params(tmp_path / "c", items(0)["params"])
    assert (tmp_path / "c" / "2.orbax-checkpoint-tmp").exists()


def test_array_of_another_shape_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
        with pytest.raises(UserError, match=r"checkpoint .*/1"):
            checkpoints.restore(1, items(1, width=4))


def test_missing_array_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
        wanted = items(1)
        wanted["params"]["head"]["scale"] = jnp.ones(2)
        with pytest.raises(UserError, match=r"checkpoint .*/1"):
            checkpoints.restore(1, wanted)


def test_parameters_are_read_alone(tmp_path):
    with Checkpoints(tmp_path / "c", kept=2) as checkpoints:
        checkpoints.save(1, items(5))
    params = load_params(tmp_path / "c", items(0)["params"])
    np.testing.assert_array_equal(params["head"]["kernel"], np.full((3, 2), 5.0))


@pytest.mark.parametrize("name", ["missing", ""])
def test_no_checkpoint_is_said(tmp_path, name):
    with pytest.raises(UserError, match="no checkpoint in"):
        load_params(tmp_path / name, items(0)["params"])
