"""Tests of model names and model cards, and of published sizes of hybrids and BiT ResNets."""

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import MODELS, abstract, count_multiply_adds, count_parameters, model_factory
from vit_jax.published.cards import all_figures

L_16 = """\
ViT-L/16           304.33 M parameters     61.55 GFLOPs (multiply-adds)    197 tokens at 224x224  \
Dosovitskiy et al., 2021 (ViT)
R50+ViT-L/16       316.48 M parameters     65.42 GFLOPs (multiply-adds)    197 tokens at 224x224  \
Dosovitskiy et al., 2021 (ViT)"""


def test_listed_models_are_names():
    assert tuple(vit_jax.list_models()) == MODELS
    assert list(vit_jax.list_models("*ViT-L/16")) == ["ViT-L/16", "R50+ViT-L/16"]
    assert list(vit_jax.list_models("BiT-R152*")) == ["BiT-R152x1", "BiT-R152x2", "BiT-R152x4"]
    assert not vit_jax.list_models("ViT-B*/7")


def test_case_is_ignored_only_if_no_name_matches():
    assert vit_jax.list_models("ViT-g/*4") == ("ViT-g/14",)
    assert {*vit_jax.list_models("vit-g/*4")} == {"ViT-G/14", "ViT-g/14"}
    assert "Swin-T" in {weights.model for weights in vit_jax.list_models("SWIN-*", pretrained=True)}
    assert not vit_jax.list_models("SWIN-T", pretrained=True)


def test_a_valid_name_that_is_not_listed_is_found():
    assert list(vit_jax.list_models("ViT-b/16")) == ["ViT-b/16"]
    with pytest.raises(UserError, match="unknown model 'ViT-B'.*did you mean 'ViT-"):
        vit_jax.list_models("ViT-B")


@pytest.mark.parametrize("name", ["Axial-ViT-Ti/16", "R+ViT-Ti/16"])
def test_a_card_counts_each_layer(name):
    model = abstract(model_factory(name, num_classes=1000, image_size=224, scan=False))
    card = vit_jax.model_card(name)
    assert (card.parameters, card.multiply_adds) == (
        count_parameters(model),
        count_multiply_adds(model),
    )


def test_listed_models_print_as_one_line_each():
    assert repr(vit_jax.list_models("*ViT-L/16")) == L_16


def test_a_list_of_all_models_is_shown_at_once(monkeypatch):
    monkeypatch.setattr("vit_jax.models.model_card", pytest.fail)
    lines = repr(vit_jax.list_models()).splitlines()
    assert [line.split()[0] for line in lines] == list(MODELS) == list(all_figures())


# One model of each family.
@pytest.mark.parametrize("name", ["ViT-S/32", "BiT-R50x1", "ConvNeXt-Atto", "Swin-T"])
def test_stored_sizes_of_listed_models_equal_computed_ones(name):
    assert repr(vit_jax.list_models(name)) == str(vit_jax.model_card(name))


def test_a_model_that_is_not_listed_is_shown_as_computed():
    assert "ViT-mu/32" not in MODELS
    assert repr(vit_jax.list_models("ViT-mu/32")) == str(vit_jax.model_card("ViT-mu/32"))


def test_card_of_a_resnet_has_no_tokens():
    line = str(vit_jax.model_card("BiT-R50x1", num_classes=0, image_size=(64, 96)))
    words = (
        "BiT-R50x1 23.50 M parameters 0.45 GFLOPs (multiply-adds) at 64x96 Kolesnikov et al., "
        "2020 (BiT)"
    )
    assert " ".join(line.split()) == words


# At 224 pixels: without a head, with a linear head for 1,000 classes, and with one for 21,843
# classes (in hybrids after the tanh layer).
COUNTS = {
    "R50+ViT-B/32": (110_176_832, 110_945_832, 127_564_691),
    "R50+ViT-B/16": (97_890_112, 98_659_112, 115_277_971),
    "R50+ViT-L/32": (327_969_856, 328_994_856, 351_408_531),
    "R50+ViT-L/16": (315_458_624, 316_483_624, 338_897_299),
    "R26+ViT-S/32": (36_046_912, 36_431_912, 44_604_307),
    "R26+ViT-B/32": (100_614_976, 101_383_976, 118_002_835),
    "BiT-R50x1": (23_500_352, 25_549_352, 68_256_659),
    "BiT-R50x2": (93_891_712, 97_988_712, 183_382_483),
    "BiT-R50x3": (211_174_080, 217_319_080, 345_399_315),
    "BiT-R101x1": (42_492_480, 44_541_480, 87_248_787),
    "BiT-R101x3": (381_789_888, 387_934_888, 516_015_123),
    "BiT-R152x1": (58_136_128, 60_185_128, 102_892_435),
    "BiT-R152x2": (232_238_208, 236_335_208, 321_728_979),
    "BiT-R152x4": (928_340_224, 936_533_224, 1_107_299_923),
    "BiT-R200x3": (562_488_000, 568_633_000, 696_713_235),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_is_the_published(name):
    hidden_layer = dict(pre_logits=True) if "ViT" in name else {}
    model = abstract(model_factory(name, num_classes=21_843, image_size=224, **hidden_layer))
    whole, head = count_parameters(model), count_parameters(model.head)
    assert head % 21_843 == 0
    trunk = whole - head - (count_parameters(model.pre_logits) if hidden_layer else 0)
    assert (trunk, trunk + head // 21_843 * 1000, whole) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("R50+ViT-B/16", 0, 97_890_112),
        ("R50+ViT-B/16", 1000, 98_659_112),
        ("R+ViT-Ti/16", 0, 6_144_704),
        ("R+ViT-Ti/16", 1000, 6_337_704),
        ("BiT-R50x1", 0, 23_500_352),
        ("BiT-R50x1", 1000, 25_549_352),
    ],
)
def test_card_counts_the_parameters_of_the_head(name, num_classes, parameters):
    assert vit_jax.model_card(name, num_classes=num_classes).parameters == parameters


class OneConvolution(nnx.Module):
    image_size, channels = (9, 14), 6

    def __init__(self, rngs):
        sizes = dict(strides=(2, 1), padding=((1, 2), (0, 5)), kernel_dilation=(1, 2))
        self.conv = nnx.Conv(6, 8, (3, 4), **sizes, feature_group_count=2, rngs=rngs)

    def __call__(self, x):
        return self.conv(x)


def test_multiply_adds_of_a_convolution_exclude_products_with_padding():
    model = OneConvolution(nnx.Rngs(0))
    model.conv.kernel[...] = np.ones(model.conv.kernel.shape)
    # All inputs and kernels are one, so the sum of the outputs is the number of products.
    products = model(np.ones((1, 9, 14, 6), "float32")).sum()
    assert count_multiply_adds(model) == products


def test_multiply_adds_of_a_scan_include_all_iterations():
    class Repeated(OneConvolution):
        def __call__(self, x):
            conv = super().__call__
            return jax.lax.scan(lambda total, _: (total + conv(x).sum(), None), 0.0, length=5)[0]

    assert count_multiply_adds(Repeated(nnx.Rngs(0))) == 5 * count_multiply_adds(
        OneConvolution(nnx.Rngs(0))
    )


@pytest.mark.parametrize(
    ("name", "tokens"), [("R50+ViT-B/32", 50), ("R50+ViT-B/16", 197), ("R+ViT-Ti/16", 50)]
)
def test_a_hybrids_name_determines_its_downsampling(name, tokens):
    assert vit_jax.model_card(name, num_classes=0).tokens == tokens


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ViT-B/64", "Dosovitskiy"),
        ("ViT-b/64", "Dosovitskiy"),
        ("R50+ViT-Ti/32", "Dosovitskiy"),
        ("ViT-S/64", "Steiner"),
        ("R+ViT-Ti/16", "Steiner"),
        ("R26+ViT-S/32", "Steiner"),
        ("ViT-mu/64", "Zhai"),
        ("ViT-So400m/64", "Alabdulmohsin"),
        ("CLIP-B/32", "Radford"),
        ("BEiTv2-B/16", "Peng"),
        ("BiT-R50x1", "Kolesnikov"),
    ],
)
def test_card_names_the_paper_of_a_model(name, source):
    assert vit_jax.model_card(name, image_size=64).source.startswith(source)


@pytest.mark.parametrize(
    "name", ["R50+ViT-B/8", "R+ViT-Ti/32", "R50+ViT-X/16", "Axial-R50+ViT-B/32", "BiT-R18x1"]
)
def test_names_of_missing_hybrids_and_bits_are_refused(name):
    with pytest.raises(UserError, match=r"unknown model .* \(model.name\); did you mean "):
        vit_jax.model_card(name)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ViT_L/16", "did you mean 'ViT-L/16'?"),
        ("R50+VIT-B/16", "did you mean 'R50+ViT-B/16'?"),
        ("AxialResNet101", "did you mean 'AxialResNet50'?"),
        ("DINOv3-B", "did you mean 'DINOv3-B/16'?"),
        ("DINOv3-B/14", "did you mean 'DINOv3-B/16'?"),
        ("xyz", "there are: AIMv2-1B/14, "),
        ("vit_tiny_patch16_224", "it is timm's name of 'ViT-Ti/16': load_model('ViT-Ti/16', "),
        (
            "timm/convnext_tiny.fb_in1k",
            "it is timm's name of 'ConvNeXt-T': load_model('ConvNeXt-T', "
            "pretrained='convnext_tiny.fb_in1k') loads published weights",
        ),
    ],
)
def test_the_error_about_an_unknown_name_suggests_the_nearest(name, answer):
    with pytest.raises(UserError) as error:
        vit_jax.model_card(name)
    assert str(error.value).startswith(f"unknown model {name!r} (model.name); {answer}")


@pytest.mark.parametrize(
    ("model", "name", "answer"),
    [
        ("ViT-Ti/16", "drop_path_rate", "did you mean 'stochastic_depth'?"),
        ("Swin-T", "depths", "did you mean 'blocks'?"),
        ("ViT-Ti/16", "depths", "did you mean 'depth'?"),
        ("ViT-Ti/16", "pretrained", "load_model(NAME, pretrained=TAG) loads published weights"),
    ],
)
def test_the_error_about_an_argument_of_timm_names_ours(model, name, answer):
    with pytest.raises(UserError) as error:
        vit_jax.create_model(model, **{name: 1})
    assert str(error.value).endswith(f"has no argument {name!r} (model.{name}); {answer}")


# Multiply-adds in billions, at 224 pixels and for 1,000 classes, from the papers of Swin (Liu et
# al., 2021), ConvNeXt (Liu et al., 2022) and ConvNeXt V2 (Woo et al., 2023).
BILLIONS = {"Swin-T": 4.5, "Swin-S": 8.7, "Swin-B": 15.4, "Swin-L": 34.5}
BILLIONS |= {
    "ConvNeXt-T": 4.5,
    "ConvNeXt-S": 8.7,
    "ConvNeXt-B": 15.4,
    "ConvNeXt-L": 34.4,
    "ConvNeXt-XL": 60.9,
}
BILLIONS |= {
    "ConvNeXtV2-Atto": 0.55,
    "ConvNeXtV2-Femto": 0.78,
    "ConvNeXtV2-Pico": 1.37,
    "ConvNeXtV2-H": 115,
}
# Image size in pixels and multiply-adds in billions, from EVA-02 (Fang et al., 2024), Swin V2 (Liu
# et al., 2022), and DINOv3 (Simeoni et al., 2025). DINOv3's are without classes, and the paper
# counts multiplications and additions separately.
LARGER = {"EVA02-B/14": (448, 107), "EVA02-L/14": (448, 362), "SwinV2-B/w8": (256, 20.3)}
LARGER |= {
    "DINOv3-B/16": (256, 47 / 2),
    "DINOv3-L/16": (256, 163 / 2),
    "DINOv3-7B/16": (256, 3550 / 2),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("name", [*BILLIONS, *LARGER])
def test_multiply_adds_are_the_published(name):
    """Equal within 2 %.

    ConvNeXts have up to 1.4 % fewer, because products with padding are not counted.
    """
    size, billions = LARGER[name] if name in LARGER else (224, BILLIONS[name])
    classes = 0 if name.startswith("DINOv3") else 1000
    counted = vit_jax.model_card(name, num_classes=classes, image_size=size).multiply_adds
    assert counted / 1e9 == pytest.approx(billions, rel=2e-2)
