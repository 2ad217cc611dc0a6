"""Tests of EoMT against Transformers' model and loss, with equal parameters, points and masks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.optimize import linear_sum_assignment

from tests.training.objectives.mask2former import ALLOWED, GOLDEN, Trial, difference, ours
from tests.training.objectives.small import prepare
from tests.training.objectives.test_segmentation import CLASSES, floats, masks
from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.load import load_model
from vit_jax.models import create_model
from vit_jax.models.dense.eomt import EoMT, Masking, mask_probabilities
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.mask_losses import (
    Points,
    Weights,
    draw_points,
    image_losses,
    matching_costs,
    sample,
    set_losses,
    targets_of,
)
from vit_jax.training.objectives.matching import match
from vit_jax.training.objectives.objective import StepContext

IMAGES, QUERIES, POINTS, LAYERS = 3, 7, 48, 2


def drawn(points: int = POINTS) -> Points:
    """Draws random points for each image."""
    keys = jax.random.split(jax.random.key(3), IMAGES)
    return jax.vmap(lambda key: draw_points(key, points))(keys)


def targets(mask, most: int = QUERIES):
    return jax.vmap(lambda one: targets_of(one, CLASSES, most))(jnp.asarray(mask))


@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (1, 5), (12, 30)])
def test_matching_has_the_least_cost(shape):
    costs = floats(6, *shape)
    valid = np.random.default_rng(1).random((6, shape[0])) < 0.7
    found = np.asarray(jax.jit(match)(costs, valid))
    for cost, chosen, own in zip(costs, found, valid, strict=True):
        rows, columns = linear_sum_assignment(cost[own])
        assert len(set(chosen.tolist())) == len(chosen)
        np.testing.assert_array_equal(chosen[own][rows], columns)


def test_matching_ends_with_costs_that_are_not_finite():
    costs = np.array([[[np.nan, 1, np.inf], [2, np.nan, -np.inf]]], np.float32)
    assert len(set(np.asarray(match(jnp.asarray(costs), np.ones((1, 2), bool)))[0].tolist())) == 2


@pytest.mark.parametrize("each", [False, True])
def test_points_are_sampled_as_by_grid_sample(torch, each):
    maps = floats(4, 5, 7)
    points = np.random.default_rng(2).random((4, 30, 2) if each else (30, 2), dtype=np.float32)
    whole = torch.tensor(np.broadcast_to(points, (4, 30, 2)).copy())
    theirs = torch.nn.functional.grid_sample(
        torch.tensor(maps)[:, None], 2 * whole[:, :, None] - 1, align_corners=False
    )
    ours = sample(jnp.asarray(maps), jnp.asarray(points))
    np.testing.assert_allclose(ours, theirs[:, 0, :, 0], atol=1e-5)


def test_targets_are_the_largest_classes():
    mask = masks(9, 9)
    areas = np.bincount(mask.ravel(), minlength=256)[:CLASSES]
    found = targets_of(jnp.asarray(mask), CLASSES, 3)
    assert found.labels.tolist() == np.argsort(-areas, kind="stable")[:3].tolist()
    none = targets_of(jnp.full((9, 9), 255, jnp.uint8), CLASSES, 3)
    assert not none.valid.any()


@pytest.fixture
def criterion(torch, transformers, monkeypatch):
    """Returns the EoMT loss of Transformers, which uses our random points instead of its own."""
    from transformers.models.eomt import modeling_eomt

    config = transformers.EomtConfig(num_labels=CLASSES, train_num_points=POINTS)
    weights = {"loss_cross_entropy": 2.0, "loss_mask": 5.0, "loss_dice": 5.0}
    loss = modeling_eomt.EomtLoss(config, weights)

    def run(logits, classes, mask, points):
        """Returns the weighted loss of a batch.

        The points are used in the order in which Transformers draws them: for each image's
        matching, then for all losses.
        """
        labels = [sorted({*one.ravel().tolist()} - {255}) for one in mask]
        counts = [len(one) for one in labels]
        queue = [np.asarray(one)[None] for one in points.matched]

        def of_masks(values):
            return np.concatenate(
                [np.broadcast_to(x, (n, *x.shape)) for x, n in zip(values, counts, strict=True)]
            )

        queue += [of_masks(np.asarray(x)) for x in (points.candidates, points.others)]

        def rand(*shape, device=None):
            values = torch.tensor(queue.pop(0).copy())
            assert values.shape == shape
            return values

        monkeypatch.setattr(modeling_eomt.torch, "rand", rand)
        found = loss(
            logits,
            classes,
            [
                torch.tensor(np.stack([one == c for c in own]).astype(np.float32))
                for one, own in zip(mask, labels, strict=True)
            ],
            [torch.tensor(own) for own in labels],
        )
        monkeypatch.undo()
        return sum(weights[name] * value for name, value in found.items())

    return run


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_loss_and_gradients_are_those_of_transformers(torch, criterion, scale):
    """Equal for images with different numbers of masks, and for large logits (`scale` of 30)."""
    logits, classes = scale * floats(IMAGES, QUERIES, 6, 5), floats(IMAGES, QUERIES, CLASSES + 1)
    mask = masks(IMAGES, 12, 10)
    mask[1] = np.where(mask[1] > 2, 255, mask[1])
    points = drawn()
    given = [torch.tensor(x, requires_grad=True) for x in (logits, classes)]
    loss = criterion(*given, mask, points)
    loss.backward()
    found = targets(mask)
    count = jnp.full(IMAGES, found.valid.sum(-1).mean())

    def ours(logits, classes):
        return set_losses(logits, classes, found, points, count, Weights()).mean()

    value, gradients = jax.value_and_grad(ours, (0, 1))(jnp.asarray(logits), jnp.asarray(classes))
    assert float(value) == pytest.approx(loss.item(), rel=1e-4)
    for gradient, theirs in zip(gradients, given, strict=True):
        expected = theirs.grad.numpy()
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("number", "expected"), enumerate(json.loads(GOLDEN.read_text())))
def test_loss_and_gradients_equal_those_of_mask2formers_code(number, expected):
    assert difference(ours(Trial(number)), expected) < ALLOWED


def test_losses_are_those_of_plain_numpy():
    """Matching costs, and the losses of a given matching, equal a loop over pairs in NumPy."""
    logits, classes, mask = floats(QUERIES, 6, 5), floats(QUERIES, CLASSES + 1), masks(12, 10)
    points = jax.tree.map(lambda x: x[0], drawn())
    found = jax.jit(targets_of, static_argnums=(1, 2))(mask, CLASSES, QUERIES)

    def bilinear(image, place):
        x, y = place[0] * image.shape[1] - 0.5, place[1] * image.shape[0] - 0.5
        total = 0.0
        for row in (int(np.floor(y)), int(np.floor(y)) + 1):
            for column in (int(np.floor(x)), int(np.floor(x)) + 1):
                if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                    total += (1 - abs(y - row)) * (1 - abs(x - column)) * image[row, column]
        return total

    def losses(query, label, places):
        x = np.array([bilinear(logits[query], place) for place in places])
        t = np.array([bilinear((mask == label).astype(float), place) for place in places])
        p = 1 / (1 + np.exp(-x))
        entropy = -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean()
        return entropy, 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    shares = np.exp(classes) / np.exp(classes).sum(-1, keepdims=True)
    costs = jax.jit(matching_costs)(logits, classes, found, points.matched, Weights())
    for target in (0, 2):
        label = int(found.labels[target])
        entropy, dice = losses(3, label, np.asarray(points.matched))
        expected = 5 * entropy + 5 * dice - 2 * shares[3, label]
        assert float(costs[target, 3]) == pytest.approx(expected, rel=1e-4)

    matched = np.arange(QUERIES)[::-1][: len(found.labels)]
    sums = jax.jit(image_losses)(logits, classes, found, matched, points, 0.1)
    expected, labels = np.zeros(2), np.full(QUERIES, CLASSES)
    for query, label in zip(matched, found.labels.tolist(), strict=True):
        labels[query] = label
        certain = [abs(bilinear(logits[query], x)) for x in np.asarray(points.candidates)]
        chosen = np.asarray(points.candidates)[np.argsort(certain)[: POINTS * 3 // 4]]
        places = np.concatenate([chosen, np.asarray(points.others)])
        expected += losses(query, label, places)
    np.testing.assert_allclose([sums.mask, sums.dice], expected, rtol=1e-4)
    weighted = -np.log(shares[np.arange(QUERIES), labels]) * np.where(labels == CLASSES, 0.1, 1)
    assert float(sums.classes) == pytest.approx(weighted.sum(), rel=1e-5)


def copied(torch, theirs, ours):
    """Copies the random parameters of our head to the model of Transformers."""

    def linear(layer, own):
        layer.weight.copy_(torch.tensor(np.asarray(own.kernel[...]).T))
        layer.bias.copy_(torch.tensor(np.asarray(own.bias[...])))

    with torch.no_grad():
        theirs.query.weight.copy_(torch.tensor(np.asarray(ours.queries[...])))
        linear(theirs.class_predictor, ours.classifier)
        head = theirs.mask_head
        for layer, own in zip((head.fc1, head.fc2, head.fc3), ours.mask_mlp, strict=True):
            linear(layer, own)
        for layer, own in zip(theirs.upscale_block.block, ours.upscale, strict=True):
            layer.conv1.weight.copy_(
                torch.tensor(np.asarray(own.expand.kernel[...]).transpose(0, 3, 1, 2))
            )
            # Transposed convolutions in PyTorch have one bias for all four output pixels; ours has
            # four.
            own.expand.bias[...] = jnp.broadcast_to(own.expand.bias[...][:1, :1], (2, 2, 32))
            layer.conv1.bias.copy_(torch.tensor(np.asarray(own.expand.bias[0, 0])))
            layer.conv2.weight.copy_(
                torch.tensor(np.asarray(own.kernel[...]).transpose(3, 2, 0, 1))
            )
            layer.layernorm2d.weight.copy_(torch.tensor(np.asarray(own.norm.scale[...])))
            layer.layernorm2d.bias.copy_(torch.tensor(np.asarray(own.norm.bias[...])))


@pytest.mark.parametrize("probability", [1.0, 0.0])
def test_model_is_that_of_transformers(torch, transformers, tmp_path, probability):
    """The outputs equal those of Transformers, with and without masked attention.

    The backbone is a DINOv3, whose rotary position embedding is not applied to the queries.
    """
    sizes = dict(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
        intermediate_size=64,
        num_register_tokens=2,
        layerscale_value=0.7,
    )
    torch.manual_seed(0)
    backbone = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes))
    with torch.no_grad():
        for value in backbone.parameters():
            value.add_(0.1 * torch.randn_like(value))
    backbone.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    config = transformers.EomtDinov3Config(
        **sizes, num_labels=CLASSES, num_queries=QUERIES, num_blocks=LAYERS, num_upscale_blocks=2
    )
    theirs = transformers.EomtDinov3ForUniversalSegmentation(config).eval()
    state = {
        name.removeprefix("model.").replace("layer.", "layers.", 1).replace("norm.", "layernorm.")
        if not name.startswith("embeddings")
        else name: value
        for name, value in backbone.state_dict().items()
    }
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    unmatched = [x for x in missing if x.split(".")[0] in ("layers", "layernorm", "embeddings")]
    assert not unmatched and {*unexpected} <= {"embeddings.mask_token"}, (unmatched, unexpected)
    head = EoMT(ours, CLASSES, queries=QUERIES, layers=LAYERS, rngs=nnx.Rngs(0))
    copied(torch, theirs, head)
    theirs.attn_mask_probs.fill_(probability)
    pixels = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(pixels.transpose(0, 3, 1, 2)))
    ours.normalize = lambda images: jnp.asarray(images)  # These images are already normalized.
    masking = Masking(jnp.full(LAYERS, probability), jnp.zeros((2, LAYERS, QUERIES)))
    found = jax.jit(lambda images: head(ours, images, masking=masking))(pixels)
    assert found["masks"].shape[0] == LAYERS + 1
    for key, value in (
        ("masks", expected.masks_queries_logits),
        ("classes", expected.class_queries_logits),
    ):
        error = np.abs(found[key][-1] - value.numpy()).max()
        assert error < 1e-4 * np.abs(value.numpy()).max()
    if not probability:  # Without masks, inference has the same outputs.
        plain = head(ours, pixels)
        np.testing.assert_allclose(plain["masks"][-1], found["masks"][-1], atol=1e-4)


def test_probability_of_masks_falls_layer_by_layer():
    """Equals `mask_annealing` of the authors' `lightning_module.py`, which counts steps from 0."""
    starts, ends, steps = (0.0, 0.2, 0.5), (0.15, 0.5, 1.0), 200

    def theirs(start, current, final):
        if current < start:
            return 1.0
        return 0.0 if current >= final else (1 - (current - start) / (final - start)) ** 0.9

    for update in (1, 2, 30, 31, 41, 80, 101, 199, 200):
        expected = [
            theirs(round(a * steps), update - 1, round(b * steps))
            for a, b in zip(starts, ends, strict=True)
        ]
        found = mask_probabilities(update, starts, ends, steps)
        np.testing.assert_allclose(found, expected, atol=1e-6)


SMALL = dict(dim=32, depth=3, mlp_dim=64, heads=2)


def made(name: str = "ViT-Ti/4", options=None, **values):
    config = base_config()
    given = dict(head="eomt", queries=QUERIES, query_layers=LAYERS, points=POINTS)
    given |= dict(masked_until=(0.0, 0.5), unmasked_from=(0.5, 1.0))
    config.objective.name = "segmentation"
    config.segmentation.update(given | values)
    config.data.num_classes, config.data.image_size = CLASSES, 16
    model = create_model(name, num_classes=0, image_size=16, **SMALL | (options or {}))
    return model, make_objective(config, model, rngs=nnx.Rngs(0), steps=100)


def batch_of(images: int = 4) -> dict[str, jax.Array]:
    pixels = np.random.default_rng(5).integers(256, size=(images, 16, 16, 3), dtype=np.uint8)
    return {"image": jnp.asarray(pixels), "mask": jnp.asarray(masks(images, 16, 16))}


@pytest.mark.slow
def test_micro_batches_have_the_loss_of_the_batch():
    """The number of masks and the random points do not depend on how the batch is divided."""
    model, objective = made()
    keys = jax.random.split(jax.random.key(0), 4)
    batch = batch_of()
    batch["mask"] = batch["mask"].at[0, :12].set(1)
    batch = prepare(objective, batch, keys)

    @jax.jit
    def losses(batch):
        return objective(model, batch, StepContext(nnx.Rngs(dropout=0), update=60)).each

    whole = losses(batch)
    halves = slice(0, 2), slice(2, 4)
    parts = [losses({name: x[rows] for name, x in batch.items()}) for rows in halves]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5)


@pytest.mark.slow
def test_evaluation_of_an_image_does_not_depend_on_its_batch():
    model, objective = made()
    keys = jax.random.split(jax.random.key(0), 4)
    batch = objective.prepare(batch_of(), keys)
    part = objective.prepare({name: x[:2] for name, x in batch_of().items()}, keys[:2])
    context = StepContext(update=60)
    whole, some = (objective(model, one, context) for one in (batch, part))
    np.testing.assert_allclose(some.each, whole.each[:2], rtol=1e-5)
    np.testing.assert_array_equal(some.outputs["areas"], whole.outputs["areas"][:2])


@pytest.mark.slow
def test_gradients_are_finite_in_bfloat16():
    model, objective = made(options=dict(dtype="bfloat16"))
    batch = prepare(objective, batch_of(), jax.random.split(jax.random.key(0), 4))
    graphdef, weights = nnx.split((model, objective))

    def loss(weights):
        model, objective = nnx.merge(graphdef, weights)
        context = StepContext(nnx.Rngs(dropout=0), update=60)
        return objective(model, batch, context).each.mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(weights)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert np.abs(gradient[1]["head"]["queries"][...]).max() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(position="relative"), "adds queries to a plain ViT"),
        (dict(depth=1), "query_layers = 2 must be at most the model's 1 layers"),
    ],
)
def test_models_without_place_for_queries(options, words):
    with pytest.raises(UserError, match=words):
        made(options=options)
