"""Dense features equal those of timm and Transformers in float64."""

import jax
import numpy as np
import pytest
from helpers import random_images, randomise

import vit_jax

# Tolerances relative to the largest feature. Swin V2 needs the coarse one: its attention multiplies
# cosines by up to 100, and it normalizes the outputs of branches, which may be small at some
# positions of a random model. Both operations increase rounding errors.
TOLERANCE, COARSE = 2e-5, 1e-4
VIT = dict(depth=2, embed_dim=48, num_heads=3)
CONVNEXT = dict(depths=(1, 2, 1, 1), dims=(16, 24, 32, 40))
SWIN = dict(depths=(2, 2), embed_dim=32, num_heads=(2, 4))

# timm's name, its arguments, and the size of the images.
TIMM = {
    "ViT": ("vit_tiny_patch16_224", VIT | dict(img_size=64), (64, 64)),
    "ViT, registers, not square": (
        "vit_tiny_patch16_224",
        VIT | dict(img_size=(48, 80), reg_tokens=3, global_pool="avg", fc_norm=False),
        (48, 80),
    ),
    "ViT with fc_norm": (
        "vit_tiny_patch16_224",
        VIT | dict(img_size=64, global_pool="avg"),
        (64, 64),
    ),
    "ViT at another size": (
        "vit_tiny_patch16_224",
        VIT | dict(img_size=64),
        (96, 48),
    ),
    "ConvNeXt": ("convnext_tiny", CONVNEXT, (64, 96)),
    "ConvNeXt, norm first": ("convnext_tiny_hnf", CONVNEXT, (64, 64)),
    "Swin": ("swin_tiny_patch4_window7_224", SWIN | dict(img_size=56), (56, 56)),
    "Swin, padded, odd maps": (
        "swin_tiny_patch4_window7_224",
        SWIN | dict(img_size=100, window_size=4),
        (100, 100),
    ),
    "Swin at another size": (
        "swin_tiny_patch4_window7_224",
        SWIN | dict(img_size=56),
        (112, 56),
    ),
    "Swin V2": ("swinv2_tiny_window8_256", SWIN | dict(img_size=64), (64, 64)),
}


def maps_of(model, images) -> list[np.ndarray]:
    """Returns our dense features as a list of arrays `[batch, rows, columns, channels]`.

    Models of tokens have one array, others one for each stage.
    """
    found = jax.jit(lambda images: model.features(images, dense=True))(images)
    return [np.asarray(x) for x in (found if isinstance(found, list) else [found])]


def compare(ours, theirs, tolerance: float = TOLERANCE) -> None:
    """Asserts that our arrays equal tensors of shape `[batch, channels, rows, columns]`."""
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        expected = y.numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(x, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("case", TIMM)
def test_dense_features_are_timms(case, torch, timm, tmp_path):
    name, options, size = TIMM[case]
    theirs = randomise(torch, timm.create_model(name, num_classes=7, **options))
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True, model_args=options)
    ours = vit_jax.load_model(tmp_path, log=str).resized(size)
    images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    tokens = name.startswith("vit")
    if "another size" in case:  # Otherwise timm's Swin would choose other windows.
        theirs.set_input_size(size, **({} if tokens else dict(window_size=(7, 7))))
    pixels = torch.from_numpy(np.float64(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        # For a ViT, the normalized features of the last layer.
        found = theirs.double().forward_intermediates(
            pixels, indices=1 if tokens else None, norm=tokens, intermediates_only=True
        )
    compare(maps_of(ours, images), found, COARSE if name.startswith("swinv2") else TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ConvNextV2", dict(depths=[1, 2, 1, 1], hidden_sizes=[16, 24, 32, 40], image_size=64)),
        ("Bit", dict(depths=[1, 1], hidden_sizes=[256, 512], embedding_size=64)),
    ],
)
def test_dense_features_are_transformers_hidden_states(
    kind, options, torch, transformers, tmp_path
):
    theirs = randomise(
        torch,
        getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options)),
    )
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str, image_size=64)
    images = random_images(ours)
    pixels = torch.from_numpy(np.float64(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        _, *stages = theirs.double()(pixels, output_hidden_states=True).hidden_states
    compare(maps_of(ours, images), stages)


def test_dense_features_of_dinov2_are_transformers_patches(torch, transformers, tmp_path):
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        patch_size=14,
        image_size=56,
        num_register_tokens=4,
    )
    theirs = randomise(torch, transformers.Dinov2WithRegistersModel(config))
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    pixels = torch.from_numpy(np.float64(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        tokens = theirs.double()(pixels).last_hidden_state
    compare(maps_of(ours, images), [tokens[:, 5:].reshape(2, 4, 4, 48).permute(0, 3, 1, 2)])
