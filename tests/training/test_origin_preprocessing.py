"""Tests of preprocessing and options that a run takes from the checkpoint from which it starts."""

import pytest

from tests.interop.helpers import described, random_model
from vit_jax.config import base_config, check, run_options
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.writing import save
from vit_jax.runs.assemble import train_crop, with_images_of
from vit_jax.runs.evaluator import test_crop as evaluation_crop
from vit_jax.runs.warm_start import find_origin

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
TINY = (
    dict(image_size=32, patch_size=8, dim=24, depth=1, mlp_dim=48, heads=2, num_classes=3)
    | IMAGENET
)


def config(checkpoint=None, **changes):
    made = base_config()
    made.steps, made.finetune.checkpoint = 1, checkpoint and str(checkpoint)
    made.model.name = "" if checkpoint else "ViT-mu/16"
    made.data.update(dict(image_size=32, test_resize=32))
    made.update_from_flattened_dict(changes)
    check(made)
    return made


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a folder in timm's format, with ImageNet's mean and std and bicubic resizing."""
    place = tmp_path / "model"
    seen = Preprocessing("short_side", 0.9, "bicubic")
    save(
        place,
        "timm",
        described("ViT-B/16", **TINY),
        params_of(random_model("ViT-B/16", **TINY)).get,
        seen,
    )
    return place


def test_a_run_normalises_and_resizes_as_its_checkpoint_does(checkpoint):
    made = config(checkpoint)
    origin = find_origin(made, 5)
    assert {name: getattr(origin.options, name) for name in IMAGENET} == IMAGENET
    made = with_images_of(run_options(made), origin)
    assert train_crop(made).interpolation == evaluation_crop(made).interpolation == "bicubic"


def test_values_of_the_config_take_precedence(checkpoint):
    changes = {
        "model.mean": (0.5,),
        "model.std": (0.25, 0.25, 0.5),
        "data.interpolation": "area",
    }
    origin = find_origin(config(checkpoint, **changes), 5)
    found = (origin.options.mean, origin.options.std, origin.interpolation)
    assert found == (0.5, (0.25, 0.25, 0.5), "area")


def test_without_a_checkpoint_pixels_are_in_minus_one_to_one_and_resized_bilinearly():
    origin = find_origin(config(), 5)
    found = (origin.options.mean, origin.options.std, origin.interpolation)
    assert found == (0.5, 0.5, "bilinear")


def test_an_unsupported_interpolation_must_be_replaced(checkpoint):
    file = checkpoint / "config.json"
    file.write_text(file.read_text().replace('"bicubic"', '"nearest"'))
    with pytest.raises(
        UserError, match="interpolation=nearest, which .*give config.data.interpolation"
    ):
        find_origin(config(checkpoint), 5)
    assert (
        find_origin(config(checkpoint, **{"data.interpolation": "bicubic"}), 5).interpolation
        == "bicubic"
    )


def test_a_swin_continues_with_the_windows_in_its_name(tmp_path):
    sizes = dict(dim=32, blocks=(2, 2), stage_heads=(2, 4))
    arguments = sizes | dict(image_size=32, num_classes=3)
    place = tmp_path / "model"
    save(
        place,
        "timm",
        described("Swin-T", **arguments),
        params_of(random_model("Swin-T", **arguments)).get,
    )
    values = {f"model.{name}": value for name, value in sizes.items()} | {
        "model.name": "Swin-T/w12"
    }
    values |= {"data.image_size": 96, "data.test_resize": 96}
    origin = find_origin(config(place, **values), 3)
    assert (origin.options.window, origin.options.image_size) == (12, (96, 96))
    assert origin.sources["stages/1/01/attention/bias_table"]().shape == (23, 23, 2)
    with pytest.raises(UserError, match="config.model.name means Swin-T, but .* is Swin-32x2-2"):
        find_origin(config(place, **{"model.name": "Swin-T"}), 3)


def test_a_checkpoint_may_be_named_by_only_its_size_and_patch(tmp_path):
    arguments = dict(image_size=28, num_classes=3)
    name = "DINOv2-S/14"
    place = tmp_path / "model"
    save(
        place, "timm", described(name, **arguments), params_of(random_model(name, **arguments)).get
    )
    values = {"data.image_size": 28, "data.test_resize": 28}
    for named in (name, "ViT-S/14"):
        origin = find_origin(config(place, **values, **{"model.name": named}), 3)
        assert origin.options.layer_scale is not None
    with pytest.raises(
        UserError, match="config.model.name means DINOv2-S/14-reg4, but .* is DINOv2-S/14;"
    ):
        find_origin(config(place, **values, **{"model.name": "DINOv2-S/14-reg4"}), 3)
