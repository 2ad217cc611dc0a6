"""Later ViTs of Transformers have equal outputs here, whether they are read from it or written."""

import json

import numpy as np
import pytest
from helpers import logits_of, random_images, randomise
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.transformers import transformers_beit, transformers_dinov3

TOLERANCE = 2e-6  # Relative to the largest value; Transformers computes in float64.
SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=80)
SIZES |= dict(image_size=32, patch_size=8)
WHOLE = ("CLIPConfig", "SiglipConfig")
TEXT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9
)
TEXT |= dict(bos_token_id=0, eos_token_id=1)

# Model class, its config class, and config values.
CASES = {
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", dict(num_register_tokens=4)),
    "DINOv3, gated": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        dict(num_register_tokens=2, use_gated_mlp=True, hidden_act="silu", key_bias=True),
    ),
    "DINOv3 without biases": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        dict(
            query_bias=False,
            value_bias=False,
            proj_bias=False,
            mlp_bias=False,
            pos_embed_rescale=None,
        ),
    ),
    "BEiT": (
        "BeitForImageClassification",
        "BeitConfig",
        dict(use_relative_position_bias=True, num_labels=7),
    ),
    "BEiT, class token": (
        "BeitModel",
        "BeitConfig",
        dict(use_relative_position_bias=True, use_mean_pooling=False, layer_scale_init_value=0.0),
    ),
    "BEiT, one table": ("BeitModel", "BeitConfig", dict(use_shared_relative_position_bias=True)),
    "BEiT, absolute": ("BeitModel", "BeitConfig", dict(use_absolute_position_embeddings=True)),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", {}),
    "CLIP's projection": (
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        dict(hidden_act="gelu", projection_dim=24),
    ),
    "CLIP, whole": ("CLIPModel", "CLIPConfig", {}),
    "CLIP's classifier": ("CLIPForImageClassification", "CLIPConfig", {}),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "MAE": ("ViTMAEModel", "ViTMAEConfig", dict(mask_ratio=0.0)),
    "MAE, whole": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        dict(
            mask_ratio=0.0,
            decoder_hidden_size=8,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
    ),
    "SigLIP, whole": ("SiglipModel", "SiglipConfig", dict(hidden_act="gelu")),
}


def fixed_positions(side: int, dim: int) -> np.ndarray:
    """Returns the position table of MAE's authors.

    The class token's row is zero. The others have sine and cosine waves of the column, then of the
    row.
    """
    frequencies = 10_000.0 ** (-np.arange(dim // 4) / (dim // 4))
    table = [np.zeros(dim)]
    for place in range(side**2):
        x, y = place % side * frequencies, place // side * frequencies
        table.append(np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)]))
    return np.stack(table)[None]


@pytest.fixture
def drawn(torch, transformers, tmp_path):
    """Returns a function that writes a model of Transformers with random parameters.

    The function returns the model and its folder.
    """

    def make(kind, config, options):
        options = SIZES | options
        if config in WHOLE:
            options = dict(vision_config=options, text_config=TEXT, num_labels=7, projection_dim=24)
        theirs = getattr(transformers, kind)(getattr(transformers, config)(**options))
        randomise(torch, theirs)
        for p in theirs.parameters():
            if not p.requires_grad:
                p.data[:] = torch.from_numpy(fixed_positions(4, p.shape[-1]))
        theirs.save_pretrained(tmp_path / kind)
        return theirs, tmp_path / kind

    return make


def output(torch, theirs, images, **options) -> np.ndarray:
    """Returns the output of a model of Transformers for normalized images, in float64."""
    with torch.no_grad():
        seen = torch.from_numpy(np.float64(images).transpose(0, 3, 1, 2).copy())
        # The encoder, if the model is a masked autoencoder.
        theirs = getattr(theirs.double().eval(), "vit", theirs)
        torch.manual_seed(0)  # A masked autoencoder shuffles the patches.
        # The image tower, if the model has two towers.
        out = getattr(theirs, "get_image_features", theirs)(seen, **options)
    names = [name for name in ("logits", "image_embeds", "pooler_output") if name in out]
    return (getattr(out, names[0]) if names else out.last_hidden_state[:, 0]).numpy()


def assert_alike(ours, images, wanted):
    np.testing.assert_allclose(
        logits_of(ours, images), wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max()
    )


@pytest.mark.parametrize("case", CASES)
def test_models_of_transformers_have_the_same_outputs_here(case, torch, drawn):
    theirs, folder = drawn(*CASES[case])
    ours = vit_jax.load_model(folder, log=str)
    images = random_images(ours)
    assert_alike(ours, images, output(torch, theirs, ours.normalize(images)))


@pytest.mark.parametrize("case", CASES)
def test_models_read_and_written_again_have_the_same_outputs_in_transformers(
    case, torch, transformers, drawn, tmp_path
):
    theirs, folder = drawn(*CASES[case])
    written = vit_jax.save_model(folder, tmp_path / "ours")
    (kind,) = json.loads((written / "config.json").read_text())["architectures"]
    again, info = getattr(transformers, kind).from_pretrained(written, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3))
    np.testing.assert_array_equal(output(torch, again, images), output(torch, theirs, images))


def test_siglip_with_a_classifier_has_the_same_outputs_here(torch, drawn):
    theirs, folder = drawn("SiglipForImageClassification", "SiglipConfig", {})
    ours = vit_jax.load_model(folder, log=str)
    images = random_images(ours)
    assert ours.num_classes == 7
    assert_alike(ours, images, output(torch, theirs, ours.normalize(images)))


# Arguments with which Transformers resizes positions, and the options that our model then needs.
INTERPOLATE = dict(interpolate_pos_encoding=True)
RESIZED = {
    "DINOv3": ({}, {}),
    "BEiT, absolute": ({}, {}),
    "CLIP": (INTERPOLATE, {}),
    "SigLIP": (INTERPOLATE, {}),
    "MAE": (INTERPOLATE, dict(position="1d")),
}


@pytest.mark.parametrize("size", [24, (48, 32)], ids=str)
@pytest.mark.parametrize("case", RESIZED)
def test_models_resized_by_transformers_have_the_same_outputs_here(case, size, torch, drawn):
    theirs, folder = drawn(*CASES[case])
    there, here = RESIZED[case]
    ours = vit_jax.load_model(folder, log=str, image_size=size, **here)
    images = random_images(ours)
    assert_alike(ours, images, output(torch, theirs, ours.normalize(images), **there))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (
            "BEiT",
            "beit.encoder.layer.0.attention.attention.relative_position_bias.relative_position_index",
        ),
        ("CLIP", "embeddings.position_ids"),
    ],
)
def test_integer_buffers_of_older_versions_are_ignored(case, name, drawn):
    _, folder = drawn(*CASES[case])
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: np.arange(4)}, file)
    assert vit_jax.load_model(folder, log=str).depth == 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("CLIP, whole", "assumed: the model of images alone, of two"),
        ("SigLIP, whole", "assumed: the model of images alone, of two"),
        ("MAE, whole", "with mae's own parameters"),
    ],
)
def test_skipped_text_towers_and_decoders_are_logged(case, words, drawn):
    _, folder = drawn(*CASES[case])
    assert words in open_checkpoint(folder).describe()


def test_the_encoder_of_masked_image_modelling_is_read(torch, drawn):
    options = dict(use_shared_relative_position_bias=True, use_mask_token=True, vocab_size=11)
    theirs, folder = drawn("BeitForMaskedImageModeling", "BeitConfig", options)
    ours = vit_jax.load_model(folder, log=str)
    assert (
        "assumed: the encoder alone, without its prediction" in open_checkpoint(folder).describe()
    )
    images = random_images(ours)
    pixels = np.float64(ours.normalize(images)).transpose(0, 3, 1, 2)
    places = np.float64(ours.features(images, dense=True)).reshape(len(images), 16, -1)
    with torch.no_grad():
        wanted = theirs.double()(torch.from_numpy(pixels)).logits.numpy()
        found = theirs.lm_head(torch.from_numpy(places)).numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    _, folder = drawn(
        "BeitForMaskedImageModeling", "BeitConfig", options | dict(use_mean_pooling=False)
    )
    with pytest.raises(UserError, match="normalizes twice"):
        vit_jax.load_model(folder, log=str)


def test_only_positions_equal_to_maes_are_read_as_fixed(torch, drawn):
    theirs, folder = drawn(*CASES["MAE"])
    assert vit_jax.load_model(folder, log=str).options.position == "sincos2d_mae"
    theirs.embeddings.position_embeddings.data[0, 3, 5] += 0.1
    theirs.save_pretrained(folder)
    ours = vit_jax.load_model(folder, log=str)
    images = random_images(ours)
    assert ours.options.position == "1d"
    assert_alike(ours, images, output(torch, theirs, ours.normalize(images)))


def test_pixels_outside_of_patches_are_cropped_and_logged(torch, drawn):
    """As with images of 384 pixels and patches of 14 in some published models."""
    theirs, folder = drawn(*CASES["SigLIP"][:2], dict(image_size=35))
    ours = vit_jax.load_model(folder, log=str)
    assert (
        "images of 32x32 pixels, as patches of 8 do not divide 35x35"
        in open_checkpoint(folder).describe()
    )
    images = np.random.default_rng(0).uniform(-1, 1, (2, 35, 35, 3)).astype(np.float32)
    assert_alike(ours, images[:, :32, :32], output(torch, theirs, images))


def test_a_head_with_biases_cannot_be_written_as_a_projection(drawn, tmp_path):
    _, folder = drawn(*CASES["CLIP"])
    model = vit_jax.load_model(folder, log=str, num_classes=3)
    model.head.bias[...] = np.ones(3)
    with pytest.raises(UserError, match="head/bias is not zero; --to=timm keeps it"):
        vit_jax.save_model(model, tmp_path / "ours", library="transformers")


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("DINOv3", dict(rope_theta=10.0), "rope_theta=10.0 is unsupported"),
        ("DINOv3", dict(use_gated_mlp=True), "hidden_act='gelu' is unsupported; supported: 'silu'"),
        ("DINOv3", dict(mlp_bias=False), "mlp_bias=False is unsupported"),
        (
            "BEiT",
            dict(use_shared_relative_position_bias=True),
            "with use_relative_position_bias and use_shared_relative_position_bias together is "
            "unsupported",
        ),
        (
            "BEiT",
            dict(use_absolute_position_embeddings=True),
            "use_absolute_position_embeddings and .* together",
        ),
        (
            "BEiT",
            dict(image_size=(32, 48)),
            "BEiT has positions for square images, not for 32x48 pixels",
        ),
        ("CLIP", dict(hidden_act="relu"), "the activation 'relu' is unsupported"),
        ("SigLIP", dict(vision_use_head=False), "vision_use_head=False is unsupported"),
        (
            "DINOv3",
            dict(value_bias=False),
            r"query, key, value \(True, False, False\) is " r"unsupported",
        ),
    ],
)
def test_unsupported_configs_of_transformers_are_refused(case, options, message, drawn):
    kind, config, chosen = CASES[case]
    _, folder = drawn(kind, config, chosen | options)
    with pytest.raises(UserError, match=message):
        vit_jax.load_model(folder, log=str)


@pytest.mark.parametrize(
    ("config", "ours"),
    [("BeitConfig", transformers_beit), ("DINOv3ViTConfig", transformers_dinov3)],
)
def test_the_defaults_are_those_of_transformers(config, ours, transformers):
    theirs = getattr(transformers, config)().to_dict()
    assert {name: theirs[name] for name in ours.DEFAULTS} == ours.DEFAULTS
