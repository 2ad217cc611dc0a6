"""Tests of the weights that a run trains and evaluates: frozen trunks, LoRA, layer decay, EMA."""

import re

import jax
import numpy as np
import pytest

from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import effective
from vit_jax.training.program import make_program

PLAIN = dict(
    name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0, schedule="constant", warmup_steps=0
)


def setup(model="ViT-Ti/4", train="all", **optimizer):
    """Returns a tiny model's program, its first state with a nonzero head, and a batch."""
    config = base_config()
    sizes = dict(dim=16, depth=2, mlp_dim=32, heads=2)
    config.model.update(dict(name=model) | (sizes if "ViT" in model else {}))
    if "ViT" not in model:
        config.model.update(dict(resnet_blocks=(1,), resnet_width=1))
    config.data.image_size, config.data.flip, config.batch_size = 8, False, 8
    config.optimizer.update(PLAIN | dict(learning_rate=0.1) | optimizer)
    config.finetune.train, config.finetune.lora_rank = train, 3
    mesh = make_mesh(config.mesh)
    program = make_program(config, num_classes=5, steps=100, mesh=mesh)
    state = program.initial_state(0)
    head = state["params"]["head"]["kernel"]
    drawn = np.random.default_rng(1).normal(size=head.shape).astype(np.float32)
    state["params"]["head"]["kernel"] = jax.device_put(drawn, head.sharding)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(256, size=(8, 8, 8, 3), dtype=np.uint8),
        "labels": rng.integers(5, size=(8, 1)).astype(np.int32),
    }
    return program, state, to_devices(batch, mesh)


def by_path(tree) -> dict[str, np.ndarray]:
    return {path_name(path): np.array(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def after(program, state, batch, steps=1):
    metrics = program.initial_metrics()
    for _ in range(steps):
        state, metrics = program.train_step(state, metrics, batch)
    return state


@pytest.mark.one_variant
@pytest.mark.parametrize("train", ["head", "lora"])
def test_frozen_parameters_do_not_change(train):
    program, state, batch = setup(train=train, weight_decay=0.1)
    before = by_path(state["params"])
    changed = {
        path
        for path, value in by_path(after(program, state, batch, 2)["params"]).items()
        if not np.array_equal(value, before[path])
    }
    assert changed == {"head/kernel", "head/bias"}


def test_optimizer_has_no_state_for_frozen_parameters():
    adam = dict(name="adam", beta1=0.9)
    kept = setup(train="head", **adam)[0].state["optimizer"]
    shapes = [x.shape for x in jax.tree.leaves(kept) if x.shape]
    assert sorted(shapes) == [(5,), (5,), (16, 5), (16, 5)]
    assert len(jax.tree.leaves(setup(**adam)[0].state["optimizer"])) > len(shapes)


def test_backward_pass_of_a_frozen_trunk_is_skipped():
    def flops(train):
        program, state, batch = setup(train=train)
        return program.train_step.lower(state, program.initial_metrics(), batch).cost_analysis()[
            "flops"
        ]

    assert flops("head") < 0.6 * flops("all")


def test_low_rank_changes_start_at_zero_and_change_attention_only():
    program, state, batch = setup(train="lora")
    base, first = by_path(state["params"]), by_path(program.evaluated(state).params)
    for path, value in first.items():
        np.testing.assert_array_equal(value, base[path])
    new = by_path(program.evaluated(after(program, state, batch, 2)).params)
    changed = {
        re.sub(r"blocks/\d+/", "", path)
        for path in new
        if not np.array_equal(new[path], base[path])
    }
    assert changed == {"head/kernel", "head/bias", "attention/qkv/kernel", "attention/out/kernel"}
    change = (
        new["blocks/00/attention/qkv/kernel"] - base["blocks/00/attention/qkv/kernel"]
    ).reshape(16, -1)
    assert np.linalg.matrix_rank(change, tol=1e-6) == 3


def test_low_rank_change_is_the_product_of_its_factors():
    rng = np.random.default_rng(0)
    kernel, down, up = (rng.normal(size=shape) for shape in ((2, 8, 16), (2, 8, 3), (3, 16)))
    path = "blocks.00.attention.out.kernel"
    weights = {
        "params": {"blocks": {"00": {"attention": {"out": {"kernel": kernel}}}}},
        "extra": {"lora": {path: {"down": down, "up": up}}},
    }
    (found,) = by_path(effective(weights)).values()
    np.testing.assert_allclose(
        found, kernel + np.einsum("hkr,rd->hkd", down, up), rtol=1e-5, atol=1e-6
    )


def test_low_rank_changes_of_a_model_without_attention_are_refused():
    with pytest.raises(UserError, match="finetune.train='lora' changes attention's products"):
        setup(model="BiT-R50x1", train="lora")


def test_each_layer_learns_more_slowly_than_the_one_above():
    updates = []
    for decay in (1.0, 0.5):
        program, state, batch = setup(layer_decay=decay)
        before = by_path(state["params"])
        new = by_path(after(program, state, batch)["params"])
        updates.append({path: new[path] - before[path] for path in new})
    plain, decayed = updates
    powers = {
        "head/bias": 0,
        "norm/scale": 0,
        "blocks/01/norm1/scale": 1,
        "blocks/00/mlp/fc1/kernel": 2,
    }
    powers |= {"patch_embedding/kernel": 3, "position_embedding/table": 3, "cls": 3}
    for path, power in powers.items():
        np.testing.assert_allclose(decayed[path], plain[path] * 0.5**power, rtol=2e-3, atol=1e-7)


@pytest.mark.one_variant
@pytest.mark.parametrize("start", ["zero", "weights"])
def test_average_is_the_weighted_sum_of_its_definition(start):
    program, state, batch = setup(average=0.9, average_from=start)
    history, metrics = [by_path(program.evaluated(state).params)], program.initial_metrics()
    for _ in range(5):
        state, metrics = program.train_step(state, metrics, batch)
        history.append(by_path(state["params"]))
    found = by_path(program.evaluated(state).params)
    for path, value in found.items():
        parts = [p[path].astype(np.float64) for p in history]
        shares = [0.1 * 0.9 ** (5 - t) for t in range(6)]
        shares[0] = 0.0 if start == "zero" else 0.9**5
        wanted = sum(s * p for s, p in zip(shares, parts, strict=True)) / sum(shares)
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_skipped_update_does_not_change_the_average():
    program, state, batch = setup(average=0.5)
    state = after(program, state, batch)
    before = by_path(program.evaluated(state).params)
    bias = state["params"]["head"]["bias"]
    state["params"]["head"]["bias"] = jax.device_put(
        np.full(bias.shape, np.nan, np.float32), bias.sharding
    )
    for path, value in by_path(program.evaluated(after(program, state, batch)).params).items():
        np.testing.assert_array_equal(value, before[path])
