"""Tests of published weights by name and tag, against timm's registry."""

import json
import re

import numpy as np
import pytest
from helpers import random_model, write

import vit_jax
from tests.interop import write_accuracies, write_weights
from vit_jax import load
from vit_jax.errors import UserError
from vit_jax.interop.open import open_checkpoint
from vit_jax.models import parse_name
from vit_jax.published.data_sets import DATA_SETS
from vit_jax.published.unheld import refuse_unheld
from vit_jax.published.weights import (
    ACCURACIES,
    all_weights,
    checkpoint_of,
    find_weights,
    timm_hint,
)


def test_all_listed_weights_are_in_timms_registry(timm):
    for weights in all_weights():
        about = timm.get_pretrained_cfg(weights.repository.split("/")[-1])
        assert weights.repository == about.hf_hub_id
        said = (about.tag, about.input_size[-1], about.num_classes, about.license or "not said")
        assert said == (weights.tag, weights.pixels, weights.classes, weights.licence)
        kind = dict(short_side="center", square="squash")[weights.kind]
        seen = (weights.crop, kind, weights.interpolation.removesuffix("_antialias"))
        assert seen == (about.crop_pct, about.crop_mode, about.interpolation), weights
        for ours, theirs in ((weights.mean, about.mean), (weights.std, about.std)):
            assert np.array_equal(np.broadcast_to(ours, 3), theirs), weights


def test_data_sets_are_those_in_the_tags():
    for weights in all_weights():
        architecture, _, tag = weights.repository.removeprefix("timm/").partition(".")
        assert ", ".join(weights.data) == write_weights.data_of(architecture, tag)
    assert {name for weights in all_weights() for name in weights.data} == set(DATA_SETS)
    found = {x.repository.partition(".")[2]: x.data for x in all_weights()}
    assert found["augreg_in21k_ft_in1k"] == ("ImageNet-21k", "ImageNet-1k")
    # Here, SAM is the name of an optimizer, not of a data set.
    assert found["sam_in1k"] == ("ImageNet-1k",)
    assert found["fcmae_ft_in22k_in1k"] == ("ImageNet-1k", "ImageNet-21k", "ImageNet-1k")
    assert found["in22k_ft_in22k_in1k"] == ("ImageNet-21k", "ImageNet-1k")
    with pytest.raises(ValueError, match="vit_tiny.my_tag does not say on which data"):
        write_weights.data_of("vit_tiny", "my_tag")


def test_a_model_card_has_the_weights_and_the_preprocessing():
    large = str(find_weights("ViT-B/16", "vit_base_patch16_384.augreg_in21k_ft_in1k"))
    assert (
        "trained on ImageNet-21k then ImageNet-1k, sees the centre square, bicubic, mean 0.5"
        in large
    )
    squeezed = str(find_weights("ConvNeXt-B", "fb_in22k_ft_in1k_384"))
    assert (
        "sees all of the image squeezed, bicubic, mean 0.485 0.456 0.406, std 0.229 0.224"
        in squeezed
    )
    assert "sees the centre, 0.9 of the short side, bicubic" in str(
        find_weights("ViT-B/16", "dino")
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (dict(crop_pct=1.0), None),
        (dict(crop_pct=0.9), "crop 0.9, there 1.0"),
        (
            dict(crop_pct=1.0, crop_mode="squash", mean=[0, 0, 0]),
            "kind square, there short_side; mean ",
        ),
    ],
)
def test_preprocessing_in_a_file_overrides_the_registrys(said, words, monkeypatch, tmp_path):
    weights = find_weights("DINOv2-S/14", "vit_small_patch14_dinov2.lvd142m")
    sizes = dict(dim=64, depth=1, mlp_dim=96, heads=1, patch_size=8, image_size=16, num_classes=0)
    folder = write(
        random_model("ViT-B/16", **sizes), tmp_path / "dino", "timm", "ViT-B/16", **sizes
    )
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= (
        dict(mean=weights.mean, std=weights.std, interpolation="bicubic") | said
    )
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(load, "open_checkpoint", lambda source, size: open_checkpoint(folder))
    lines = []
    model = vit_jax.load_model("DINOv2-S/14", pretrained="lvd142m", log=lines.append)
    found = [
        line for line in lines if "preprocessing is used, which differs from the registry's" in line
    ]
    assert len(found) == bool(words) and (not words or words in found[0])
    assert np.allclose(model.mean, said.get("mean", weights.mean))


def test_weights_trained_with_quick_gelu_are_marked(timm):
    quick = {
        weights.repository for weights in all_weights() if weights.arguments == dict(gelu="quick")
    }
    assert quick == {*write_weights.quick_repositories(timm).values()} and len(quick) > 15


def test_openais_clips_have_their_own_name_and_quick_gelu(monkeypatch, tmp_path):
    """timm's files of these models have exact GELU, but they were trained with quick GELU."""
    sizes = dict(dim=64, depth=1, mlp_dim=96, heads=1, patch_size=8, image_size=16, num_classes=0)
    sizes |= dict(stem_norm="tokens", gelu="erf", norm_epsilon=1e-5)
    folder = write(
        random_model("ViT-B/16", **sizes), tmp_path / "clip", "timm", "ViT-B/16", **sizes
    )
    asked = []
    monkeypatch.setattr(
        load,
        "open_checkpoint",
        lambda source, size: asked.append(source) or open_checkpoint(folder),
    )
    for name, tag in (("CLIP-B/16", "openai"), ("OpenCLIP-G/14", "metaclip_2pt5b")):
        model = vit_jax.load_model(name, pretrained=tag, log=str)
        assert model.options.gelu == "quick" and "quick GELU" in str(model)
    assert asked[0] == "hf://timm/vit_base_patch16_clip_224.openai"
    assert vit_jax.load_model(name, pretrained=tag, log=str, gelu="erf").options.gelu == "erf"
    with pytest.raises(
        UserError, match="hf://timm/vit_base_patch16_clip_224.openai with --config.model.gelu=qu"
    ):
        checkpoint_of("CLIP-B/16")


def test_every_name_is_valid_and_no_repository_is_listed_twice():
    assert all(parse_name(weights.model) for weights in all_weights())
    repositories = [weights.repository for weights in all_weights()]
    assert len(repositories) == len(set(repositories)) > 400


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "architecture",
    [
        "vit_small_patch16_dinov3",
        "beit_base_patch16_224",
        "convnext_tiny",
        "swin_tiny_patch4_window7_224",
    ],
)
def test_listed_names_equal_those_of_loaded_architectures(architecture, torch, timm):
    listed = {x.model for x in all_weights() if x.repository.startswith(f"timm/{architecture}.")}
    assert listed == {write_weights.our_name(timm, torch, architecture)}


def test_weights_are_found_by_tag_and_by_repository():
    found = find_weights("DINOv3-S/16", "lvd1689m")
    assert (found.repository, found.licence) == (
        "timm/vit_small_patch16_dinov3_qkvb.lvd1689m",
        "dinov3-license",
    )
    for name in (
        "vit_base_patch16_384.augreg_in21k_ft_in1k",
        "timm/vit_base_patch16_384.augreg_in21k_ft_in1k",
    ):
        assert find_weights("ViT-B/16", name).pixels == 384


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        # Weights for 384 pixels have the same tag.
        ("vit_base_patch16_224", {"ViT-B/16": "augreg_in21k_ft_in1k"}),
        # This name of timm has two of our names.
        ("vit_base_patch16_clip_224", {"OpenCLIP-B/16": "laion2b", "CLIP-B/16": "openai"}),
    ],
)
def test_hints_on_names_of_timm_name_unambiguous_weights(name, tags):
    hint = timm_hint(name)
    model, repository = re.search(r"load_model\('(.+?)', pretrained='(.+?)'\)", hint).groups()
    assert model in tags
    for model, tag in tags.items():
        assert repr(model) in hint and tag in re.split("[ ,;]+", hint)
        weights = find_weights(model, repository.replace("TAG", tag))
        assert weights.repository == f"timm/{name}.{tag}"


@pytest.mark.parametrize(
    ("model", "tag", "words"),
    [
        (
            "ViT-B/16",
            "augreg_in21k_ft_in1k",
            r"several weights .*_patch16_224\.augreg.*_patch16_384\.augreg",
        ),
        (
            "ConvNeXt-Femto",
            "d1_in1k",
            r"several weights .*convnext_femto\.d1.*convnext_femto_ols\.d1",
        ),
        ("ViT-B/16", "augreg_in12k", "ViT-B/16 has no weights 'augreg_in12k'; did you mean"),
        ("ViT-B/17", "augreg_in21k", "no published weights of 'ViT-B/17' are known; did you mean"),
    ],
)
def test_ambiguous_or_unknown_weights_are_refused(model, tag, words):
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(model, pretrained=tag)


def test_every_classifier_of_imagenet_and_every_dino_has_a_published_accuracy():
    teachers = ("dino", "lvd142m", "lvd1689m", "dinov3_lvd1689m")
    for weights in all_weights():
        found = {accuracy.metric for accuracy in weights.accuracies}
        if weights.tag in teachers:
            assert found in ({"ImageNet k-NN", "ImageNet linear"}, {"ImageNet-ReaL linear"}), (
                weights
            )
        else:
            assert found == ({"ImageNet top-1"} if weights.classes == 1000 else set()), weights


def test_every_accuracy_is_of_known_weights_and_names_its_source():
    groups, known = (
        json.loads(ACCURACIES.read_text()),
        {weights.repository for weights in all_weights()},
    )
    assert {name for group in groups for name in group["figures"]} <= known
    assert ACCURACIES.read_text() == write_accuracies.written(groups)
    for accuracy in (accuracy for weights in all_weights() for accuracy in weights.accuracies):
        assert re.fullmatch(r"[\w-]+/[\w-]+, [\w./-]+( of \d{4}-\d\d-\d\d)?", accuracy.source)
        assert 60 < accuracy.percent < 91
        if accuracy.metric == "ImageNet top-1":
            assert 100 < accuracy.pixels < 600 and 0.8 < accuracy.crop <= 1
    (accuracy,) = find_weights("ViT-B/16", "vit_base_patch16_384.augreg_in21k_ft_in1k").accuracies
    assert (accuracy.percent, accuracy.pixels, accuracy.crop) == (86.01, 384, 1.0)


def test_timms_accuracies_are_those_in_its_table(tmp_path):
    table = tmp_path / "results.csv"
    table.write_text(
        "model,img_size,top1,top1_err,top5,top5_err,param_count,crop_pct,interpolation\n"
        "resnet50.a1_in1k,288,81.21,18.79,95.10,4.90,25.56,1.000,bicubic\n"
        "swin_tiny_patch4_window7_224.ms_in1k,224,81.37,18.63,95.54,4.46,28.29,0.900,bicubic\n"
    )
    expected = {"timm/swin_tiny_patch4_window7_224.ms_in1k": [81.37, 224, 0.9]}
    assert write_accuracies.figures_of(table) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PE-core-G/14", "the MLP of its attention pooling has another width .*"),
        (
            "vit_pe_core_gigantic_patch14_448",
            "the MLP of its attention pooling has another width .*",
        ),
        ("Sapiens2-B/16", "several of its heads share keys and values"),
        ("vit_base_patch16_sapiens2", "several of its heads share keys and values"),
        (
            "timm/vit_dwee_patch16_reg1_gap_256.sbb_nadamuon_in1k",
            "its layers are of differential attention",
        ),
        (
            "vit_dpwee_patch16_reg1_gap_256",
            "its layers are parallel branches with differential attention",
        ),
        ("vit_pwee_patch16_reg1_gap_256", "its layers are parallel branches"),
        ("vit_base_patch16_18x2_224", "its layers are parallel branches"),
    ],
)
def test_errors_about_unsupported_models_name_the_unsupported_part(name, words):
    for made in (
        lambda: vit_jax.create_model(name),
        lambda: vit_jax.load_model(name),
        lambda: vit_jax.load_model(name, pretrained="fb"),
    ):
        with pytest.raises(UserError, match=f"{re.escape(name)} is unsupported: {words}$"):
            made()


def test_no_listed_model_is_reported_as_unsupported():
    for name in (*vit_jax.list_models(), *(weights.repository for weights in all_weights())):
        refuse_unheld(name)


def test_weights_are_listed_by_tag_and_by_repository():
    deits = vit_jax.list_models("*deit*", pretrained=True)
    assert {weights.repository.split("/")[1][:4] for weights in deits} == {"deit"}
    assert {weights.tag for weights in vit_jax.list_models("lvd1689m", pretrained=True)} == {
        "lvd1689m"
    }


def test_the_error_about_a_name_without_a_tag_advises_pretrained():
    with pytest.raises(
        UserError, match=r"there is no .*ViT-B/16; .*load_model\('ViT-B/16', pretrained=TAG\)"
    ):
        vit_jax.load_model("ViT-B/16")


def test_weights_are_listed_by_pattern():
    listed = vit_jax.list_models("DINOv3-*", pretrained=True)
    assert {weights.model for weights in listed} > {"DINOv3-S/16", "DINOv3-L/16"}
    assert "timm/vit_small_patch16_dinov3.lvd1689m  256 pixels, no head, licence" in repr(listed)
    assert "std 0.229 0.224 0.225, ImageNet-ReaL linear 87.0 %\n" in repr(listed)
    (swin,) = vit_jax.list_models("Swin-B", pretrained=True)[:1]
    assert f"224 pixels, 1,000 classes, licence {swin.licence}, trained on ImageNet-" in str(swin)
    assert str(swin).endswith(f"0.225, ImageNet top-1 {swin.accuracies[0].percent} % at 224 pixels")
