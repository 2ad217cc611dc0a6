"""A run's number of steps can be increased later, unless its schedules depend on its length."""

import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.training.objectives.small import dotted
from vit_jax.config import base_config, run_options
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.runs.workdir import FORMAT, claim, saved_run

CONSTANT = {"optimizer.schedule": "constant"}


def claimed(workdir, steps: int, **values) -> None:
    """Claims the workdir for a run of `steps` steps, adds a checkpoint and releases the workdir."""
    config = base_config()
    config.update_from_flattened_dict({"steps": steps} | values)
    options = run_options(config)
    with claim(
        workdir, options, {"steps": steps, "model": {}, "format": FORMAT, "cores": 7}, log=print
    ):
        (workdir / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)


# As in DINOv3: the temperature's warm-up is given in steps, and the teacher's momentum is constant.
DINO = dotted("dino", teacher_temperature_steps=3, teacher_momentum=0.99, teacher_momentum_end=0.99)
SMALL_HEAD = {"dino.head_hidden": 16, "dino.prototypes": 12}
OF_NO_LENGTH = {
    name: {"objective.name": name} for name in ("classification", "masked_patch", "mae", "fcmae")
}
OF_NO_LENGTH |= {"distillation": {"objective.name": "distillation"}, "dino": DINO}


@pytest.mark.parametrize("objective", OF_NO_LENGTH)
def test_a_run_of_a_constant_rate_may_be_made_longer(tmp_path, capsys, objective):
    values = CONSTANT | OF_NO_LENGTH[objective]
    claimed(tmp_path / "run", 20, **values)
    claimed(tmp_path / "run", 30, **values)
    assert "this run is made longer: 30 steps in place of 20" in capsys.readouterr().out
    saved = saved_run(tmp_path / "run")
    assert (saved.config.steps, saved.manifest["steps"], saved.manifest["cores"]) == (30, 30, 7)
    claimed(tmp_path / "run", 30, **values)
    assert "longer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        (19, CONSTANT),
        (30, {"optimizer.schedule": "cosine"}),
        (30, CONSTANT | {"optimizer.weight_decay_end": 0.4}),
        (30, CONSTANT | {"objective.name": "dino"}),
        (30, CONSTANT | {"checkpoint.final": "best", "checkpoint.keep_best": 1}),
    ],
)
def test_a_run_that_depends_on_its_length_cannot_be_made_longer(tmp_path, steps, values):
    claimed(tmp_path / "run", 20, **values)
    with pytest.raises(
        UserError,
        match=rf"\(steps: 20 -> {steps}\).* a run can be made longer only if nothing depends on "
        rf"its length",
    ):
        claimed(tmp_path / "run", steps, **values)
    assert saved_run(tmp_path / "run").config.steps == 20


def test_a_longer_run_is_otherwise_the_same(tmp_path):
    claimed(tmp_path / "run", 20, **CONSTANT)
    with pytest.raises(
        UserError, match=r"\(seed: 0 -> 1; steps: 20 -> 30\); give .* started with; to train"
    ):
        claimed(tmp_path / "run", 30, seed=1, **CONSTANT)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, DINO | SMALL_HEAD], ids=["classification", "dino"])
def test_a_run_that_is_made_longer_is_bit_identical_to_a_run_of_that_length(tmp_path, values):
    def parameters(name: str, *lengths: int) -> dict[str, np.ndarray]:
        for steps in lengths:
            config = base_config()
            config.update(dict(batch_size=32, steps=steps, evaluate_every=2, log_every=1))
            config.model.update(dict(name="ViT-Ti/4", dim=32, depth=1, mlp_dim=64, heads=2))
            config.data.update(dict(source="digits", image_size=8, test_resize=8, workers=0))
            config.optimizer.update(dict(schedule="constant", warmup_steps=3))
            config.update_from_flattened_dict(values)
            vit_jax.train(config, tmp_path / name)
        return jax.device_get(params_of(vit_jax.load_model(tmp_path / name, log=str)))

    whole, longer = parameters("whole", 7), parameters("longer", 4, 7)
    for path, expected in whole.items():
        np.testing.assert_array_equal(longer[path], expected, err_msg=path)
    (before, after) = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "longer")
    )
    losses = [
        [row["train/loss"] for row in rows if "train/loss" in row] for rows in (before, after)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 7
