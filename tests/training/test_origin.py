"""Tests of the model that a config selects, and of its initial parameters."""

from functools import partial

import numpy as np
import pytest

from tests.interop.helpers import random_model, write
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, fill, sketch
from vit_jax.models import FAMILIES
from vit_jax.models.image_model import About
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ViTOptions, make_options
from vit_jax.options.option import options_of
from vit_jax.recipes import finetune
from vit_jax.runs import frozen_model, warm_start
from vit_jax.runs.warm_start import find_origin, has_resnet

SMALL = {
    "ViT-Ti/16": dict(depth=1),
    "R50+ViT-Ti/16": dict(depth=1, resnet_blocks=(1, 1, 1)),
    "BiT-R50x1": dict(resnet_blocks=(1, 1)),
}


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("named", [True, False])
def test_a_resnet_is_recognised_by_its_name_or_in_the_checkpoint(model, named, tmp_path):
    config = finetune("imagenet2012", model if named else "")
    if not named:
        small = dict(image_size=32, num_classes=2) | SMALL[model]
        file = write(random_model(model, **small), tmp_path / "model.npz", "google", model, **small)
        config.finetune.checkpoint = str(file)
    assert has_resnet(config) == ("R50" in model)


def test_a_new_head_has_the_configured_std(tmp_path):
    small = dict(image_size=32, num_classes=2, depth=1)
    file = write(
        random_model("ViT-Ti/16", **small), tmp_path / "model.npz", "google", "ViT-Ti/16", **small
    )
    config = finetune("imagenet2012")
    config.data.image_size, config.finetune.checkpoint = 32, str(file)

    def head(std, seed=0):
        config.model.head_std, config.seed = std, seed
        return find_origin(config, 200).read()["head"]

    assert not np.any(head(None)["kernel"])
    drawn = head(0.02)
    assert np.std(drawn["kernel"]) == pytest.approx(0.02, rel=0.05)
    assert not np.any(drawn["bias"])
    np.testing.assert_array_equal(drawn["kernel"], head(0.02)["kernel"])
    assert not np.array_equal(drawn["kernel"], head(0.02, seed=1)["kernel"])


# All arguments that regularize a model.
REGULARISED = dict(dropout=0.3, attention_dropout=0.4, stochastic_depth=0.2)
REGULARISED |= dict(uniform_depth=True, depth_by="subset", rope_rescale=2.0)
UNREGULARISED = dict(dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0)
UNREGULARISED |= dict(uniform_depth=False, depth_by="image", rope_rescale=1.0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_fine_tuning_does_not_inherit_regularisation(family, monkeypatch):
    name = "DINOv3-S/16" if family.name == "ViT" else family.names[0]
    values = family.parse(name)
    values |= family.smallest(values) | dict(num_classes=2)
    kind = family.model.options_type
    known = options_of(kind)
    own = {name: value for name, value in REGULARISED.items() if name in known}
    options = make_options(kind, values | own)
    shapes = parameter_shapes(sketch(options))
    checkpoint = Checkpoint("/a/run", "a run", options, shapes, lambda path: np.zeros(shapes[path]))
    monkeypatch.setattr(warm_start, "open_checkpoint", lambda *given: checkpoint)
    config = finetune("imagenet2012", size=options.image_size[0])
    config.finetune.checkpoint = "/a/run"
    origin = find_origin(config, 2)
    assert {name: getattr(origin.options, name) for name in own} == {
        name: UNREGULARISED[name] for name in own
    }
    assert not own or any("not as the checkpoint's run was" in line for line in origin.notes)
    if own:
        config.model.stochastic_depth = 0.1
        assert find_origin(config, 2).options.stochastic_depth == 0.1


FRUIT = ("apple", "berry", "cherry")


@pytest.fixture
def fruit_checkpoint(monkeypatch):
    """Returns a config that starts from a checkpoint, and the checkpoint.

    The checkpoint has three classes and two heads.
    """
    small = dict(
        dim=8, depth=1, mlp_dim=8, heads=2, patch_size=8, pooling="cls", distillation="heads"
    )
    options = ViTOptions(**small, image_size=16, num_classes=3)
    shapes = parameter_shapes(sketch(options))

    def read(path):
        return np.arange(np.prod(shapes[path]), dtype=np.float32).reshape(shapes[path])

    checkpoint = Checkpoint("/a/run", "a run", options, shapes, read, class_names=FRUIT)
    for module in (warm_start, frozen_model):
        monkeypatch.setattr(module, "open_checkpoint", lambda *given: checkpoint)
    config = finetune("imagenet2012", size=16)
    config.finetune.checkpoint, config.finetune.head = "/a/run", "kept"
    return config, checkpoint


@pytest.mark.parametrize("names", [("cherry", "apple", "berry"), ("Cherry", "Apple", "Berry")])
def test_a_kept_head_follows_the_names_of_the_classes(fruit_checkpoint, names):
    config, checkpoint = fruit_checkpoint
    origin = find_origin(config, 3, class_names=names)
    kept = origin.read()
    for head in ("head", "distillation_head"):
        for part in ("kernel", "bias"):
            before = checkpoint.read(f"{head}/{part}")
            np.testing.assert_array_equal(kept[head][part], before[..., [2, 0, 1]])
    path = "blocks/00/mlp/fc1/kernel"
    np.testing.assert_array_equal(origin.sources[path](), checkpoint.read(path))
    assert any(
        "the data's classes in another order: they are matched by name" in x for x in origin.notes
    )


def test_a_kept_head_with_other_names_logs_a_note_and_with_moved_names_is_refused(fruit_checkpoint):
    config, checkpoint = fruit_checkpoint
    assert not any("note:" in line for line in find_origin(config, 3, class_names=FRUIT).notes)
    *_, last = find_origin(config, 3, class_names=("apple", "berry", "kirsche")).notes
    assert last == (
        "note: the checkpoint has other class names; classes are matched by index: "
        "'cherry' is 'kirsche' here"
    )
    with pytest.raises(
        UserError, match="its class 0 is 'apple', that of the data 'berry'.*head='new' starts at"
    ):
        find_origin(config, 3, class_names=("berry", "cherry", "zapple"))
    config.finetune.head = "new"
    assert not np.any(
        find_origin(config, 3, class_names=("berry", "cherry", "x")).read()["head"]["kernel"]
    )


def test_a_teacher_follows_the_names_of_the_classes(fruit_checkpoint):
    config, checkpoint = fruit_checkpoint
    config.objective.name, config.objective.teacher = "distillation", "/a/run"
    config.data.image_size = 16
    frozen = frozen_model.open_frozen(config, ("cherry", "apple", "berry"))
    before = checkpoint.read("head/kernel")
    np.testing.assert_array_equal(frozen.read()["head"]["kernel"], before[:, [2, 0, 1]])
    with pytest.raises(
        UserError, match="objective.teacher='/a/run' differ from the data's: its class 0"
    ):
        frozen_model.open_frozen(config, ("berry", "cherry", "zapple"))


def test_the_head_of_a_model_that_is_handed_in_follows_the_names_of_the_classes(fruit_checkpoint):
    config, checkpoint = fruit_checkpoint
    config.finetune.checkpoint = warm_start.HANDED_IN
    sources = {path: partial(checkpoint.read, path) for path in checkpoint.shapes}
    model = fill(sketch(checkpoint.options), sources)
    model.about = About("a ViT")
    model.about.class_names = FRUIT
    bias = find_origin(config, 3, model, ("cherry", "apple", "berry")).read()["head"]["bias"]
    np.testing.assert_array_equal(bias, [2, 0, 1])
    with pytest.raises(UserError, match="the model passed differ from the data's: its class 0 is"):
        find_origin(config, 3, model, ("berry", "cherry", "zapple"))
