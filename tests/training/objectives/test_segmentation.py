"""Tests of semantic segmentation: heads, losses and metrics against PyTorch and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.objectives.small import SMALL, config_of, noisy
from vit_jax.data.fields import IGNORED
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics
from vit_jax.models import create_model
from vit_jax.models.dense.batch_norm import (
    BatchNorm,
    Statistics,
    initial_statistics,
    updated_statistics,
)
from vit_jax.models.dense.pyramid import resized
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.objective import StepContext
from vit_jax.training.objectives.segmentation import class_areas, pixel_losses

CLASSES = 5


def masks(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns random class masks; a fifth of the pixels is ignored."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(CLASSES, size=shape, dtype=np.uint8)
    return np.where(rng.random(shape) < 0.2, np.uint8(IGNORED), drawn)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(head: str = "linear", model: str = "ViT-Ti/4", train: str = "all", **values):
    """Returns a model and its objective, with noise added to all parameters."""
    config = config_of("segmentation", head=head, **values)
    config.data.num_classes, config.data.image_size, config.finetune.train = CLASSES, 16, train
    options = SMALL if "ViT" in model else dict(blocks=(1, 1, 1, 1), widths=(8, 16, 16, 24))
    size = 16 if "ViT" in model else 64
    backbone = create_model(model, num_classes=0, image_size=size, **options)
    objective = make_objective(config, backbone, rngs=nnx.Rngs(0), steps=100)
    return noisy(backbone, 1), noisy(objective, 2)


def batch_of(images: int = 3, size: int = 16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(5)
    pixels = rng.integers(256, size=(images, size, size, 3), dtype=np.uint8)
    return {"image": jnp.asarray(pixels), "mask": jnp.asarray(masks(images, size, size))}


def test_batch_norm_is_pytorchs(torch):
    x, gradient = floats(4, 3, 5, 6), floats(4, 3, 5, 6, seed=1)
    theirs = torch.nn.BatchNorm2d(6)
    norm = noisy(BatchNorm("norm", 6))
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(np.asarray(norm.scale[...])))
        theirs.bias.copy_(torch.tensor(np.asarray(norm.bias[...])))
    given = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    out = theirs(given)
    out.backward(torch.tensor(gradient.transpose(0, 3, 1, 2)))

    def forward(x):
        statistics = Statistics()
        return norm(x, statistics), statistics.moments

    ours, backward, moments = jax.vjp(forward, x, has_aux=True)
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), out.detach(), atol=1e-5)
    np.testing.assert_allclose(
        backward(jnp.asarray(gradient))[0].transpose(0, 3, 1, 2), given.grad, atol=1e-5
    )
    running = updated_statistics(initial_statistics(nnx.Dict(norm=norm)), moments)
    np.testing.assert_allclose(running["norm"]["mean"], theirs.running_mean, atol=1e-6)
    np.testing.assert_allclose(running["norm"]["variance"], theirs.running_var, rtol=1e-5)
    after = theirs.eval()(given).detach()
    np.testing.assert_allclose(norm(x, Statistics(running)).transpose(0, 3, 1, 2), after, atol=1e-5)


def test_loss_is_pytorchs_of_resized_scores(torch):
    scores, mask = floats(2, 4, 5, CLASSES), masks(2, 13, 17)
    given = torch.tensor(scores.transpose(0, 3, 1, 2), requires_grad=True)
    whole = torch.nn.functional.interpolate(given, mask.shape[1:], mode="bilinear")
    loss = torch.nn.functional.cross_entropy(
        whole, torch.tensor(mask.astype(np.int64)), ignore_index=IGNORED, reduction="none"
    ).mean()
    loss.backward()

    def ours(scores):
        return pixel_losses(resized(scores, mask.shape[1:]), jnp.asarray(mask)).mean()

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(scores))
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(gradient.transpose(0, 3, 1, 2), given.grad, atol=1e-7)


def test_areas_are_counts_of_pixels():
    predicted, mask = np.random.default_rng(3).integers(CLASSES, size=(3, 9, 8)), masks(3, 9, 8)
    areas = np.asarray(class_areas(jnp.asarray(predicted), jnp.asarray(mask), CLASSES))
    for image in range(3):
        known = mask[image] != IGNORED
        for label in range(CLASSES):
            p, t = (predicted[image] == label) & known, mask[image] == label
            assert areas[image, label].tolist() == [(p & t).sum(), p.sum(), t.sum()]


def test_iou_of_a_split_is_over_all_its_pixels():
    """Classes that occur neither in the masks nor in the predictions do not count."""
    _, objective = made()
    rng = np.random.default_rng(0)
    predicted, mask = rng.integers(CLASSES - 1, size=(4, 8, 8)), masks(4, 8, 8) % (CLASSES - 1)
    mask = np.where(masks(4, 8, 8) == IGNORED, IGNORED, mask)
    areas = class_areas(jnp.asarray(predicted), jnp.asarray(mask), CLASSES)
    found = objective.over_split({"areas": np.asarray(areas)})
    known = mask != IGNORED
    ious = [
        ((predicted == c) & (mask == c)).sum() / (((predicted == c) & known) | (mask == c)).sum()
        for c in range(CLASSES - 1)
    ]
    assert found["miou"] == pytest.approx(np.mean(ious))
    assert found["pixel_accuracy"] == pytest.approx((predicted == mask)[known].mean())


def test_scores_of_images_are_their_own_mean_iou():
    _, objective = made()
    predicted, mask = np.random.default_rng(3).integers(CLASSES - 1, size=(3, 9, 8)), masks(3, 9, 8)
    predicted, mask = predicted % [[[2]], [[3]], [[4]]], np.where(mask == 0, 1, mask)
    mask[2] = IGNORED
    areas = np.asarray(class_areas(jnp.asarray(predicted), jnp.asarray(mask), CLASSES))
    scores = objective.image_scores({"areas": areas})
    expected = [
        segmentation_metrics(confusion(*each, CLASSES)).miou
        for each in zip(predicted, mask, strict=True)
    ]
    np.testing.assert_allclose(scores.values, expected, rtol=1e-6)
    worst = scores.worst(9).tolist()  # The image without known pixels is excluded.
    assert sorted(worst) == [0, 1] and expected[worst[0]] < expected[worst[1]]
    assert scores.worst(1).tolist() == worst[:1]


def test_the_legend_has_the_classes_that_occur():
    _, objective = made()
    areas = np.zeros((2, CLASSES, 3), np.int32)
    areas[0, 0, 2] = areas[1, 2, 1] = 5
    names = [f"class {label}" for label in range(CLASSES)]
    legend = objective.legend({"areas": areas}, names)
    assert legend == {"class 0": "#000000", "class 2": "#008000"}


def test_ignored_pixels_have_no_part_in_loss_and_gradient():
    scores, mask = jnp.asarray(floats(1, 6, 6, CLASSES)), jnp.asarray(masks(1, 6, 6))
    gradient = jax.grad(lambda x: pixel_losses(x, mask).sum())(scores)
    assert (np.abs(gradient).max(-1) > 0).tolist() == (np.asarray(mask) != IGNORED).tolist()


def test_linear_head_in_training_and_in_evaluation(torch):
    """The head equals the authors' layers: dropout, batch norm, 1x1 convolution."""
    model, objective = made(dropout=0.0)
    batch = batch_of()
    features = torch.tensor(np.asarray(model.features(batch["image"], dense=True)))
    norm, conv = torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, CLASSES, 1)
    own = objective.head
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(np.asarray(own.norm.scale[...])))
        norm.bias.copy_(torch.tensor(np.asarray(own.norm.bias[...])))
        conv.weight.copy_(torch.tensor(np.asarray(own.classifier.kernel[...]).T[..., None, None]))
        conv.bias.copy_(torch.tensor(np.asarray(own.classifier.bias[...])))
        trained = conv(norm(features.permute(0, 3, 1, 2)))
        evaluated = conv(norm.eval()(features.permute(0, 3, 1, 2)))
    outputs = own(model, batch["image"], nnx.Rngs(dropout=0))
    np.testing.assert_allclose(
        own.scores(outputs).transpose(0, 3, 1, 2), trained.detach(), atol=1e-4
    )
    state = objective.update_state(objective.initial_state({}), {}, outputs["moments"], 1)
    outputs = own(model, batch["image"], None, state["statistics"])
    np.testing.assert_allclose(
        own.scores(outputs).transpose(0, 3, 1, 2), evaluated.detach(), atol=1e-4
    )


def test_frozen_backbone_has_no_dropout():
    model, objective = made(dropout=0.0, train="head")
    model.options = model.options.__class__(**vars(model.options) | dict(dropout=0.5))
    outputs = [objective.head(model, batch_of()["image"], nnx.Rngs(dropout=k)) for k in (0, 1)]
    np.testing.assert_array_equal(outputs[0]["scores"], outputs[1]["scores"])


def test_evaluation_of_an_image_does_not_depend_on_its_batch():
    model, objective = made()
    context = StepContext(state=objective.initial_state({}))
    batch = batch_of(4)
    evaluate = jax.jit(lambda batch: objective(model, batch, context))
    whole, part = evaluate(batch), evaluate({name: x[:2] for name, x in batch.items()})
    np.testing.assert_allclose(part.each, whole.each[:2], rtol=1e-5)
    np.testing.assert_array_equal(part.outputs["areas"], whole.outputs["areas"][:2])


def test_the_classes_must_be_known():
    config = config_of("segmentation")
    model = create_model("ViT-Ti/4", num_classes=0, image_size=16, **SMALL)
    with pytest.raises(UserError, match="num_classes is None"):
        make_objective(config, model, rngs=nnx.Rngs(0))


def upernet_of(transformers, widths, own):
    """Returns Transformers' UPerNet heads with our parameters, and pairs of matching layers."""
    from transformers.models.upernet import modeling_upernet as theirs

    config = transformers.UperNetConfig(
        num_labels=CLASSES,
        pool_scales=(1, 2, 3, 6),
        hidden_size=own.fused.norm.scale.shape[0],
        auxiliary_channels=own.auxiliary.norm.scale.shape[0],
        auxiliary_in_channels=widths[2],
        auxiliary_num_convs=1,
    )
    head, auxiliary = theirs.UperNetHead(config, widths), theirs.UperNetFCNHead(config, widths)
    pairs = [
        (block.layers[1], one)
        for block, one in zip(head.psp_modules.blocks, own.pooled, strict=True)
    ]
    pairs += [(head.bottleneck, own.bottleneck), (head.fpn_bottleneck, own.fused)]
    pairs += [*zip(head.lateral_convs, own.lateral, strict=True)]
    pairs += [*zip(head.fpn_convs, own.smooth, strict=True)]
    pairs += [(auxiliary.convs[0], own.auxiliary)]
    import torch

    with torch.no_grad():
        for one, ours in pairs:
            kernel = np.asarray(ours.conv.kernel[...]).transpose(3, 2, 0, 1)
            one.conv.weight.copy_(torch.tensor(kernel))
            one.batch_norm.weight.copy_(torch.tensor(np.asarray(ours.norm.scale[...])))
            one.batch_norm.bias.copy_(torch.tensor(np.asarray(ours.norm.bias[...])))
        for one, ours in (
            (head.classifier, own.classifier),
            (auxiliary.classifier, own.auxiliary_classifier),
        ):
            one.weight.copy_(torch.tensor(np.asarray(ours.kernel[...]).T[..., None, None]))
            one.bias.copy_(torch.tensor(np.asarray(ours.bias[...])))
    return head, auxiliary, pairs


def test_upernet_is_that_of_transformers(torch, transformers):
    """The loss, the gradients of the kernels and the running statistics of the norms are equal."""
    size = 64
    model, objective = made("upernet", "ConvNeXt-T", dropout=0.0, dim=12, auxiliary_dim=6)
    batch, own = batch_of(3, size), objective.head
    stages = model.features(batch["image"], dense=True)
    normed = [norm(x) for norm, x in zip(own.stage_norms, stages, strict=True)]
    widths = [x.shape[-1] for x in normed]
    head, auxiliary, pairs = upernet_of(transformers, widths, own)
    given = [torch.tensor(np.asarray(x.transpose(0, 3, 1, 2))) for x in normed]
    target = torch.tensor(np.asarray(batch["mask"]).astype(np.int64))

    def loss_of(scores):
        whole = torch.nn.functional.interpolate(scores, (size, size), mode="bilinear")
        return torch.nn.functional.cross_entropy(
            whole, target, ignore_index=IGNORED, reduction="none"
        ).mean()

    loss = loss_of(head(given)) + 0.4 * loss_of(auxiliary(given))
    loss.backward()
    graphdef, weights = nnx.split(objective)

    def ours(weights):
        context = StepContext(nnx.Rngs(dropout=0))
        outputs = nnx.merge(graphdef, weights)(model, batch, context)
        return outputs.each.mean(), outputs.aux

    (value, moments), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(weights)
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    found = nnx.merge(graphdef, gradient).head
    matched = [*found.pooled, found.bottleneck, found.fused, *found.lateral, *found.smooth]
    for (one, _), ours in zip(pairs, [*matched, found.auxiliary], strict=True):
        kernel = one.conv.weight.grad.numpy().transpose(2, 3, 1, 0)
        np.testing.assert_allclose(ours.conv.kernel[...], kernel, atol=1e-4 * np.abs(kernel).max())
    state = objective.update_state(objective.initial_state({}), {}, moments, 1)["statistics"]
    for one, ours in pairs:
        np.testing.assert_allclose(
            state[ours.norm.name]["mean"], one.batch_norm.running_mean, rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            state[ours.norm.name]["variance"], one.batch_norm.running_var, rtol=1e-4
        )
    evaluated = own(model, batch["image"], None, state)["scores"]
    with torch.no_grad():
        expected = head.eval()(given).permute(0, 2, 3, 1)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-3, atol=1e-3)


def test_upernet_needs_stages():
    with pytest.raises(UserError, match="reads the stages of a pyramid, and a ViT has one"):
        made("upernet")
