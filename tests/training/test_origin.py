"""Which model a config means."""

import pytest

from tests.interop.helpers import random_model, write
from vit_jax.recipes import finetune
from vit_jax.runs.warm_start import has_resnet

SMALL = {
    "ViT-Ti/16": dict(depth=1),
    "R50+ViT-Ti/16": dict(depth=1, resnet_blocks=(1, 1, 1)),
    "BiT-R50x1": dict(resnet_blocks=(1, 1)),
}


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("named", [True, False])
def test_a_resnet_is_seen_by_its_name_or_in_the_checkpoint(model, named, tmp_path):
    config = finetune("imagenet2012", model if named else "")
    if not named:
        small = dict(image_size=32, num_classes=2) | SMALL[model]
        file = write(random_model(model, **small), tmp_path / "model.npz", "google", model, **small)
        config.finetune.checkpoint = str(file)
    assert has_resnet(config) == ("R50" in model)
