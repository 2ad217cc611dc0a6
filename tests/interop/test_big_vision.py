"""Files of big_vision have the logits of big_vision's own models (see make_big_vision.py)."""

from pathlib import Path

import numpy as np
import pytest
from helpers import logits_of, random_model, write

import vit_jax
from vit_jax.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
IMAGES = np.load(GOLDEN / "images.npy")


def arrays_of(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "model.npz"))


def assert_gives_logits(file: Path, name: str, **changes) -> str:
    """Asserts that a file has the recorded logits; returns the first line that loading logs."""
    said = []
    model = vit_jax.load_model(file, log=said.append, **changes)
    expected = np.load(GOLDEN / name / "logits.npy")
    np.testing.assert_allclose(logits_of(model, IMAGES), expected, rtol=0, atol=2e-6)
    return said[0]


@pytest.mark.parametrize(
    ("name", "assumed"),
    [
        ("big_vision_sincos", "assumed: position=sincos2d, as there is no table of positions"),
        ("big_vision_scan", "assumed: position=sincos2d, as there is no table of positions"),
        ("big_vision_training", "assumed: position=sincos2d, as there is no table of positions"),
        ("big_vision_map", "5 classes"),
        ("big_vision_token", "5 classes"),
        ("big_vision_towers", "assumed: the model of images alone, of two"),
    ],
)
def test_model_has_big_visions_logits(name, assumed):
    # Fixed positions fit images of any size; without `image_size`, 224 pixels are assumed.
    size = dict(image_size=32) if "sincos2d" in assumed else {}
    assert assert_gives_logits(GOLDEN / name / "model.npz", name, **size).endswith(assumed)


def old_optimizer(name: str) -> str:
    return name.replace("params/", "opt/target/", 1)


def positions_in_encoder(name: str) -> str:
    return name.replace("pos_embedding", "Transformer/pos_embedding")


def inlined_pooling(name: str) -> str:
    return name.replace("MAPHead_0/", "")


def parameters_alone(name: str) -> str:
    return name.removeprefix("params/")


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("big_vision_token", old_optimizer),
        ("big_vision_token", positions_in_encoder),
        ("big_vision_token", parameters_alone),
        ("big_vision_map", inlined_pooling),
        ("big_vision_towers", parameters_alone),
    ],
)
def test_parameter_names_of_earlier_versions_are_read(name, earlier, tmp_path):
    np.savez(tmp_path / "x.npz", **{earlier(key): x for key, x in arrays_of(name).items()})
    assert_gives_logits(tmp_path / "x.npz", name)


def test_position_of_the_class_token_is_added_to_it(tmp_path):
    arrays = arrays_of("big_vision_token")
    row = np.full((1, 1, 16), 0.25, np.float32)
    arrays["params/cls"] -= row
    arrays["params/pos_embedding"] = np.concatenate([row, arrays["params/pos_embedding"]], axis=1)
    np.savez(tmp_path / "x.npz", **arrays)
    assert_gives_logits(tmp_path / "x.npz", "big_vision_token")


@pytest.mark.parametrize("name", ["big_vision_sincos", "big_vision_map"])
def test_model_is_written_as_big_vision_wrote_it(name, tmp_path):
    from vit_jax.interop.adapting import fit
    from vit_jax.interop.reading import open_files
    from vit_jax.interop.writing import save

    checkpoint = open_files(GOLDEN / name / "model.npz", 32)
    options, sources, _ = fit(checkpoint, {})
    save(tmp_path / "x.npz", "google", options, lambda path: sources[path]())
    written, theirs = dict(np.load(tmp_path / "x.npz")), arrays_of(name)
    theirs = {key.removeprefix("params/"): x for key, x in theirs.items()}
    assert written.keys() == theirs.keys()
    for key, x in theirs.items():
        np.testing.assert_array_equal(written[key], x, strict=True)


SMALL = dict(dim=32, depth=2, mlp_dim=48, heads=2, image_size=32, num_classes=3, pooling="gap")


def test_models_without_positions_and_with_fixed_ones_are_distinguished(tmp_path):
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    for position in ("none", "sincos2d"):
        model = random_model("ViT-Ti/8", **SMALL, position=position)
        file = write(
            model, tmp_path / f"{position}.npz", "google", "ViT-Ti/8", **SMALL, position=position
        )
        said = []
        read = vit_jax.load_model(file, log=said.append, image_size=32)
        assert f"assumed: position={position}, as there is no table" in said[0]
        np.testing.assert_array_equal(logits_of(read, images), logits_of(model, images))


def test_positions_can_be_overridden():
    said = []
    model = vit_jax.load_model(
        GOLDEN / "big_vision_sincos" / "model.npz", log=said.append, image_size=32, position="none"
    )
    assert model.options.position == "none"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(position="sincos2d_mae"), "cannot store position=sincos2d_mae"),
        (dict(position="none", pooling="map"), "cannot store position=none"),
        (
            dict(position="sincos2d", resnet_blocks=(), patch_size=2),
            "no hybrid with position='sincos2d'",
        ),
    ],
)
def test_models_that_would_be_read_as_others_are_refused(options, match, tmp_path):
    options = SMALL | options
    with pytest.raises(UserError, match=match):
        write(
            random_model("ViT-Ti/8", **options), tmp_path / "x.npz", "google", "ViT-Ti/8", **options
        )
    assert list(tmp_path.iterdir()) == []


def test_two_arrays_for_one_parameter_are_refused(tmp_path):
    arrays = arrays_of("big_vision_token")
    arrays["params/Transformer/pos_embedding"] = arrays["params/pos_embedding"]
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match="two arrays are .*pos_embedding"):
        vit_jax.load_model(tmp_path / "x.npz", log=str)


def test_the_error_about_a_missing_layer_names_it(tmp_path):
    arrays = arrays_of("big_vision_map")
    np.savez(tmp_path / "x.npz", **{k: x for k, x in arrays.items() if "encoderblock_0" not in k})
    with pytest.raises(UserError, match="encoderblock_0"):
        vit_jax.load_model(tmp_path / "x.npz", log=str)
