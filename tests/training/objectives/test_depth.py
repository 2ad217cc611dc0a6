"""Tests of depth estimation: heads, losses and metrics against PyTorch and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.objectives.small import SMALL, config_of, noisy
from vit_jax.config import check
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import depth_metrics
from vit_jax.models import create_model
from vit_jax.models.dense.depth import DPT, Fusion, doubled, even_layers
from vit_jax.models.dense.neck import Upsampling
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.depth import (
    depth_errors,
    gradient_losses,
    scale_invariant_losses,
)
from vit_jax.training.objectives.objective import EVALUATION, StepContext

LINEAR4 = dict(layers=4, class_token=True, normalize=False, upsample=4)


def depths(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns random depths from 0.5 to 12 m; a fifth of them are 0, which means unknown."""
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(0.5, 12, shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.2, 0, drawn).astype(np.float32)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(model: str = "ViT-Ti/4", head: str = "linear", train: str = "all", **values):
    """Returns a model and its depth objective, with noise added to all parameters."""
    config = config_of("depth", head=head, **dict(bins=16) | values)
    config.data.image_size, config.finetune.train = 16, train
    options = SMALL if "ViT" in model else dict(blocks=(1, 1, 1, 1), widths=(8, 16, 16, 24))
    size = 16 if "ViT" in model else 64
    backbone = create_model(model, num_classes=0, image_size=size, **options)
    objective = make_objective(config, backbone, rngs=nnx.Rngs(0), steps=100)
    return noisy(backbone, 1), noisy(objective, 2)


def batch_of(images: int = 3, size: int = 16) -> dict[str, jax.Array]:
    pixels = np.random.default_rng(5).integers(256, size=(images, size, size, 3), dtype=np.uint8)
    return {"image": jnp.asarray(pixels), "depth": jnp.asarray(depths(images, size, size))}


@nnx.jit
def losses_of(objective, model, batch, context=EVALUATION):
    return objective(model, batch, context)


@nnx.jit
def depth_of(objective, model, images):
    return objective.head(model, images)["depth"]


def sigloss(torch, predicted, true, scale_only):
    """Returns DINOv2's `SigLoss` over the known pixels of an image."""
    known = (true > 0) & (true <= 10)
    error = torch.log(predicted[known] + 0.001) - torch.log(true[known] + 0.001)
    variance = 0 if scale_only else torch.var(error)
    return torch.sqrt(variance + 0.15 * error.mean() ** 2)


def gradient_loss(torch, predicted, true):
    """Returns DINOv3's `GradientLogLoss` over the known pixels of an image."""
    total = 0
    for stride in (1, 2, 4, 6):
        p, t = predicted[::stride, ::stride], true[::stride, ::stride]
        known = ((t > 0) & (t <= 10)).float()
        error = (torch.log(p + 0.001) - torch.log(t + 0.001)) * known
        down = (error[:-2] - error[2:]).abs() * known[:-2] * known[2:]
        right = (error[:, :-2] - error[:, 2:]).abs() * known[:, :-2] * known[:, 2:]
        total = total + (down.sum() + right.sum()) / known.sum()
    return total


@pytest.mark.parametrize("scale_only", [False, True])
def test_losses_and_their_gradients_are_the_authors(torch, scale_only):
    true, predicted = depths(2, 13, 17), np.abs(floats(2, 13, 17)) + 0.1
    given = torch.tensor(predicted, requires_grad=True)
    theirs = [
        sigloss(torch, p, t, scale_only) + 0.5 * gradient_loss(torch, p, t)
        for p, t in zip(given, torch.tensor(true), strict=True)
    ]
    sum(theirs).backward()
    known = jnp.asarray((true > 0) & (true <= 10))

    def ours(predicted):
        errors = jnp.where(known, jnp.log(predicted + 0.001) - jnp.log(true + 0.001), 0)
        losses = scale_invariant_losses(errors, known, scale_only)
        losses += 0.5 * gradient_losses(errors, known)
        return losses.sum(), losses

    (_, losses), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(predicted))
    np.testing.assert_allclose(losses, [x.item() for x in theirs], rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad, rtol=1e-4, atol=1e-6)


def expectation(torch, scores):
    """Returns DINOv2's depth from scores of shape `[batch, bins, rows, columns]`."""
    weights = torch.relu(scores) + 0.1
    bins = torch.linspace(0.001, 10, scores.shape[1])
    return torch.einsum("ikmn,k->imn", weights / weights.sum(1, keepdim=True), bins)


def test_linear_head_on_four_layers_is_dinov2s(torch):
    """Equals DINOv2's head on four layers.

    It concatenates each patch with the class token, upsamples by 4, and applies a 1x1 convolution,
    whose outputs are scores of depth bins.
    """
    model, objective = made(**LINEAR4)
    head, images = objective.head, batch_of()["image"]
    _, captured = model(images, capture=("tokens",))
    grids = []
    for layer in even_layers(model.depth):
        tokens = torch.tensor(np.asarray(captured["tokens"][layer + 1]))
        patches = tokens[:, model.patch_tokens].reshape(len(tokens), *model.grid, -1)
        grids += [patches, tokens[:, :1, None].expand_as(patches)]
    x = torch.nn.functional.interpolate(
        torch.cat(grids, -1).permute(0, 3, 1, 2), scale_factor=4, mode="bilinear"
    )
    kernel = torch.tensor(np.asarray(head.classifier.kernel[...]).T[..., None, None])
    bias = torch.tensor(np.asarray(head.classifier.bias[...]))
    expected = expectation(torch, torch.nn.functional.conv2d(x, kernel, bias))
    np.testing.assert_allclose(head(model, images)["depth"], expected, rtol=1e-4)


def test_linear_head_with_norms_is_dinov3s(torch):
    """Equals DINOv3's head.

    It applies batch norm and a 1x1 convolution to the normalized patches of the last layer. The
    outputs are scores of depth bins.
    """
    model, objective = made()
    head, images = objective.head, batch_of()["image"]
    features = torch.tensor(np.asarray(model.features(images, dense=True))).permute(0, 3, 1, 2)
    scale, shift = (
        torch.tensor(np.asarray(x[...])) for x in (head.norms[0].scale, head.norms[0].bias)
    )
    normed = torch.nn.functional.batch_norm(features, None, None, scale, shift, training=True)
    kernel = torch.tensor(np.asarray(head.classifier.kernel[...]).T[..., None, None])
    bias = torch.tensor(np.asarray(head.classifier.bias[...]))
    expected = expectation(torch, torch.nn.functional.conv2d(normed, kernel, bias))
    outputs = head(model, images, nnx.Rngs(dropout=0))
    np.testing.assert_allclose(outputs["depth"], expected, rtol=1e-4)


def test_parts_of_dpt_are_pytorchs(torch):
    x, rngs = floats(2, 3, 5, 8), nnx.Rngs(0)
    given, call = torch.tensor(x.transpose(0, 3, 1, 2)), torch.nn.functional

    def weight(kernel, *axes):
        return torch.tensor(np.asarray(kernel[...]).transpose(axes))

    def twice(x):
        return call.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)

    def residual(part, x):
        for conv in (part.first, part.second):
            x = call.conv2d(call.relu(x), weight(conv.kernel, 3, 2, 0, 1), padding=1)
        return x

    np.testing.assert_allclose(
        doubled(jnp.asarray(x)).transpose(0, 3, 1, 2), twice(given), atol=1e-6
    )
    up = Upsampling(8, 6, 4, rngs=rngs)
    np.testing.assert_allclose(
        up(jnp.asarray(x)).transpose(0, 3, 1, 2),
        call.conv_transpose2d(given, weight(up.dense.kernel, 0, 3, 1, 2), stride=4),
        atol=1e-5,
    )
    block = noisy(Fusion(8, skips=True, dtype=jnp.float32, rngs=rngs))
    level = floats(2, 4, 5, 8, seed=1)
    added = call.interpolate(torch.tensor(level.transpose(0, 3, 1, 2)), (3, 5), mode="bilinear")
    fused = given + added + residual(block.skip, added)
    fused = twice(fused + residual(block.residual, fused))
    bias = torch.tensor(np.asarray(block.project.bias[...]))
    expected = call.conv2d(fused, weight(block.project.kernel, 1, 0)[..., None, None], bias)
    ours = block(jnp.asarray(x), jnp.asarray(level)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_dpt_is_of_sixteen_times_the_patches_resolution():
    model, objective = made(head="dpt", dim=8, class_token=True, normalize=False)
    assert isinstance(objective.head, DPT)
    depth = depth_of(objective, model, batch_of()["image"])
    assert depth.shape == (3, *(16 * side for side in model.grid))
    assert float(depth.min()) >= 0.001 and float(depth.max()) <= 10


def test_depth_without_bins_is_clipped_to_its_range_in_evaluation():
    model, objective = made(head="dpt", dim=8, class_token=True, normalize=False, bins=1)
    head, images = objective.head, batch_of()["image"]
    head.classifier.kernel[...] *= 10
    head.classifier.bias[...] = 8.0
    trained = np.asarray(head(model, images, nnx.Rngs(dropout=0))["depth"])
    assert trained.min() == np.float32(0.001) and trained.max() > 10
    np.testing.assert_allclose(head(model, images)["depth"], trained.clip(max=10), rtol=1e-4)


def test_unknown_and_far_pixels_have_no_part_in_the_loss():
    model, objective = made(gradient_weight=0.5)
    batch = batch_of()
    context = StepContext(state=objective.initial_state({}))
    true = batch["depth"]
    changed = jnp.where((true == 0) | (true > 10), jnp.where(true == 0, 11.0, 0.0), true)
    losses = [
        losses_of(objective, model, batch | {"depth": x}, context).each for x in (true, changed)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    outputs = losses_of(objective, model, batch | {"depth": jnp.zeros_like(true)}, context)
    assert not np.any(outputs.each) and not np.any(outputs.metrics["known_pixels"])
    assert "depth_scale" in objective.warning({"known_pixels": 0.0}, 1)
    assert objective.warning({"known_pixels": 0.1}, 1) is None


def test_first_steps_of_training_learn_the_scale_only():
    model, objective = made(scale_steps=2)
    batch, state = batch_of(), objective.initial_state({})
    first, second, third = (
        losses_of(objective, model, batch, StepContext(nnx.Rngs(dropout=0), state, update)).each
        for update in (1, 2, 3)
    )
    np.testing.assert_array_equal(first, second)
    assert (third > second).all()


def test_pictures_of_depth_are_lighter_for_near_pixels_and_black_for_unknown_ones():
    model, objective = made()
    batch = batch_of() | {"depth": jnp.tile(jnp.linspace(1, 9, 16), (3, 16, 1)).at[:, 0].set(0)}
    context = StepContext(state=objective.initial_state({}))
    true, predicted = objective.pictures(model, batch, context)
    assert true.shape == predicted.shape == (3, 16, 16, 3) and not true[:, 0].any()
    brightness = np.asarray(true[:, 1:].sum(-1))
    assert (np.diff(brightness) < 0).all() and brightness.min() < 20 < 600 < brightness.max()


def test_metrics_are_the_benchmarks_and_skip_images_without_depth():
    _, objective = made()
    true, predicted = depths(4, 9, 8), np.abs(floats(4, 9, 8)) * 3 + 0.1
    true[2] = 0
    known = (true > 0) & (true <= 10)
    found = depth_errors(jnp.asarray(predicted), jnp.asarray(true), jnp.asarray(known))
    means = objective.over_split({name: np.asarray(x) for name, x in found.items()})
    images = [depth_metrics(p, t) for p, t in zip(predicted, true, strict=True)]
    for name in ("rmse", "abs_rel", "delta1"):
        expected = np.mean([getattr(each, name) for each in images if each])
        assert means[name] == pytest.approx(expected, rel=1e-5)
    scores = objective.image_scores({name: np.asarray(x) for name, x in found.items()})
    rmse = [each.rmse if each else np.nan for each in images]
    np.testing.assert_allclose(scores.values, rmse, rtol=1e-5)
    # Images with the largest error come first.
    order = sorted((0, 1, 3), key=lambda image: -rmse[image])
    assert scores.worst(4).tolist() == order


def test_evaluation_of_an_image_does_not_depend_on_its_batch():
    model, objective = made()
    context = StepContext(state=objective.initial_state({}))
    batch = batch_of(4)
    whole = losses_of(objective, model, batch, context)
    part = losses_of(objective, model, {name: x[:2] for name, x in batch.items()}, context)
    np.testing.assert_allclose(part.each, whole.each[:2], rtol=1e-5)


def test_linear_head_reads_the_last_stage_of_a_pyramid():
    model, objective = made("ConvNeXt-T")
    assert depth_of(objective, model, batch_of(2, 64)["image"]).shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("ConvNeXt-T", dict(head="dpt"), "reads 4 layers of a ViT, and the model is a ConvNeXt"),
        ("ConvNeXt-T", dict(class_token=True), "class_token=True needs a class token"),
    ],
)
def test_heads_that_the_model_does_not_support(model, values, message):
    with pytest.raises(UserError, match=message):
        made(model, **values)


def test_the_range_of_depths_must_not_be_empty():
    config = config_of("depth", min_depth=10.0)
    config.model.name, config.epochs = "ViT-B/16", 1.0
    with pytest.raises(UserError, match="depth.max_depth.*above depth.min_depth = 10"):
        check(config)
