"""Every model family has the same interface, and no code elsewhere depends on a model's family."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import (
    FAMILIES,
    abstract,
    create_model,
    family_of,
    logical_axes,
    model_factory,
    parse_name,
    takes,
)

PACKAGE = Path(__file__).parents[2] / "vit_jax"
QUESTION = re.compile(
    r"is (ViT|BiT)|isinstance\([^)]*(ViT|BiT)|startswith\(.(ViT|BiT)|\"(ViT|BiT)\" in|hasattr\(model"
    r"|__name__ [!=]= \"[^_]"
)
EVERY = [(family, name) for family in FAMILIES for name in family.names]


def small(name):
    """Returns the named model with its family's smallest sizes, without allocating arrays."""
    family, values = parse_name(name)
    return abstract(model_factory(name, **dict(num_classes=3) | family.smallest(values)))


def test_only_models_and_libraries_depend_on_a_family():
    libraries = [folder for folder in (PACKAGE / "interop").iterdir() if folder.is_dir()]
    asks = {
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in PACKAGE.rglob("*.py")
        if not any(file.is_relative_to(folder) for folder in (PACKAGE / "models", *libraries))
        for line in file.read_text().splitlines()
        if QUESTION.search(line)
    }
    assert not asks


@pytest.mark.parametrize(
    ("family", "name"), EVERY, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_a_name_belongs_to_one_family_which_spells_it_back(family, name):
    assert [other for other in FAMILIES if other.parse(name) is not None] == [family]
    model = small(name)
    assert family_of(model) is family
    if "Axial" not in name:
        defaults = dict(resnet_blocks=None, resnet_width=1)
        # BEiT and BEiT v2 have the same arguments.
        assert family.spell(defaults | family.parse(name)) == name.replace("BEiTv2", "BEiT")


@pytest.mark.one_variant
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_features_are_the_input_of_the_head(family):
    _, values = parse_name(family.names[0])
    model = create_model(family.names[0], **dict(num_classes=3) | family.smallest(values))
    head = np.random.default_rng(0).normal(size=model.head.kernel.shape).astype(np.float32)
    model.head.kernel[...] = jnp.asarray(head)
    images = np.random.default_rng(1).integers(
        0, 256, (2, *model.image_size, model.channels), np.uint8
    )
    np.testing.assert_allclose(model(images), np.asarray(model.features(images)) @ head, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_kernel_of_a_small_model_has_axes_and_every_parameter_a_layer(family):
    model = small(family.names[0])
    parameters = {"/".join(path): x.shape for path, x in nnx.to_flat_state(nnx.state(model))}
    for path, shape in parameters.items():
        if path.endswith("kernel"):
            assert 0 < logical_axes(path, len(shape)).inputs < len(shape), path
    if family.layer is not None:
        layers = {family.layer(model)(path) for path in parameters}
        assert {0, 1, float("inf")} <= layers and min(layers) >= -1


def test_path_suffixes_have_the_same_axes_in_all_families():
    entries = {}
    for family in FAMILIES:
        for end, axes in family.axes:
            rank = len(axes.replace("->", "").split())
            assert entries.setdefault((end, rank), axes) == axes


def test_takes_finds_the_arguments_of_a_name():
    assert takes("R50+ViT-B/16", "pre_logits") and not takes("BiT-R50x1", "pre_logits")
    with pytest.raises(UserError, match="unknown model 'ViT-X/16'"):
        takes("ViT-X/16", "dim")
