"""Arguments of models have the right type and bounds; otherwise a one-line error states them."""

import dataclasses
import functools
import pickle

import numpy as np
import pytest

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import FAMILIES, abstract, model_factory
from vit_jax.models.convnext import ConvNeXt
from vit_jax.models.resnet import BiT
from vit_jax.models.vit import ViT
from vit_jax.options.model import ConvNeXtOptions
from vit_jax.options.option import options_of

SMALL = {
    "ViT-Ti/16": dict(dim=16, depth=1, mlp_dim=16, heads=2, image_size=32, num_classes=3),
    "BiT-R50x1": dict(resnet_blocks=(1,), image_size=32, num_classes=3),
}
ARGUMENTS_OF = {
    name: {*options_of(model.options_type)}
    for name, model in (("ViT-Ti/16", ViT), ("BiT-R50x1", BiT))
}


def test_every_argument_has_a_rule_and_a_line_of_documentation():
    for kind in (family.model.options_type for family in FAMILIES):
        fields = dataclasses.fields(kind)
        assert {field.name for field in fields} == options_of(kind).keys()
        assert all(f"\n  {field.name}: " in kind.__doc__ for field in fields)


def test_equal_arguments_are_equal_options():
    sizes = dict(num_classes=3, widths=[8, 16], blocks=[1, 1])
    one = ConvNeXtOptions(image_size=32, mean=[0.5, 0.5, 0.5], **sizes)
    other = ConvNeXtOptions(image_size=(32, 32), mean=0.5, **sizes)
    assert one == other and hash(one) == hash(other)
    assert (one.image_size, one.widths, one.mean) == ((32, 32), (8, 16), 0.5)
    model = abstract(functools.partial(ConvNeXt, one))
    assert pickle.loads(pickle.dumps(model)).options == one


HOSTILE = (-1, float("nan"), float("inf"), 10**30, "x", b"x", [], (), {}, (0, 0), (32,), object())
# The values in HOSTILE that are valid: finite numbers, one mean or std for all channels, numbers of
# units in a stage, and a root without stages.
FINE = {
    "head_bias": (-1, 10**30),
    "layer_scale": (-1, 10**30),
    "mean": (-1, 10**30, (32,)),
    "std": (10**30, (32,)),
    "resnet_blocks": ((32,), (), []),
}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name in SMALL for argument in sorted(ARGUMENTS_OF[name])],
)
def test_errors_about_invalid_values_are_one_line(name, argument):
    for value in HOSTILE:
        if value in FINE.get(argument, ()):
            continue
        with pytest.raises(UserError) as caught:
            abstract(model_factory(name, **(SMALL[name] | {argument: value})))
        assert argument in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(resnet_blocks=()), "the hybrid's stride 64 does not divide"),
        (dict(depth=0), "depth is 0 and must be a whole number from 1"),
        (dict(image_size=0), "image_size is 0 and must be pixels above 0"),
        (dict(heads=0), "heads is 0 and must be a whole number from 1"),
        (dict(norm_epsilon="1e-6"), "norm_epsilon is '1e-6' and must be a finite number, above 0"),
        (dict(dim=16.0), "dim is 16.0 and must be a whole number"),
        (dict(rope=1), "rope is 1 and must be none or eva02 or pe"),
        (dict(num_classes=True), "num_classes is True and must be a whole number"),
    ],
    ids=str,
)
def test_errors_about_bounds_name_the_argument(changes, words):
    with pytest.raises(UserError, match=words):
        vit_jax.create_model("ViT-Ti/16", **(SMALL["ViT-Ti/16"] | changes))


def test_numpy_numbers_are_accepted():
    model = vit_jax.create_model(
        "ViT-Ti/16", **(SMALL["ViT-Ti/16"] | dict(num_classes=np.int64(4)))
    )
    assert model.num_classes == 4


def test_bit_without_stages_is_refused():
    with pytest.raises(UserError, match=r"resnet_blocks is \(\) and must have a stage"):
        vit_jax.create_model("BiT-R50x1", **(SMALL["BiT-R50x1"] | dict(resnet_blocks=())))
