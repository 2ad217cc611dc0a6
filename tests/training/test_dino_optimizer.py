"""Tests of optimizer options of DINO and DINOv2 recipes, against PyTorch's AdamW and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.training.objectives.small import SMALL, config_of
from vit_jax.config import base_config, check
from vit_jax.errors import UserError
from vit_jax.models import abstract, family_of, model_factory
from vit_jax.models.vit import FAMILY as VIT
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.parallel.sharding import path_name
from vit_jax.training.objectives import handing_in
from vit_jax.training.objectives.dino import DINO
from vit_jax.training.objectives.objective import EVALUATION, Loss, Objective
from vit_jax.training.optimizer import clip_by_norm, make_optimizer
from vit_jax.training.program import make_program
from vit_jax.training.schedule import make_schedule, make_weight_decay

PLAIN = dict(
    name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0, schedule="constant", warmup_steps=0
)


def settings(**values):
    optimizer = base_config().optimizer
    optimizer.update(values)
    return optimizer


def tree_of(values: dict) -> dict:
    """Returns a nested tree, from values by path."""
    return nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): x for path, x in values.items()}
    )


def by_path(tree) -> dict:
    return {path_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


SHAPES = {
    "params/patch_embedding/kernel": (3, 4),
    "params/patch_embedding/bias": (4,),
    "params/blocks/00/mlp/fc1/kernel": (4, 8),
    "extra/objective/head/layers/0/kernel": (4, 6),
    "extra/objective/head/prototypes": (6, 10),
    "extra/objective/mask": (4, 1),
}


def draw(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    # The norms are very different, so that some gradients are clipped.
    return {
        path: (rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 1)).astype(np.float32)
        for path, shape in SHAPES.items()
    }


@pytest.mark.parametrize("of", ["tensor", "module"])
@pytest.mark.parametrize("count_from", [0, 1])
def test_updates_are_those_of_the_authors_loops_in_pytorch(torch, of, count_from):
    steps, held, decays, rates = 12, 3, (0.04, 0.4), (1e-2, 1e-6)
    config = settings(
        **dict(
            learning_rate=rates[0],
            end_learning_rate=rates[1],
            warmup_steps=0,
            count_from=count_from,
        ),
        **dict(weight_decay=decays[0], weight_decay_end=decays[1], decay="matrices"),
        **dict(clip=of, clip_norm=3.0, embedding_rate=0.2),
    )
    schedule, decay = make_schedule(config, steps), make_weight_decay(config, steps)
    optimizer = make_optimizer(
        config,
        schedule,
        weight_decay=decay,
        embedding=VIT.embedding,
        frozen_prefixes={"head/prototypes": held},
    )
    weights = jax.tree.map(jnp.asarray, tree_of(draw(0)))
    state, update = optimizer.init(weights), jax.jit(optimizer.update)

    theirs = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in draw(0).items()}
    modules = {"params/": [], "extra/objective/head": [], "extra/objective/mask": []}
    for start, inside in modules.items():
        inside += [x for path, x in theirs.items() if path.startswith(start)]
    adam = torch.optim.AdamW([{"params": [x], "path": path} for path, x in theirs.items()])
    progress = (np.arange(steps) + count_from) / steps
    rate, weight_decay = (
        end + 0.5 * (first - end) * (1 + np.cos(np.pi * progress)) for first, end in (rates, decays)
    )
    for step in range(steps):
        gradients = draw(step + 1)
        updates, state = update(jax.tree.map(jnp.asarray, tree_of(gradients)), state, weights)
        weights = optax.apply_updates(weights, updates)
        for group in adam.param_groups:
            factor = 0.2 if "patch_embedding" in group["path"] else 1.0
            group["lr"] = (
                0.0 if "prototypes" in group["path"] and step < held else rate[step] * factor
            )
            group["weight_decay"] = 0.0 if group["path"].endswith("bias") else weight_decay[step]
        for path, x in theirs.items():
            x.grad = torch.tensor(gradients[path])
        for part in [[x] for x in theirs.values()] if of == "tensor" else modules.values():
            torch.nn.utils.clip_grad_norm_(part, 3.0)
        adam.step()
        for path, found in by_path(weights).items():
            np.testing.assert_allclose(
                found, theirs[path].detach(), rtol=1e-4, atol=1e-5, err_msg=path
            )


def test_weight_decay_follows_half_a_cosine():
    config = settings(weight_decay=0.04, weight_decay_end=0.4, warmup_steps=50)
    decay = make_weight_decay(config, 100)
    found = [float(decay(t)) for t in (25, 50, 100)]
    np.testing.assert_allclose(found, [0.4 - 0.36 * (1 + 0.5**0.5) / 2, 0.22, 0.4], rtol=1e-5)
    config.count_from = (
        0  # As in DINO's utils.py: cosine_scheduler(0.04, 0.4, epochs=10, niter_per_ep=10).
    )
    theirs = {1: 0.04, 2: 0.0400888, 26: 0.0927208, 51: 0.22, 100: 0.3999112}
    for t, expected in theirs.items():
        assert float(make_weight_decay(config, 100)(t)) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("coupled", [False, True])
def test_weight_decay_is_multiplied_by_the_learning_rate(coupled):
    config = settings(**PLAIN | dict(weight_decay=0.0), learning_rate=0.5, end_learning_rate=0.1)
    config.update(dict(schedule="linear", coupled_decay=coupled, weight_decay_end=0.2))
    optimizer = make_optimizer(
        config, make_schedule(config, 4), weight_decay=make_weight_decay(config, 4)
    )
    weights = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    state, zero, expected = optimizer.init(weights), jax.tree.map(jnp.zeros_like, weights), 1.0
    for t in range(1, 5):
        updates, state = optimizer.update(zero, state, weights)
        weights = optax.apply_updates(weights, updates)
        expected *= 1 - (0.5 - 0.1 * t) * 0.2 * (1 - np.cos(np.pi * t / 4)) / 2
        np.testing.assert_allclose(weights["layer"]["kernel"], expected, rtol=1e-6)
    np.testing.assert_array_equal(weights["layer"]["bias"], 1)


@pytest.mark.parametrize(
    ("of", "parts"),
    [
        ("global", [list(SHAPES)]),
        ("tensor", [[path] for path in SHAPES]),
        ("module", [list(SHAPES)[:3], list(SHAPES)[3:5], list(SHAPES)[5:]]),
    ],
)
def test_each_part_is_clipped_by_its_own_norm(of, parts):
    gradients = draw(7)
    norms = [np.sqrt(sum(np.square(gradients[path]).sum() for path in part)) for part in parts]
    highest = float(np.median(norms)) * 0.9
    found, _ = clip_by_norm(highest, of).update(tree_of(gradients), optax.EmptyState())
    found = by_path(found)
    for part, norm in zip(parts, norms, strict=True):
        for path in part:
            np.testing.assert_allclose(
                found[path], gradients[path] * min(1, highest / norm), rtol=1e-5
            )
    assert max(norms) > highest and (of == "global" or min(norms) < highest)


def test_low_rank_changes_are_clipped_with_the_model():
    path = "extra/lora/blocks.00.attention.out.kernel/up"
    gradients = tree_of({"params/head/kernel": jnp.array([3.0]), path: jnp.array([4.0])})
    found, _ = clip_by_norm(1.0, "module").update(gradients, optax.EmptyState())
    np.testing.assert_allclose([*by_path(found).values()], [[0.8], [0.6]], rtol=1e-5)


# `lr_multiplier` of dinov2/utils/param_groups.py for 24 blocks, a layer decay of 0.9 and a factor
# of 0.2 for the patch embedding. The keys are our names; the comments are theirs.
MULTIPLIERS = {
    "params/cls": 0.0717897987691853,  # cls_token
    "params/position_embedding/table": 0.0717897987691853,  # pos_embed
    "params/register_tokens": 0.0717897987691853,
    "params/patch_embedding/kernel": 0.0717897987691853 * 0.2,  # patch_embed.proj.weight
    "params/patch_embedding/bias": 0.0717897987691853 * 0.2,
    "params/patch_norm/scale": 0.0717897987691853 * 0.2,  # patch_embed.norm.weight
    "params/blocks/00/norm1/scale": 0.07976644307687256,
    "params/blocks/11/mlp/fc1/kernel": 0.2541865828329001,
    "params/blocks/23/scale2": 0.9,  # blocks.23.ls2.gamma
    "params/norm/scale": 1.0,
    "extra/objective/head/prototypes": 1.0,  # last_layer.weight_v
    "extra/objective/mask": 0.0717897987691853,  # mask_token
    "extra/objective/patch_embedding/kernel": 1.0,
}


def test_learning_rates_of_layers_and_of_the_patch_embedding_are_dinov2s():
    ones = tree_of({path: jnp.ones(1) for path in MULTIPLIERS})
    config = settings(**PLAIN, layer_decay=0.9, embedding_rate=0.2, learning_rate=1.0)
    optimizer = make_optimizer(
        config,
        lambda t: 1.0,
        weight_decay=0.0,
        layer=VIT.layer(None),
        embedding=VIT.embedding,
        stem=DINO.stem,
    )
    updates, _ = optimizer.update(ones, optimizer.init(ones), ones)
    for path, found in by_path(updates).items():
        assert -found[0] == pytest.approx(MULTIPLIERS[path], rel=1e-6), path


@pytest.mark.parametrize("name", ["ViT-Ti/4", "Swin-T"])
def test_a_patch_embedding_has_the_projection_and_its_norm(name):
    options = dict(stem_norm="patches") if name.startswith("ViT") else {}
    model = abstract(model_factory(name, num_classes=3, image_size=224, **options))
    first = {
        path.split("/")[0]
        for path in by_path(jax.tree.map(lambda x: 0, nnx.to_pure_dict(nnx.state(model))))
    }
    assert set(family_of(model).embedding) <= first


def test_a_learning_rate_of_a_missing_patch_embedding_is_refused():
    config = config_of("classification")
    config.model.update(dict(name="BiT-R50x1", resnet_blocks=(1, 1)))
    config.optimizer.update(PLAIN | dict(embedding_rate=0.2))
    with pytest.raises(UserError, match=r"optimizer.embedding_rate = 0.2 .* a BiT has none; use 1"):
        make_program(config, num_classes=5, steps=10, mesh=make_mesh(config.mesh))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip": "tensor", "clip_norm": 0.0}, "'global' with optimizer.clip_norm=0"),
        ({"embedding_rate": 0.2}, "1 with finetune.train='head'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(values, words):
    config = base_config()
    config.steps, config.finetune.train = 10, "head"
    config.optimizer.update(values)
    with pytest.raises(
        UserError, match=f"config.optimizer.{next(iter(values))} is .* and must be {words}"
    ):
        check(config)


@pytest.mark.parametrize("name", ["adam", "adafactor", "muon"])
def test_new_options_change_no_state_of_a_run_that_does_not_use_them(name):
    weights = {"params": {"head": {"kernel": jnp.ones((4, 4))}}}
    config = settings(name=name)
    state = make_optimizer(config, lambda t: 1.0, weight_decay=config.weight_decay).init(weights)
    clip, update_rule, decay, layer, rate = state
    assert (clip, decay.inner_state, layer) == (optax.EmptyState(),) * 3
    assert list(by_path(rate)) == ["count"]


class Holding(Objective):
    """An objective with labels that trains a factor and a shift, and freezes some of them."""

    labels = True
    holds = {"head/factor": 2}

    def __init__(self):
        self.head = nnx.Dict(factor=nnx.Param(jnp.ones(5)), shift=nnx.Param(jnp.zeros(5)))

    @classmethod
    def make(cls, config, model, steps, rngs):
        return cls()

    def frozen_prefixes(self):
        return self.holds

    def __call__(self, model, batch, now=EVALUATION):
        said = (1 + model(batch["image"], now.rngs)) * self.head["factor"][...] + self.head[
            "shift"
        ][...]
        return Loss(jnp.square(said - batch["labels"]).sum(-1))


def program_of(objective: type[Objective], **optimizer):
    config = config_of(objective.__name__)
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    config.optimizer.update(
        dict(schedule="constant", warmup_steps=0, learning_rate=0.01) | optimizer
    )
    config.batch_size, config.data.image_size = 8, 8
    return make_program(config, num_classes=5, steps=10, mesh=make_mesh(config.mesh))


@pytest.fixture
def handed_in():
    with handing_in(Holding):
        yield


@pytest.mark.usefixtures("handed_in")
def test_frozen_parameters_of_an_objective_stay_while_their_moments_are_updated():
    program = program_of(Holding, decay="all", weight_decay=0.5, clip="module", embedding_rate=0.0)
    images = np.random.default_rng(0).integers(256, size=(8, 8, 8, 3), dtype=np.uint8)
    batch = to_devices({"image": images, "labels": np.full((8, 1), 3, np.int32)}, program.mesh)
    state, metrics = program.initial_state(0), program.initial_metrics()
    before = jax.device_get(state["params"])
    factors, shifts, moments = [], [], []
    for _ in range(3):
        state, metrics = program.train_step(state, metrics, batch)
        own = jax.device_get(state["extra"]["objective"]["head"])
        factors.append(own["factor"][0])
        shifts.append(own["shift"][0])
        moments.append(by_path(state["optimizer"][1].mu)["extra/objective/head/factor"][0])
    assert factors[:2] == [1, 1] and factors[2] != 1
    assert len({0.0, *shifts}) == 4 and len({0.0, *moments}) == 4
    after = jax.device_get(state["params"])
    np.testing.assert_array_equal(
        after["patch_embedding"]["kernel"], before["patch_embedding"]["kernel"]
    )
    assert (after["cls"] != before["cls"]).all()


@pytest.mark.parametrize("start", ["tail", "head/fac", "head/factor/kernel"])
def test_an_objective_that_freezes_missing_parameters_is_refused(start):
    kind = type("HoldingOther", (Holding,), {"holds": {start: 1}})
    with (
        handing_in(kind),
        pytest.raises(
            UserError,
            match=f"freezes '{start}', which is not a part of its parameters: head",
        ),
    ):
        program_of(kind)
