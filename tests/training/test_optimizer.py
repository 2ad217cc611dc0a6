"""Tests of learning rate schedules and optimizer updates against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import vit_jax
from tests.training.objectives.small import set_objective
from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.models.vit import FAMILY as VIT
from vit_jax.options.optimizer import OptimizerOptions
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.sharding import path_name
from vit_jax.training.optimizer import DECAYED, layer_of, make_optimizer, scale_by_layer
from vit_jax.training.program import make_program
from vit_jax.training.schedule import make_backbone_schedule, make_schedule, make_weight_decay
from vit_jax.training.update_rules.adafactor import clip_by_rms


def settings(**values):
    optimizer = base_config().optimizer
    optimizer.update(values)
    return optimizer


def run(gradients: list[dict], params: dict, steps: int = 10, **values) -> dict:
    config = settings(**values)
    optimizer = make_optimizer(
        config, make_schedule(config, steps), weight_decay=make_weight_decay(config, steps)
    )
    params = {name: {k: jnp.asarray(v) for k, v in layer.items()} for name, layer in params.items()}
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("t", "rate"), [(0, 0), (5000, 4e-4), (10_000, 8e-4), (263_911, 4.05e-4), (517_822, 1e-5)]
)
def test_linear_schedule_has_the_papers_values(t, rate):
    config = settings(
        learning_rate=8e-4, end_learning_rate=1e-5, schedule="linear", warmup_steps=10_000
    )
    assert float(make_schedule(config, 517_822)(t)) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize(
    ("t", "rate"), [(50, 0.5), (100, 1.0), (350, 0.853553), (600, 0.5), (1100, 0.0)]
)
def test_cosine_schedule_falls_by_half_in_the_middle(t, rate):
    config = settings(learning_rate=1.0, schedule="cosine", warmup_steps=100)
    assert float(make_schedule(config, 1100)(t)) == pytest.approx(rate, abs=1e-5)


def test_constant_schedule_only_warms_up():
    config = settings(learning_rate=0.5, schedule="constant", warmup_steps=4)
    schedule = make_schedule(config, 100)
    assert [float(schedule(t)) for t in (1, 2, 4, 50, 100)] == [0.125, 0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("t", "rate"), [(0, 0.1), (2, 0.3), (4, 0.5), (100, 0.5)])
def test_warmup_starts_at_its_own_learning_rate(t, rate):
    values = dict(learning_rate=0.5, schedule="constant", warmup_steps=4, warmup_learning_rate=0.1)
    assert float(make_schedule(settings(**values), 100)(t)) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("steps", "warmup", "stairs"),
    [
        (500, 100, (200, 300, 400)),
        (10_000, 500, (3000, 6000, 9000)),
        (20_000, 500, (6000, 12_000, 18_000)),
    ],
)
def test_stairs_equal_the_schedule_of_bit(steps, warmup, stairs):
    # BiT-HyperRule (bit_hyperrule.py of big_transfer) counts updates from 0.
    shares = tuple(stair / steps for stair in stairs)
    values = dict(
        learning_rate=0.003, schedule="stairs", stairs=shares, warmup_steps=warmup, count_from=0
    )
    count = np.arange(steps)
    expected = 0.003 * 0.1 ** sum((count > stair).astype(int) for stair in stairs)
    expected = expected * np.minimum(1, count / warmup)
    found = jax.vmap(make_schedule(settings(**values), steps))(count + 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.one_variant
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_counted_from_0_is_optaxs(schedule):
    config = settings(learning_rate=0.5, end_learning_rate=0.1, schedule=schedule, count_from=0)
    config.warmup_steps = 20
    if schedule == "linear":
        falling = optax.linear_schedule(0.5, 0.1, 80)
    else:
        falling = optax.cosine_decay_schedule(0.5, 80, alpha=0.2)
    theirs = optax.join_schedules([optax.linear_schedule(0, 0.5, 20), falling], [20])
    count = jnp.arange(20, 100)
    # During the warm-up, both multiply a constant learning rate by a growing factor.
    ours = jax.vmap(make_schedule(config, 100))
    np.testing.assert_allclose(ours(count + 1), jax.vmap(theirs)(count), rtol=1e-5)
    np.testing.assert_allclose(
        ours(jnp.arange(20) + 1), jax.vmap(theirs)(jnp.arange(20)), rtol=1e-5
    )


def test_first_update_has_a_learning_rate_above_zero():
    params = {"layer": {"kernel": np.ones((2, 2), np.float32)}}
    gradient = {"layer": {"kernel": jnp.ones((2, 2))}}
    values = dict(learning_rate=0.1, warmup_steps=10, weight_decay=0.0, clip_norm=0.0)
    after = run([gradient], params, steps=100, **values)
    np.testing.assert_allclose(after["layer"]["kernel"], 1 - 0.1 / 10, rtol=1e-5)


def test_last_update_has_the_end_learning_rate():
    params = {"layer": {"kernel": np.ones((1, 1), np.float32)}}
    gradients = [{"layer": {"kernel": jnp.zeros((1, 1))}}] * 4 + [
        {"layer": {"kernel": jnp.ones((1, 1))}}
    ]
    values = dict(
        name="sgd", beta1=0.0, learning_rate=1.0, end_learning_rate=0.25, schedule="linear"
    )
    after = run(gradients, params, steps=5, warmup_steps=0, weight_decay=0.0, **values)
    np.testing.assert_allclose(after["layer"]["kernel"], 0.75, rtol=1e-6)


def test_warmup_as_long_as_the_run_is_refused():
    with pytest.raises(UserError, match="warmup_steps = 10 is not below the run's 10 steps"):
        make_schedule(settings(warmup_steps=10), 10)


def random_run(seed=0, steps=6):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 4), "bias": (4,)}
    params = {"layer": {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}}
    gradients = [
        {"layer": {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}}
        for _ in range(steps)
    ]
    return params, gradients


@pytest.mark.parametrize("decay", ["kernels", "all"])
def test_adam_equals_numpy(decay):
    params, gradients = random_run()
    values = dict(
        learning_rate=0.01, schedule="constant", warmup_steps=0, weight_decay=0.3, decay=decay
    )
    got = run(gradients, params, **values)["layer"]
    expected = {k: v.astype(np.float64) for k, v in params["layer"].items()}
    mu, nu = ({k: np.zeros_like(v) for k, v in expected.items()} for _ in range(2))
    for t, gradient in enumerate(gradients, start=1):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient["layer"].values()))
        for k, g in gradient["layer"].items():
            g = g / max(norm, 1.0)
            mu[k], nu[k] = 0.9 * mu[k] + 0.1 * g, 0.999 * nu[k] + 0.001 * g**2
            direction = (mu[k] / (1 - 0.9**t)) / (np.sqrt(nu[k] / (1 - 0.999**t)) + 1e-8)
            if k == "kernel" or decay == "all":
                direction += 0.3 * expected[k]
            expected[k] = expected[k] - 0.01 * direction
    for k in expected:
        np.testing.assert_allclose(got[k], expected[k], rtol=2e-5, atol=1e-6)


def test_momentum_equals_numpy():
    params, gradients = random_run()
    values = dict(name="sgd", learning_rate=0.1, schedule="constant", warmup_steps=0, clip_norm=0.0)
    got = run(gradients, params, weight_decay=0.0, **values)["layer"]["kernel"]
    expected, velocity = params["layer"]["kernel"].astype(np.float64), 0.0
    for gradient in gradients:
        velocity = 0.9 * velocity + gradient["layer"]["kernel"]
        expected = expected - 0.1 * velocity
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_coupled_decay_is_added_to_the_gradient():
    params, gradients = random_run()
    values = dict(name="sgd", learning_rate=0.1, schedule="constant", warmup_steps=0, clip_norm=0.0)
    got = run(gradients, params, weight_decay=0.3, coupled_decay=True, **values)["layer"]
    for name, share in {"kernel": 0.3, "bias": 0.0}.items():
        expected, velocity = params["layer"][name].astype(np.float64), 0.0
        for gradient in gradients:
            velocity = 0.9 * velocity + gradient["layer"][name] + share * expected
            expected = expected - 0.1 * velocity
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6)


# Adafactor factors both the heads' number and their width, and the first axis is not the largest.
FUSED = {
    "blocks/00/attention/qkv": {"kernel": (32, 3, 40, 36), "bias": (3, 40, 36)},
    "attention_pooling/key_value": {"kernel": (48, 2, 2, 64), "bias": (2, 2, 64)},
    "blocks/00/mlp/fc1": {"kernel": (33, 2, 64), "bias": (2, 64)},
}


@pytest.mark.one_variant
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("layer", FUSED)
def test_adafactor_updates_fused_projections_separately(layer, clip):
    values = dict(
        name="adafactor", learning_rate=0.1, schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    values |= dict(clip_update=clip, weight_decay=0.0)
    rng = np.random.default_rng(0)
    for kind, shape in FUSED[layer].items():
        axis = 1 if kind == "kernel" else 0
        # Gradients of the projections have very different sizes, as those of queries and values do.
        scale = np.logspace(0, -4, shape[axis]).reshape(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
        draws = [(scale * rng.normal(size=shape)).astype(np.float32) for _ in range(4)]
        draws[2] *= 100  # Large enough that the update is clipped.
        together = run([{layer: {kind: x}} for x in draws[1:]], {layer: {kind: draws[0]}}, **values)
        for part in range(shape[axis]):
            first, *rest = (x.take(part, axis) for x in draws)
            alone = run([{"alone": {kind: x}} for x in rest], {"alone": {kind: first}}, **values)
            found = together[layer][kind].take(part, axis)
            np.testing.assert_allclose(found, alone["alone"][kind], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adafactor_equals_numpy(clip):
    values = dict(
        name="adafactor", learning_rate=0.1, schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    rng = np.random.default_rng(0)
    kernel, *gradients = (rng.normal(size=(40, 33)).astype(np.float32) for _ in range(5))
    gradients[2] *= 10
    layers = [{"layer": {"kernel": x}} for x in gradients]
    got = run(layers, {"layer": {"kernel": kernel}}, clip_update=clip, weight_decay=0.0, **values)
    expected, momentum, rows, columns = kernel.astype(np.float64), 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        decay = min(0.999, 1 - t**-0.8)
        rows = decay * rows + (1 - decay) * (gradient.astype(np.float64) ** 2).mean(
            axis=1, keepdims=True
        )
        columns = decay * columns + (1 - decay) * (gradient.astype(np.float64) ** 2).mean(axis=0)
        update = gradient / np.sqrt(rows * columns / rows.mean())
        if clip:
            update = update / max(1, np.sqrt((update**2).mean()) / clip)
        momentum = 0.9 * momentum + 0.1 * update
        expected = expected - 0.1 * momentum
    np.testing.assert_allclose(got["layer"]["kernel"], expected, rtol=2e-5, atol=1e-6)


def test_clipping_the_updates_of_another_optimizer_is_refused():
    with pytest.raises(
        UserError, match="clip_update = 1.0 is of optimizer.name='adafactor', not of 'sgd'"
    ):
        make_optimizer(settings(name="sgd", clip_update=1.0), lambda t: t, weight_decay=0.0)


def test_updates_can_be_clipped_over_whole_arrays():
    # `array` is the behaviour of earlier versions: one clipping factor for q, k and v together.
    x = {"attention": {"qkv": {"bias": jnp.array([[[3.0]], [[4.0]], [[0.0]]])}}}
    apart, together = (
        clip_by_rms(1.0, of).update(x, optax.EmptyState())[0] for of in ("projection", "array")
    )
    np.testing.assert_allclose(jax.tree.leaves(apart)[0].ravel(), [1, 1, 0])
    np.testing.assert_allclose(
        jax.tree.leaves(together)[0].ravel(), np.array([3, 4, 0]) / np.sqrt(25 / 3)
    )


def test_weight_decay_changes_only_kernels():
    params, _ = random_run()
    params = {"block": {"kernel": params["layer"]["kernel"], "bias": params["layer"]["bias"]}}
    zero = {"block": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}}
    values = dict(learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5)
    after = run([zero], params, **values)["block"]
    np.testing.assert_allclose(
        after["kernel"], params["block"]["kernel"] * (1 - 0.1 * 0.5), rtol=1e-6
    )
    np.testing.assert_array_equal(after["bias"], params["block"]["bias"])


@pytest.mark.parametrize(
    ("decay", "decays"),
    [
        # "tables" is `get_parameter_groups` in optim_factory.py of BEiT and EVA: arrays with one
        # axis, pos_embed and cls_token do not decay. "matrices" is timm's `add_weight_decay`, which
        # MAE uses: only arrays with one axis do not decay.
        (
            "tables",
            {"bias_table", "blocks/00/attention/bias_table", "blocks/00/mlp/fc1/kernel", "mask"},
        ),
        ("kernels", {"blocks/00/mlp/fc1/kernel"}),
    ],
)
def test_weight_decay_of_tables_and_tokens_is_the_authors(decay, decays):
    paths = {
        "cls",
        "position_embedding/table",
        "norm/scale",
        "blocks/00/mlp/fc1/bias",
        "bias_table",
        "mask",
    }
    paths |= {"blocks/00/attention/bias_table", "blocks/00/mlp/fc1/kernel"}
    params = nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): jnp.ones((3, 3)) for path in paths}
    )
    found = nnx.traversals.flatten_mapping(DECAYED[decay](params))
    assert {"/".join(path) for path, x in found.items() if x} == decays
    of_matrices = nnx.traversals.flatten_mapping(DECAYED["matrices"](params))
    spared = {"norm/scale", "blocks/00/mlp/fc1/bias"}
    assert {"/".join(path) for path, x in of_matrices.items() if x} == paths - spared


@pytest.mark.parametrize("decay", ["kernels", "tables", "matrices"])
def test_weight_decay_spares_a_swins_positions_and_factors(decay):
    spared = ("attention/bias_table", "attention/logit_scale", "attention/bias_mlp/fc1/kernel")
    paths = [f"stages/0/00/{path}" for path in (*spared, "attention/out/kernel")]
    params = nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): jnp.ones(3) for path in paths}
    )
    decayed = nnx.traversals.flatten_mapping(DECAYED[decay](params))
    assert {"/".join(path) for path, decays in decayed.items() if decays} == {paths[-1]}


@pytest.mark.parametrize(
    ("decay", "moved"),
    [
        ("kernels", {"kernel"}),
        ("matrices", {"kernel", "cls", "table"}),
        ("all", {"kernel", "cls", "table", "bias", "scale"}),
    ],
)
def test_weight_decay_changes_only_the_selected_parameters(decay, moved):
    # MAE exempts only arrays with one axis, so its tokens decay.
    shapes = dict(kernel=(3, 4), cls=(1, 1, 4), table=(1, 5, 4), bias=(3, 4), scale=(4,))
    params = {"layer": {name: jnp.ones(shape) for name, shape in shapes.items()}}
    zero = jax.tree.map(jnp.zeros_like, params)
    values = dict(
        learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5, decay=decay
    )
    after = run([zero], params, **values)["layer"]
    assert {name for name, value in after.items() if (value != 1).all()} == moved


def test_layer_decay_equals_that_of_masked_autoencoders():
    # As in util/lr_decay.py of MAE: everything before the blocks is layer 0, block i is layer i +
    # 1, and the rest has the full learning rate.
    model = vit_jax.create_model(
        "ViT-Ti/4",
        image_size=8,
        num_classes=3,
        dim=16,
        depth=2,
        mlp_dim=16,
        heads=2,
        pooling="gap",
        cls_token=True,
        fc_norm=True,
    )
    params = params_of(model)
    ones = nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): jnp.ones(1) for path in params}
    )
    scaled, _ = scale_by_layer(0.5, VIT.layer(None)).update({"params": ones}, optax.EmptyState())
    scaled = nnx.traversals.flatten_mapping(scaled["params"])
    found = {"/".join(path): float(x[0]) for path, x in scaled.items()}
    theirs = {
        "cls": 0,
        "position_embedding": 0,
        "patch_embedding": 0,
        "blocks/00": 1,
        "blocks/01": 2,
    }
    for path, factor in found.items():
        layer = next((layer for start, layer in theirs.items() if path.startswith(start)), 3)
        assert factor == 0.5 ** (3 - layer), path
    assert {"cls", "fc_norm/scale", "head/kernel", "position_embedding/table"} <= found.keys()


def test_layer_decay_counts_no_layer_of_an_objective():
    weights = {
        "params": {"blocks": {f"{layer:02d}": {"kernel": jnp.ones(1)} for layer in range(2)}},
        "extra": {"objective": {"blocks": {"07": {"kernel": jnp.ones(1)}}, "mask": jnp.ones(1)}},
    }
    scaled, _ = scale_by_layer(0.5, VIT.layer(None)).update(weights, optax.EmptyState())
    blocks = scaled["params"]["blocks"]
    assert [float(blocks[layer]["kernel"][0]) for layer in ("00", "01")] == [0.25, 0.5]
    assert jax.tree.leaves(scaled["extra"]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "values", "factor"),
    [
        ("dino", {"dino.patch_weight": 1.0}, 0.5**3),
        ("masked_patch", {}, 0.5**3),
        # The decoder's token.
        ("mae", {"data.image_size": 16, "model.position": "sincos2d_mae"}, 1.0),
    ],
)
def test_the_mask_token_has_the_learning_rate_of_the_patch_embedding(name, values, factor):
    """As in `param_groups.py` of DINOv2 and DINOv3, whose backbones contain the mask token.

    The factor is 0.5 ** 3 because two layers and a head follow the patch embedding.
    """
    config = base_config()
    config.model.update(dict(name="ViT-Ti/4", dim=16, depth=2, mlp_dim=32, heads=2))
    config.data.image_size = 8
    set_objective(config, name)
    config.optimizer.update(
        dict(name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0, layer_decay=0.5)
    )
    config.optimizer.update(dict(learning_rate=1.0, schedule="constant", warmup_steps=0))
    config.update_from_flattened_dict(values)
    program = make_program(config, num_classes=0, steps=1000, mesh=make_mesh(config.mesh))
    weights = {part: program.state[part] for part in ("params", "extra")}
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), weights)
    updates, _ = program.optimizer.update(ones, program.optimizer.init(ones), ones)
    assert float(-updates["extra"]["objective"]["mask"].ravel()[0]) == factor
    assert float(-updates["params"]["patch_embedding"]["bias"][0]) == 0.5**3


def layers_of(**values) -> dict[str, float]:
    """Returns the layer of each weight of a tiny model, by path."""
    config = base_config()
    config.model.update(dict(name="ViT-Ti/4", dim=16, depth=2, mlp_dim=32, heads=2))
    config.data.image_size = 8
    config.update_from_flattened_dict(values)
    program = make_program(config, num_classes=5, steps=20_000, mesh=make_mesh(config.mesh))
    weights = {name: program.state[name] for name in ("params", "extra")}
    return {
        path_name(path): layer_of(VIT.layer(None), path_name(path))
        for path, _ in jax.tree.leaves_with_path(weights)
    }


def test_a_hybrids_resnet_belongs_to_the_layer_before_the_encoder():
    layers = layers_of(
        **{"model.name": "R50+ViT-Ti/16", "model.resnet_blocks": (1, 1), "data.image_size": 16}
    )
    assert {layer for path, layer in layers.items() if "resnet" in path} == {-1}


def test_row_and_column_layers_of_axial_attention_are_one():
    layers = layers_of(**{"model.attention": "axial", "model.pooling": "gap"})
    for part in ("row", "column"):
        found = [layers[f"params/blocks/{layer}/{part}/norm1/scale"] for layer in ("00", "01")]
        assert found == [0, 1]


def test_low_rank_changes_belong_to_the_layer_that_they_change():
    layers = layers_of(**{"finetune.train": "lora"})
    found = {path: layer for path, layer in layers.items() if path.startswith("extra/lora/")}
    assert len(found) == 8  # Two factors for each of two kernels in two layers.
    assert all(layer == int(path.split("blocks.")[1][:2]) for path, layer in found.items())


def test_positions_of_every_layer_belong_to_their_layer():
    layers = layers_of(**{"model.position_at": "every"})
    assert [layers[f"params/position_embedding/{layer}/table"] for layer in ("00", "01")] == [0, 1]
    assert layers_of()["params/position_embedding/table"] == -1


def test_layer_decay_of_a_model_without_layers_is_refused():
    with pytest.raises(UserError, match=r"optimizer.layer_decay = 0.5 .* a BiT has none; use 1"):
        layers_of(
            **{
                "model.name": "BiT-R50x1",
                "model.dim": None,
                "model.depth": None,
                "model.mlp_dim": None,
            },
            **{"model.heads": None, "optimizer.layer_decay": 0.5},
        )


def test_only_heads_train_in_the_frozen_steps():
    weights = {
        "params": {"head": {"kernel": jnp.ones(3)}, "blocks": {"kernel": jnp.ones(3)}},
        "extra": {},
    }
    config = settings(
        name="adam", learning_rate=0.1, weight_decay=0.1, warmup_steps=0, schedule="constant"
    )
    optimizer = make_optimizer(config, lambda t: 0.1, weight_decay=0.1, frozen_steps=3)
    state, moved = optimizer.init(weights), []
    for _ in range(5):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, weights), state, weights)
        moved.append({name: bool(np.any(x["kernel"])) for name, x in updates["params"].items()})
    assert [step["blocks"] for step in moved] == [False, False, False, True, True]
    assert all(step["head"] for step in moved)


def test_backbone_starts_later_than_its_head():
    """Equals EoMT's `two_stage_warmup_poly_schedule.py`, which counts steps from 0."""
    steps, frozen, warmup = 50, 5, 10
    config = OptimizerOptions(
        **dict(name="adam", learning_rate=0.1, weight_decay=0.0, warmup_steps=frozen),
        **dict(schedule="polynomial", power=0.9, count_from=0, clip_norm=0.0),
    )
    head = make_schedule(config, steps)
    backbone = make_backbone_schedule(config, steps, frozen, warmup)

    def theirs(step, start, rise):
        if step < start:
            return 0.0
        if step < start + rise:
            return 0.1 * (step - start) / rise
        return 0.1 * (1 - (step - start - rise) / (steps - start - rise)) ** 0.9

    for step in range(steps):
        assert float(head(step + 1)) == pytest.approx(theirs(step, 0, frozen), abs=1e-7)
        assert float(backbone(step + 1)) == pytest.approx(theirs(step, frozen, warmup), abs=1e-7)

    weights = {
        "params": {"head": {"kernel": jnp.ones(3)}, "blocks": {"kernel": jnp.ones(3)}},
        "extra": {"objective": {"decoder": {"kernel": jnp.ones(3)}}},
    }
    optimizer = make_optimizer(
        config, head, weight_decay=0.0, frozen_steps=frozen, backbone_schedule=backbone
    )
    state = optimizer.init(weights)
    for step in range(20):  # With a constant gradient, Adam's updates equal the learning rate.
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, weights), state, weights)
        own = updates["extra"]["objective"]["decoder"]["kernel"][0]
        moved = updates["params"]["blocks"]["kernel"][0]
        assert -float(own) == pytest.approx(theirs(step, 0, frozen), rel=1e-4, abs=1e-7)
        assert -float(moved) == pytest.approx(theirs(step, frozen, warmup), rel=1e-4, abs=1e-7)


def test_backbone_that_starts_after_the_run_is_refused():
    with pytest.raises(UserError, match="are not below the run's 10 steps"):
        make_backbone_schedule(OptimizerOptions(), 10, 5, 5)
