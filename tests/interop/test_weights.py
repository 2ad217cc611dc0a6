"""Published weights by name and tag, against timm's registry."""

import pytest

import vit_jax
from tests.interop import write_weights
from vit_jax.errors import UserError
from vit_jax.models import parse_name
from vit_jax.published.weights import all_weights, find_weights


def test_every_line_is_of_timms_registry(timm):
    for weights in all_weights():
        about = timm.get_pretrained_cfg(weights.repository.split("/")[-1])
        assert weights.repository == about.hf_hub_id
        said = (about.tag, about.input_size[-1], about.num_classes, about.license or "not said")
        assert said == weights[1:2] + weights[3:]


def test_every_name_makes_a_model_and_no_repository_is_listed_twice():
    assert all(parse_name(weights.model) for weights in all_weights())
    repositories = [weights.repository for weights in all_weights()]
    assert len(repositories) == len(set(repositories)) > 400


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "architecture",
    ["vit_small_patch16_dinov3", "beit_base_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224"],
)
def test_names_are_those_that_the_architectures_are_read_as(architecture, torch, timm):
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
    ("model", "tag", "words"),
    [
        ("ViT-B/16", "augreg_in21k_ft_in1k", r"several weights .*_patch16_224\.augreg.*_patch16_384\.augreg"),
        ("ConvNeXt-Femto", "d1_in1k", r"several weights .*convnext_femto\.d1.*convnext_femto_ols\.d1"),
        ("ViT-B/16", "augreg_in12k", "ViT-B/16 has no weights 'augreg_in12k'; did you mean"),
        ("ViT-B/17", "augreg_in21k", "no published weights of 'ViT-B/17' are known; did you mean"),
    ],
)
def test_what_names_no_weights_is_refused(model, tag, words):
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(model, pretrained=tag)


def test_weights_are_listed_by_pattern():
    listed = vit_jax.list_models("DINOv3-*", pretrained=True)
    assert {weights.model for weights in listed} > {"DINOv3-S/16", "DINOv3-L/16"}
    assert "timm/vit_small_patch16_dinov3.lvd1689m  256 pixels, no head, licence" in repr(listed)
