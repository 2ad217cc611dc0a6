"""Tests of preprocessing that is read from a checkpoint's files, and written to them."""

import json
from fractions import Fraction

import numpy as np
import pytest
from helpers import described, random_model, write

import vit_jax
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.preprocessing import Preprocessing, of_timm, of_transformers
from vit_jax.interop.writing import save

TINY = dict(image_size=32, patch_size=8, dim=24, depth=1, mlp_dim=48, heads=2, num_classes=3)
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
ViT = "ViT-B/16"


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a tiny model for a library, with changes to its JSON files."""

    def written(library, *, config=None, preprocessor=None, **changes):
        arguments = TINY | changes
        place = write(random_model(ViT, **arguments), tmp_path / "model", library, ViT, **arguments)
        for name, change in (("config.json", config), ("preprocessor_config.json", preprocessor)):
            if change:
                said = json.loads((place / name).read_text())
                (place / name).write_text(json.dumps(change(said)))
        return place

    return written


def timm_says(**said):
    return lambda config: config | dict(pretrained_cfg=config["pretrained_cfg"] | said)


def test_preprocessing_is_read_from_timms_config(folder):
    said = timm_says(
        mean=[0.1, 0.2, 0.3],
        std=[0.4, 0.5, 0.6],
        crop_pct=0.9,
        interpolation="bicubic",
        crop_mode="squash",
    )
    checkpoint = open_checkpoint(folder("timm", config=said))
    assert (checkpoint.options.mean, checkpoint.options.std) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
    )
    crop = checkpoint_crop(checkpoint, (32, 32), "exact")
    assert crop == TestCrop((32, 32), "square", 32 / 0.9, "exact", "bicubic")
    model = vit_jax.load_model(checkpoint.place, log=str)
    assert (model.mean, model.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_missing_values_in_timms_config_are_timms_defaults(timm):
    theirs = timm.data.resolve_data_config(pretrained_cfg={}, args={"input_size": (3, 32, 32)})
    found, seen = of_timm({"pretrained_cfg": {}}, 3)
    assert (found["mean"], found["std"]) == (theirs["mean"], theirs["std"])
    assert (seen.share, theirs["crop_mode"], seen.kind) == (
        theirs["crop_pct"],
        "center",
        "short_side",
    )
    assert seen.interpolation == theirs["interpolation"] == "bicubic"


def test_one_channel_has_the_mean_over_three_channels(folder):
    place = folder("timm", channels=1, config=timm_says(mean=[0.1, 0.2, 0.6], std=[0.5, 0.5, 0.5]))
    assert open_checkpoint(place).options.mean == pytest.approx(0.3)
    assert open_checkpoint(place).options.std == 0.5


def test_a_file_without_preprocessing_is_assumed_to_use_minus_one_to_one(folder):
    place = folder("timm", dim=64, heads=1, **IMAGENET)
    (place / "config.json").unlink()
    checkpoint = open_checkpoint(place / "model.safetensors")
    assert (checkpoint.options.mean, checkpoint.preprocessing) == (0.5, None)
    assert "pixels in [-1, 1]" in checkpoint.assumed and "assumed: " in checkpoint.describe()


def test_transformers_without_its_processor_file_is_assumed_to_use_minus_one_to_one(folder):
    place = folder("transformers", **IMAGENET)
    (place / "preprocessor_config.json").unlink()
    checkpoint = open_checkpoint(place)
    assert (checkpoint.options.mean, checkpoint.preprocessing) == (0.5, None)
    assert "there is no preprocessor_config.json" in checkpoint.describe()


def test_other_means_are_shown_in_the_line_about_a_checkpoint(folder):
    shown = open_checkpoint(folder("timm", **IMAGENET)).describe()
    assert "32x32 pixels with mean 0.485 0.456 0.406 and std 0.229 0.224 0.225" in shown


# A crop whose aspect ratio differs from that of a square, resized image.
LANDSCAPE = dict(do_center_crop=True, crop_size={"height": 24, "width": 32})
PROCESSORS = {
    "ViT": (dict(), "square", 1, "bilinear_antialias", 0.5),
    "DeiT": (dict(), "square", Fraction(224, 256), "bicubic", 0.5),
    "Bit": (dict(), "short_side", 1, "bicubic", (0.48145466, 0.4578275, 0.40821073)),
    "Beit": (dict(), "square", 1, "bicubic", 0.5),
    "Siglip": (dict(), "square", 1, "bicubic", 0.5),
    "DINOv3ViT": (dict(), "square", 1, "bilinear_antialias", IMAGENET["mean"]),
    "ConvNext": (dict(), "square", 1, "bicubic", 0.5),
    "CLIP": (
        dict(size=224, crop_size=224),
        "short_side",
        1,
        "bicubic",
        (0.48145466, 0.4578275, 0.40821073),
    ),
    "Other": (
        dict(
            size={"shortest_edge": 40},
            resample=1,
            do_center_crop=True,
            crop_size={"height": 32, "width": 32},
            do_rescale=True,
            do_normalize=True,
            image_mean=[0.1] * 3,
            image_std=[0.2] * 3,
        ),
        "short_side",
        Fraction(32, 40),
        "lanczos",
        [0.1] * 3,
    ),
}


@pytest.mark.parametrize("suffix", ["ImageProcessor", "ImageProcessorFast", "FeatureExtractor"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_missing_values_in_transformers_file_are_the_processors_defaults(kind, suffix):
    said, *wanted, mean = PROCESSORS[kind]
    found, seen = of_transformers(dict(image_processor_type=f"{kind}{suffix}") | said)
    assert [seen.kind, seen.share, seen.interpolation] == wanted
    assert np.all(np.asarray(found["mean"]) == np.asarray(mean))


@pytest.mark.parametrize(
    "kind", ["ViT", "DeiT", "Bit", "Beit", "CLIP", "DINOv3ViT", "Siglip", "ConvNext"]
)
def test_the_defaults_are_those_of_transformers(kind, transformers):
    theirs = getattr(transformers, f"{kind}ImageProcessor")()
    name = f"{kind}ImageProcessor"
    stated = {k: v for k, v in json.loads(theirs.to_json_string()).items() if v is not None}
    ours, alone = of_transformers(dict(image_processor_type=name)), of_transformers(stated)
    assert alone[1] == ours[1]
    for one in ("mean", "std", "image_size"):
        assert np.all(np.asarray(alone[0][one]) == np.asarray(ours[0][one]))


def test_convnexts_processor_crops_small_images():
    said = dict(feature_extractor_type="ConvNextFeatureExtractor", size=224, crop_pct=0.95)
    found, seen = of_transformers(said)
    assert (seen.kind, seen.share, found["image_size"]) == (
        "short_side",
        Fraction(224, 235),
        (224, 224),
    )


@pytest.mark.parametrize(
    ("said", "mean", "std"),
    [
        (dict(do_normalize=False), 0.0, 1.0),
        (dict(do_rescale=False, image_mean=[127.5] * 3, image_std=[51.0] * 3), 0.5, 0.2),
        (dict(do_rescale=False, do_normalize=False), 0.0, 1 / 255),
        (dict(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3), 0.5, 0.5),
        (dict(rescale_factor=0.00392156862745098), 0.5, 0.5),
    ],
)
def test_rescaling_and_normalization_are_combined_into_one_mean_and_std(said, mean, std):
    found, _ = of_transformers(dict(image_processor_type="ViTImageProcessor") | said)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found["std"], std, rtol=1e-12)


@pytest.mark.parametrize(
    ("library", "said", "message"),
    [
        (
            "timm",
            dict(interpolation="nearest"),
            "Unsupported: preprocessing of .* with interpolation=nearest. Supp",
        ),
        (
            "timm",
            dict(interpolation="area"),
            "Unsupported: preprocessing of .* with interpolation=area. Supp",
        ),
        (
            "timm",
            dict(crop_mode="border"),
            "Unsupported: preprocessing of .* with crop_mode=border. .*short_side",
        ),
        ("timm", dict(crop_pct=1.2), "images are not padded"),
        (
            "transformers",
            dict(resample=0),
            "Unsupported: preprocessing of .* with resample=nearest. Supp",
        ),
        (
            "transformers",
            dict(resample=99),
            "Unsupported: preprocessing of .* with resample=99. Supp",
        ),
        (
            "transformers",
            dict(do_resize=False),
            "Unsupported: preprocessing of .* with do_resize=false. Supp",
        ),
        (
            "transformers",
            dict(do_pad=True, pad_size={"height": 40, "width": 40}),
            "Unsupported: preprocessing of .* with do_pad=true. Supp",
        ),
        ("transformers", dict(size={"longest_edge": 9}), "with size=.*longest_edge.*Supported"),
        ("transformers", dict(size={"shortest_edge": 40}, do_center_crop=False), "without a crop"),
        (
            "transformers",
            dict(size={"shortest_edge": 40}) | LANDSCAPE,
            "with size=.* and crop_size",
        ),
        (
            "transformers",
            dict(size={"height": 40, "width": 40}) | LANDSCAPE,
            "with size=.* and crop_size=.*Supported: short_side",
        ),
    ],
)
def test_unsupported_preprocessing_loads_but_has_no_crop(library, said, message, folder):
    changes = (
        dict(config=timm_says(**said))
        if library == "timm"
        else dict(preprocessor=lambda x: x | said)
    )
    checkpoint = open_checkpoint(folder(library, **changes))
    with pytest.raises(UserError, match=message):
        checkpoint_crop(checkpoint, (32, 32))


@pytest.mark.parametrize(
    ("library", "said", "message"),
    [
        ("timm", dict(mean=[0.5, "x", 0.5]), "mean is .*model.mean"),
        ("timm", dict(std=[0.5, 0, 0.5]), "std is .*model.std"),
        ("timm", dict(crop_pct=-1), "crop_pct is -1"),
        ("timm", dict(crop_pct="0.9"), "crop_pct is '0.9'"),
        ("transformers", dict(image_mean=[0.5, 0.4]), "mean is .*model.mean"),
        ("transformers", dict(rescale_factor=0), "rescale_factor is 0"),
        ("transformers", dict(size={"height": -3, "width": 3}), "must be numbers of pixels"),
        ("transformers", dict(size="big"), "must be numbers of pixels"),
        (
            "transformers",
            dict(do_center_crop=True, crop_size={"height": 3}),
            "must be a height and a width",
        ),
        (
            "transformers",
            dict(image_processor_type="OtherImageProcessor", resample=None),
            "must contain",
        ),
    ],
)
def test_invalid_preprocessing_values_are_refused(library, said, message, folder):
    changes = (
        dict(config=timm_says(**said))
        if library == "timm"
        else dict(preprocessor=lambda x: x | said)
    )
    with pytest.raises(UserError, match=message):
        open_checkpoint(folder(library, **changes))


SEEN = {
    "short side": Preprocessing("short_side", Fraction(32, 37), "bicubic"),
    "crop share": Preprocessing("short_side", 0.9, "lanczos"),
    "all of it": Preprocessing("square", Fraction(1), "bilinear_antialias"),
    "squeezed": Preprocessing("square", Fraction(32, 41), "bicubic"),
}


@pytest.mark.parametrize("library", ["timm", "transformers"])
@pytest.mark.parametrize("case", SEEN)
def test_written_preprocessing_is_read_again(library, case, tmp_path):
    arguments, seen = TINY | IMAGENET, SEEN[case]
    model = random_model(ViT, **arguments)
    place, names = tmp_path / "model", ("cat", "dog", "newt")
    save(place, library, described(ViT, **arguments), params_of(model).get, seen, names)
    checkpoint = open_checkpoint(place)
    assert checkpoint.class_names == names
    assert {name: checkpoint.arguments[name] for name in IMAGENET} == IMAGENET
    crop = checkpoint_crop(checkpoint, 32)
    assert int(crop.resize) == int(seen.resize((32, 32)))
    assert (crop.kind, crop.interpolation) == (seen.kind, seen.interpolation)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_crop_that_libraries_lack_is_rejected_with_alternatives(library, tmp_path):
    model, seen = random_model(ViT, **TINY), Preprocessing("fit", Fraction(1), "bilinear")
    about = described(ViT, **TINY), params_of(model).get
    with pytest.raises(UserError, match="cannot store the crop fit .* vit_jax.export WORKDIR"):
        save(tmp_path / "model", library, *about, seen)
    save(tmp_path / "model.npz", "google", *about, seen)


def test_crop_of_a_resized_image_with_its_aspect_ratio_is_read():
    for size, crop in [((256, 512), (224, 448)), ((256, 365), (224, 320))]:
        size, crop = (dict(zip(("height", "width"), sides, strict=True)) for sides in (size, crop))
        said = dict(image_processor_type="DeiTImageProcessor", size=size, crop_size=crop)
        assert of_transformers(said)[1].kind == "square"


def test_the_crops_share_of_the_image_is_kept_at_another_size(folder):
    checkpoint = open_checkpoint(folder("timm", config=timm_says(crop_pct=0.8)))
    assert [checkpoint_crop(checkpoint, size).resize for size in (32, 64, (40, 80))] == [40, 80, 50]


def test_google_npz_cannot_store_other_means(tmp_path):
    arguments = TINY | IMAGENET
    with pytest.raises(UserError, match="Google's npz cannot store mean=0.485x0.456x0.406"):
        write(random_model(ViT, **arguments), tmp_path / "model.npz", "google", ViT, **arguments)


@pytest.mark.parametrize(
    ("names", "found"), [(["a"], ("a", "1", "2")), (list("abcd"), ()), ([], ())]
)
def test_class_names_are_read_only_if_they_are_complete(names, found, folder):
    assert (
        open_checkpoint(folder("timm", config=lambda x: x | dict(label_names=names))).class_names
        == found
    )
