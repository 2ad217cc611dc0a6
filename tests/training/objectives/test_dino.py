"""Tests of DINO: losses, teacher and centre, local crops, masked patches and Gram anchoring."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.objectives.small import SMALL, config_of, prepare
from vit_jax.config import check, run_options
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.planning.estimate import make_workload
from vit_jax.runs.assemble import evaluation_views
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.loop import as_items, from_items
from vit_jax.training.objectives.objective import StepContext
from vit_jax.training.program import abstract_batch, make_program


def setup(devices=None, **values):
    config = config_of("dino", head_hidden=16, prototypes=12, teacher_momentum=0.5)
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    plain = {"name": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
    plain |= {"learning_rate": 0.5, "schedule": "constant", "warmup_steps": 0}
    config.optimizer.update(plain)
    config.batch_size, config.data.image_size, config.data.test_resize = 16, 16, 16
    config.update_from_flattened_dict(values)
    mesh = make_mesh(config.mesh, devices)
    return make_program(config, num_classes=0, steps=10, mesh=mesh), config


def config_with_steps(**values):
    """Returns the config of `setup` with a number of steps, which config checks require."""
    config = setup()[1]
    config.update_from_flattened_dict({"steps": 10} | values)
    return config


def batch_of(mesh, number=0):
    images = np.random.default_rng(number).integers(256, size=(16, 2, 16, 16, 3), dtype=np.uint8)
    return to_devices({"image": images, "labels": np.full((16, 1), -1, np.int32)}, mesh)


def stepped(steps=2, **values):
    program, _ = setup(**values)
    state, sums = program.initial_state(0), program.initial_metrics()
    for number in range(steps):
        state, sums = program.train_step(state, sums, batch_of(program.mesh, number))
    return jax.device_get((state["params"], state["extra"], state["objective_state"], sums))


@jax.jit
def losses_at(objective, model, batch, state, update):
    return objective(model, batch, StepContext(None, state, update))


def assert_equal(one, other, rtol=1e-5, atol=1e-6):
    """Asserts that trees are equal; `atol` is multiplied by an array's largest value above 1."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * max(1, np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [{"micro_batches": 2}, {"micro_batches": 2, "optimizer.sum_gradients": "float32_once"}],
)
def test_micro_batches_equal_the_whole_batch(values):
    whole, parts = stepped(), stepped(**values)
    for *_, figures in (whole, parts):
        del figures["views_matched"]  # This metric compares only the images of one micro-batch.
    assert_equal(whole, parts)


def test_teacher_and_centre_are_updated_by_their_definition():
    program, _ = setup()
    state = program.initial_state(0)
    first = jax.device_get(state["objective_state"])
    state, _ = program.train_step(state, program.initial_metrics(), batch_of(program.mesh))
    share = (
        0.5 * (1 + np.cos(np.pi * 0 / 10)) / 2
    )  # The first update uses the initial `teacher_momentum`.
    wanted = jax.tree.map(
        lambda old, new: old + share * (new - old),
        first["teacher"],
        jax.device_get(state["params"]),
    )
    assert_equal(wanted, jax.device_get(state["objective_state"]["teacher"]))
    assert np.abs(first["centre"]).max() == 0 < np.abs(state["objective_state"]["centre"]).max()
    assert program.evaluated(state).params is state["objective_state"]["teacher"]


def test_state_is_restored_from_a_checkpoints_items():
    program, _ = setup()
    state, metrics = program.initial_state(0), program.initial_metrics()
    items = as_items(state, metrics)
    assert {"teacher", "teacher_head", "centre", "mean"} < set(items)
    again, _ = from_items(items)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_evaluation_does_not_depend_on_the_batch():
    figures = []
    for batch_size in (16, 40):
        program, config = setup(batch_size=batch_size)
        splits = {"test": open_source("digits", "test[:40]")}
        evaluate = Evaluator(program, splits, config, print, evaluation_views(config))
        figures.append(evaluate("test", program.evaluated(program.initial_state(0)), lambda: True))
    assert figures[0]["images"] == 40
    # A view in a smaller batch has fewer other views with which it can be confused.
    assert figures[0].pop("views_matched") >= figures[1].pop("views_matched")
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_plan_counts_both_views_and_the_teacher():
    program, config = setup()
    assert abstract_batch(config, program.mesh)["image"].shape == (16, 2, 16, 16, 3)
    config.data.source, config.epochs = "digits", 5.0
    supervised = config.copy_and_resolve_references()
    supervised.objective.name = "classification"
    ratio = (
        make_workload(run_options(config), None).multiply_adds
        / make_workload(run_options(supervised), None).multiply_adds
    )
    # The student trains on both views. The teacher adds one forward pass for each of them, which
    # costs a third of a training step. The tolerance allows for the last layer, which computes only
    # one token.
    assert 8 / 3 * 0.7 < ratio < 8 / 3 * 1.2


LOCAL = {"dino.local_crops": 3, "dino.local_size": 8}


def test_loss_with_local_crops_is_the_mean_over_all_pairs_of_views():
    program, config = setup(**LOCAL)
    assert abstract_batch(config, program.mesh)["local"].shape == (16, 3, 8, 8, 3)
    evaluated = program.evaluated(program.initial_state(0))
    graphdefs, batch = (program.graphdef, program.objective), jax.device_get(batch_of(program.mesh))
    batch["local"] = np.random.default_rng(5).integers(256, size=(16, 3, 8, 8, 3), dtype=np.uint8)

    @jax.jit
    def compute(evaluated, images, local):
        def losses(params):
            model, objective = (
                nnx.merge(graphdefs[0], params),
                nnx.merge(graphdefs[1], evaluated.objective_params),
            )
            loss = objective(
                model,
                {"image": images, "local": local},
                StepContext(None, evaluated.objective_state),
            )
            seen = (model, images), (model.resized(8), local)
            large, small = (objective.head(objective.see(one, views)[0]) for one, views in seen)
            return loss.each.mean(), (loss.each, large, small)

        (_, found), gradient = jax.value_and_grad(losses, has_aux=True)(evaluated.params)
        return *found, gradient["position_embedding"]["table"]

    found, large, small, table = compute(evaluated, batch["image"], batch["local"])
    every = np.concatenate([large, small], axis=1) / 0.1
    said = every - np.log(np.exp(every).sum(-1, keepdims=True))
    wanted = np.exp(large / 0.04) / np.exp(large / 0.04).sum(
        -1, keepdims=True
    )  # The centre is still zero.
    pairs = [(t, s) for t in range(2) for s in range(5) if t != s]
    mean = sum(-(wanted[:, t] * said[:, s]).sum(-1) for t, s in pairs) / len(pairs)
    np.testing.assert_allclose(found, mean, rtol=1e-4)
    *_, other = compute(evaluated, batch["image"], batch["local"][::-1])
    # These are the class token and patches from which the position embeddings of a crop's 2x2
    # patches are interpolated.
    assert (np.abs(table - other).max(axis=-1)[0, [0, 1, 4, 13, 16]] > 0).all()


def test_plan_counts_local_crops_without_a_teacher():
    _, config = setup()
    config.data.source, config.epochs = "digits", 5.0
    whole = make_workload(run_options(config), None).multiply_adds
    config.update_from_flattened_dict(LOCAL)
    # A local crop has 5 tokens instead of 17, and no forward pass of a teacher, which is a third of
    # a training step. The head costs the same for every view.
    assert (
        0.3
        < (make_workload(run_options(config), None).multiply_adds - whole) / whole * (8 / 3) / 3
        < 0.8
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dino.local_size": 6}, "dino.local_size = 6: .*does not divide"),
    ],
)
def test_local_crops_that_the_model_does_not_take_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        setup(**LOCAL | values)


def test_local_crops_larger_than_the_images_are_rejected():
    with pytest.raises(
        UserError, match="local_size is 24 .* at most data.image_size = 16, or give"
    ):
        check(config_with_steps(**LOCAL | {"dino.local_size": 24}))


def test_local_crops_need_a_crop_that_draws_an_area():
    _, config = setup()
    config.update_from_flattened_dict(LOCAL | {"data.crop": "none", "epochs": 1.0})
    with pytest.raises(
        UserError, match="dino.local_crops is 3 and must be 0 with data.crop='none'"
    ):
        check(config)


def test_mixed_images_are_refused():
    with pytest.raises(UserError, match="augment.mixup is 0.2 and must be 0"):
        setup(**{"augment.mixup": 0.2})


PATCHES = {"dino.patch_weight": 1.0, "model.pooling": "cls"}


def test_one_view_of_each_image_is_masked_with_evenly_spaced_shares_in_a_batch():
    program, _ = setup(**PATCHES, **{"batch_size": 64, "dino.patch_mask_ratios": (0.25, 0.75)})
    objective = nnx.merge(
        program.objective, program.evaluated(program.initial_state(0)).objective_params
    )
    batch = {"image": np.zeros((64, 2, 16, 16, 3), np.uint8)}
    drawn = prepare(objective, batch, jax.random.split(jax.random.key(0), 64))
    masked, count = np.asarray(drawn["masked"]), np.asarray(drawn["masked"]).sum((1, 2))
    np.testing.assert_array_equal((masked.any(2)).sum(1), 1)
    # The masked fraction of image k lies between 0.25 + 0.5 * k / 64 and 0.25 + 0.5 * (k + 1) / 64.
    wanted = 16 * (0.25 + 0.5 * np.arange(64) / 64)
    assert (np.floor(wanted) <= count).all()
    assert (count <= np.ceil(wanted + 8 / 64)).all()
    assert 16 < masked.any(2)[:, 0].sum() < 48
    view, positions = (np.asarray(drawn[name]) for name in ("masked_view", "positions"))
    for image in range(64):
        chosen = positions[image][np.asarray(drawn["chosen"])[image]]
        assert sorted(chosen) == np.flatnonzero(masked[image, view[image]]).tolist()


def test_loss_of_masked_patches_is_the_cross_entropy_with_the_teacher():
    program, _ = setup(**PATCHES, **{"dino.patch_prototypes": 9, "dino.teacher_temperature": 0.1})
    evaluated, batch = (
        program.evaluated(program.initial_state(0)),
        jax.device_get(batch_of(program.mesh)),
    )
    model, objective = (
        nnx.merge(program.graphdef, evaluated.params),
        nnx.merge(program.objective, evaluated.objective_params),
    )
    objective.mask[...] += 1.0
    batch = prepare(objective, batch, jax.random.split(jax.random.key(0), 16))
    see = jax.jit(lambda *masked: objective.see(model, batch["image"], None, True, *masked)[1])
    tokens, whole = see(batch["masked"]), see()
    assert np.abs(tokens - whole).max() > 0.1
    said, wanted = (np.asarray(objective.patch_head(x), np.float64) / 0.1 for x in (tokens, whole))
    said -= np.log(np.exp(said).sum(-1, keepdims=True))
    wanted = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True)  # The centre is still zero.
    losses, masked = -(wanted * said).sum(-1), np.asarray(batch["masked"])
    found = losses_at(objective, model, batch, evaluated.objective_state, 1)
    of_patches = (losses * masked).sum((1, 2)) / masked.sum((1, 2))
    np.testing.assert_allclose(found.metrics["patch_loss"], of_patches, rtol=1e-4)
    objective.patch_weight = 3.0
    heavier = losses_at(objective, model, batch, evaluated.objective_state, 1)
    np.testing.assert_allclose(heavier.each - found.each, of_patches, rtol=1e-3)


def test_temperature_rises_linearly():
    warmup = {"dino.teacher_temperature_end": 0.08, "dino.teacher_temperature_steps": 4}
    program, _ = setup(**warmup)
    objective = program.abstract_objective()
    # DINOv2's `CosineScheduler` starts with np.linspace(0.04, 0.08, 4) and then keeps the last
    # value.
    assert [float(objective.temperature(update)) for update in (1, 2, 3, 4, 5, 9)] == pytest.approx(
        [*np.linspace(0.04, 0.08, 4), 0.08, 0.08]
    )


@pytest.mark.parametrize(
    ("means", "words"),
    [
        (
            dict(spread=0.001, prototypes_used=5, teacher_entropy=1.0),
            "nearly the same for all images",
        ),
        (dict(spread=0.5, prototypes_used=1.2, teacher_entropy=0.1), "the same prototype"),
        (dict(spread=0.5, prototypes_used=12, teacher_entropy=2.4848), "outputs are uniform"),
    ],
)
def test_collapse_is_logged_after_a_twentieth_of_the_run(means, words):
    objective = setup()[0].abstract_objective()
    objective.steps = 200
    assert words in objective.warning(means, 10)
    assert objective.warning(means, 9) is None
    objective.steps = 10  # The running mean of the teacher's outputs needs some steps.
    assert words in objective.warning(means, 5)
    assert objective.warning(means, 4) is None
    healthy = dict(spread=0.5, prototypes_used=8, teacher_entropy=1.5)
    assert objective.warning(healthy, 50) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dino.centring": "sinkhorn", "micro_batches": 2}, "needs the whole batch"),
        ({"dino.koleo": 0.1, "micro_batches": 2}, "compares the images of a batch"),
        (
            {"dino.koleo": 0.1, "dino.koleo_group": 16, "micro_batches": 2},
            "a dino.koleo_group",
        ),
        ({"dino.koleo_group": 5}, "a divisor of batch_size"),
        ({"dino.teacher_momentum": 1.5}, "dino.teacher_momentum"),
    ],
)
def test_invalid_values_are_refused_in_one_line(values, words):
    config = config_with_steps(**values)
    with pytest.raises(UserError, match=words):
        check(config)


def test_koleo_of_groups_works_with_micro_batches_of_whole_groups():
    check(config_with_steps(**{"dino.koleo": 0.1, "dino.koleo_group": 4, "micro_batches": 2}))


@pytest.mark.parametrize("values", [{"dino.centring": "sinkhorn"}, {"dino.koleo": 0.1}])
def test_losses_that_compare_images_refuse_a_batch_of_one(values):
    with pytest.raises(
        UserError, match="batch_size must be 2 or more: KoLeo and Sinkhorn-Knopp compare"
    ):
        setup(batch_size=1, **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"dino.teacher_temperature_steps": 10, "dino.frozen_prototype_steps": 500},
            r"dino.teacher_temperature_steps=10, dino.frozen_prototype_steps=500 must be below the "
            r"run's 10 steps: use fewer, such as 1, or train longer",
        ),
        (
            {"dino.gram": 1.0, "dino.gram_from": 10},
            "dino.gram_from=10 must be below",
        ),
    ],
)
def test_schedules_longer_than_the_run_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        setup(**PATCHES, **values)


def test_the_first_step_of_an_unused_loss_may_be_after_the_run():
    program, _ = setup(**{"dino.teacher_temperature_steps": 9, "dino.gram_from": 500})
    assert program.abstract_objective().temperatures[2] == 9


def test_patch_losses_of_a_model_without_patches_are_refused():
    with pytest.raises(UserError, match="must be a ViT"):
        setup(**PATCHES, **{"model.name": "R50+ViT-Ti/16", "model.resnet_blocks": (1,)})


GRAM = PATCHES | {"dino.gram": 2.0, "dino.gram_from": 2, "dino.gram_every": 2}
GRAM |= {"dino.gram_times": 1}


def test_the_gram_teacher_is_copied_as_often_as_configured():
    objective = setup(**GRAM)[0].abstract_objective()
    objective = nnx.merge(*nnx.split(objective))
    kept, kinds = 0.0, []
    memory = {"teacher": {"x": np.float32(0)}, "teacher_head": {}, "gram": {"x": np.float32(-1)}}
    objective.own_weights = dict
    for update in range(1, 8):
        memory = objective.update_state(memory, {"x": np.float32(update)}, {}, update)
        kinds.append(float(memory["gram"]["x"]) != kept)
        kept = float(memory["gram"]["x"])
    assert kinds == [True, True, False, True, False, False, False]


@pytest.mark.slow
def test_gram_loss_compares_patch_similarities_with_the_gram_teachers():
    program, config = setup(**GRAM, **{"dino.gram_size": 32, "dino.koleo": 0.0})
    assert abstract_batch(config, program.mesh)["gram"].shape == (16, 2, 32, 32, 3)
    evaluated, batch = (
        program.evaluated(program.initial_state(0)),
        jax.device_get(batch_of(program.mesh)),
    )
    model, objective = (
        nnx.merge(program.graphdef, evaluated.params),
        nnx.merge(program.objective, evaluated.objective_params),
    )
    batch["gram"] = np.random.default_rng(2).integers(256, size=(16, 2, 32, 32, 3), dtype=np.uint8)
    batch = prepare(objective, batch, jax.random.split(jax.random.key(0), 16))

    @jax.jit
    def features(batch):
        _, tokens = objective.see(model, batch["image"], None, True, batch["masked"])
        _, large = objective.see(model.resized(32), batch["gram"], patches=True)
        return tokens, large

    tokens, large = features(batch)
    large = np.asarray(large).reshape(16, 2, 8, 8, -1)
    # Bicubic downsampling by 2 has these four taps: Keys' kernel with a = -0.75, halfway between
    # pixels. Beyond an edge, the pixels at the edge are repeated.
    padded = np.pad(large, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    taps = np.array([-0.09375, 0.59375, 0.59375, -0.09375])
    rows = sum(tap * padded[:, :, k : k + 7 : 2] for k, tap in enumerate(taps))
    small = sum(tap * rows[:, :, :, k : k + 7 : 2] for k, tap in enumerate(taps)).reshape(
        16, 2, 16, -1
    )
    ours, theirs = (
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (np.asarray(tokens), small)
    )
    ours, theirs = (x @ x.swapaxes(-1, -2) for x in (ours, theirs))
    wanted = np.square(ours - theirs).mean((1, 2, 3))
    before, after = (
        losses_at(objective, model, batch, evaluated.objective_state, update) for update in (2, 3)
    )
    np.testing.assert_allclose(after.metrics["gram"], wanted, rtol=1e-3)
    np.testing.assert_allclose(after.each - before.each, 2 * wanted, rtol=1e-3, atol=1e-5)
