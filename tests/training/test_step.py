"""Tests of the compiled training and evaluation steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.training.mixing import random_erasing
from vit_jax.training.program import make_program
from vit_jax.training.step import make_eval_step, make_train_step


def setup(dropout=0.0, micro_batches=1, flip=False, augment=(), model=(), **optimizer):
    """Returns a tiny model's training step, first state, zero metrics, program, config and mesh."""
    config = base_config()
    config.micro_batches = micro_batches
    config.model.update(
        dict(name="ViT-Ti/4", dim=16, depth=1, mlp_dim=32, heads=2, dropout=dropout, head_bias=0.1)
    )
    config.model.update(dict(model))
    config.data.image_size, config.data.flip = 8, flip
    config.augment.update(dict(augment))
    config.optimizer.update(
        dict(schedule="constant", warmup_steps=0, learning_rate=0.01) | optimizer
    )
    config.batch_size = 16
    program = make_program(config, num_classes=5, steps=100, mesh=make_mesh(config.mesh))
    state = program.initial_state(0)
    # A head of zeros would give no gradient to the layers below it.
    head = jax.random.normal(jax.random.key(1), (16, 5))
    state["params"]["head"]["kernel"] = jax.device_put(
        head, state["params"]["head"]["kernel"].sharding
    )
    return program.train_step, state, program.initial_metrics(), program, config, program.mesh


def make_batch(mesh, size=16, same=False):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(1 if same else size, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(5, size=(1 if same else size, 1)).astype(np.int32)
    repeat = size if same else 1
    return to_devices({"image": images.repeat(repeat, 0), "labels": labels.repeat(repeat, 0)}, mesh)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])


def after_one_step(**settings) -> tuple[np.ndarray, dict]:
    # The update of plain SGD shows the gradient itself; Adam's would show its sign.
    plain = dict(name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0)
    same = settings.pop("same", False)
    step, state, metrics, *_, mesh = setup(**plain, **settings)
    state, metrics = step(state, metrics, make_batch(mesh, same=same))
    return flat(state["params"]), jax.device_get(metrics)


@pytest.mark.slow
def test_micro_batches_have_the_update_of_the_whole_augmented_batch():
    settings = dict(flip=True, augment=dict(mixup=0.8, cutmix=1.0, erasing=0.5))
    (whole, metrics), (parts, same_metrics) = (
        after_one_step(micro_batches=n, **settings) for n in (1, 4)
    )
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-7)
    for same, value in zip(*map(jax.tree.leaves, (same_metrics, metrics)), strict=True):
        np.testing.assert_allclose(same, value, rtol=1e-5)


@pytest.mark.slow
def test_gradients_summed_on_each_device_equal_those_of_the_whole_batch():
    settings = dict(dropout=0.5, micro_batches=2)
    (plain, metrics), (once, same_metrics) = (
        after_one_step(sum_gradients=way, **settings) for way in ("as_computed", "float32_once")
    )
    np.testing.assert_allclose(once, plain, rtol=1e-5, atol=1e-7)
    for same, value in zip(*map(jax.tree.leaves, (same_metrics, metrics)), strict=True):
        np.testing.assert_allclose(same, value, rtol=1e-5)


def test_gradients_summed_once_on_a_mesh_that_divides_parameters_are_refused():
    config = base_config()
    config.optimizer.sum_gradients, config.mesh.fsdp = "float32_once", 2
    mesh = AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(UserError, match="mesh.fsdp=1 and mesh.tensor=1"):
        make_train_step(None, None, None, config, mesh, None)


@pytest.mark.slow
def test_each_augmentation_of_the_config_changes_the_program():
    def program(**changed):
        step, state, metrics, *_, mesh = setup(**changed)
        return step.lower(state, metrics, make_batch(mesh)).as_text()

    plain = program()
    changes = [dict(mixup=0.2), dict(cutmix=1.0), dict(erasing=0.5), dict(level="strong2")]
    for changed in [dict(flip=True), *(dict(augment=values) for values in changes)]:
        assert program(**changed) != plain, changed


def test_every_step_augments_differently():
    step, state, metrics, *_, mesh = setup(augment=dict(mixup=0.8), learning_rate=0.0)
    losses = []
    for _ in range(3):
        state, sums = step(state, metrics, make_batch(mesh))
        losses.append(float(sums["loss"]))
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_every_micro_batch_has_its_own_dropout_key():
    # All images are equal. With one key for both micro-batches, both would have the same gradient.
    whole, _ = after_one_step(dropout=0.5, micro_batches=2, same=True)
    step, state, metrics, *_, mesh = setup(
        dropout=0.5, micro_batches=1, name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0
    )
    before = flat(state["params"])
    assert not np.allclose(whole, before)
    # The average of two equal gradients is that gradient. So with one key, halves would equal
    # quarters.
    halves = whole - before
    quarters = after_one_step(dropout=0.5, micro_batches=4, same=True)[0] - before
    assert np.abs(halves - quarters).max() > 0.05 * np.abs(halves).max()


def test_repeating_a_step_is_bit_exact():
    (first, _), (second, _) = after_one_step(dropout=0.5), after_one_step(dropout=0.5)
    np.testing.assert_array_equal(first, second)


def test_dropout_differs_between_steps():
    step, state, metrics, *_, mesh = setup(dropout=0.5, learning_rate=0.0)
    losses = []
    for _ in range(3):
        state, sums = step(state, metrics, make_batch(mesh))
        losses.append(float(sums["loss"]))
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_metrics_are_summed_until_they_are_reset():
    step, state, metrics, *_, mesh = setup(learning_rate=0.0)
    state, one = step(state, metrics, make_batch(mesh))
    state, two = step(state, one, make_batch(mesh))
    assert float(two["steps"]) == 2
    assert float(two["loss"]) == pytest.approx(2 * float(one["loss"]), rel=1e-6)


def test_update_that_is_not_finite_is_skipped_and_counted():
    step, state, metrics, *_, mesh = setup()
    good = jax.device_get(state["params"]["head"]["bias"])
    for bias in (np.full_like(good, np.nan), np.full_like(good, np.nan), good):
        state["params"]["head"]["bias"] = jax.device_put(bias)
        before = flat((state["params"], state["optimizer"][1].mu))
        state, metrics = step(state, metrics, make_batch(mesh))
        after = flat((state["params"], state["optimizer"][1].mu))
        assert np.array_equal(after, before, equal_nan=True) == np.isnan(bias).all()
    assert jax.device_get(metrics["skipped"]) == {"total": 2, "in_a_row": 0}
    assert float(metrics["steps"]) == 1 and np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_an_update_after_a_skipped_first_one_is_the_optimizers_first(name):
    settings = dict(name=name, learning_rate=1e-3, weight_decay=0.0, clip_norm=0.0)
    step, state, metrics, *_, mesh = setup(**settings)
    good = jax.device_get(state["params"]["head"]["bias"])
    state["params"]["head"]["bias"] = jax.device_put(np.full_like(good, np.nan))
    state, metrics = step(state, metrics, make_batch(mesh))
    state["params"]["head"]["bias"] = jax.device_put(good)
    before = jax.device_get(state["params"]["head"])
    state, _ = step(state, metrics, make_batch(mesh))
    moved = np.abs(jax.device_get(state["params"]["head"]["bias"]) - before["bias"])
    # Adam's first update equals the learning rate; Adafactor's momentum makes it a tenth of that.
    np.testing.assert_allclose(moved, 1e-3 * {"adam": 1, "adafactor": 0.1}[name], rtol=1e-3)


@pytest.mark.slow
def test_schedule_continues_when_an_update_is_skipped():
    plain = dict(name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0)
    step, state, metrics, *_, mesh = setup(**plain, warmup_steps=50)
    for bias in (np.nan, np.nan, 0.1):
        state["params"]["head"]["bias"] = jax.device_put(np.full(5, bias, np.float32))
        state, metrics = step(state, metrics, make_batch(mesh))
    # The third step has the third learning rate, as if it were the only step.
    step, alone, metrics, *_ = setup(**plain, learning_rate=0.01 * 3 / 50)
    alone, _ = step(alone, metrics, make_batch(mesh))
    np.testing.assert_allclose(flat(state["params"]), flat(alone["params"]), rtol=1e-6, atol=1e-9)


def test_step_compiles_once():
    step, state, metrics, *_, mesh = setup()
    zero = metrics
    for index in range(4):
        state, metrics = step(state, zero if index == 2 else metrics, make_batch(mesh))
    assert step._cache_size() == 1


def test_state_is_updated_in_place():
    step, state, metrics, *_, mesh = setup()
    step(state, metrics, make_batch(mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_masked_images_do_not_affect_metrics():
    _, state, _, program, config, mesh = setup()
    places, evaluated = program.evaluated_places(), program.evaluated(state)
    evaluate = make_eval_step(program.graphdef, program.objective, config, mesh, places)
    batch = make_batch(mesh)
    mask = np.arange(16) < 11
    everything, _ = evaluate(evaluated, batch | {"valid": jnp.asarray(mask)}, 0)
    spoiled = batch | {"image": batch["image"].at[11:].set(0), "valid": jnp.asarray(mask)}
    assert int(everything["images"]) == 11
    for name, value in evaluate(evaluated, spoiled, 0)[0].items():
        np.testing.assert_array_equal(value, everything[name])


def test_noise_of_erasing_is_standard_normal_after_normalization(monkeypatch):
    """timm erases normalized images, so the noise has mean 0 and std 1 after normalization."""
    erased = []

    def keep(images, *arguments):
        jax.debug.callback(erased.append, random_erasing(images, *arguments))
        return images

    monkeypatch.setattr("vit_jax.training.mixing.random_erasing", keep)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    model = dict(mean=mean, std=std)
    step, state, metrics, *_, mesh = setup(augment=dict(erasing=1.0), model=model)
    batch = make_batch(mesh)
    original = np.asarray(batch["image"]) / 127.5 - 1
    jax.block_until_ready(step(state, metrics, batch))
    found = np.asarray(erased[0])
    noise = (((found + 1) / 2 - mean) / std)[np.abs(found - original).max(-1) > 1e-3]
    assert len(noise) > 80
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.4)
    np.testing.assert_allclose(noise.std(0), 1, atol=0.3)
