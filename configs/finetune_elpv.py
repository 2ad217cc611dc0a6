"""Classification of solar cells as defective or functional, by photographs of PyPI's elpv-dataset.

    pip install -e ".[examples]"
    python -m vit_jax.experiment elpv --out=DIR

`experiments/elpv.py` prepares the photographs, trains this config with three seeds and reports the
results. The model is a small hybrid ViT with random initial parameters.
`configs/finetune_elpv.py:checkpoint=ViT-B_16.npz,size=224` fine-tunes a checkpoint instead, by the
paper's recipe (SGD, batch size 512, 500 steps; configs/finetune.py). The checkpoint can be any
source of `load_model`.

The photographs' licence is CC BY-NC-SA 4.0: not for commercial use.
"""

from ml_collections import ConfigDict

from vit_jax.config import base_config, choose, named_values
from vit_jax.recipes import finetune


def get_config(argument=None):
    values, argument = named_values(argument, checkpoint="", size="96")
    size = int(values["size"])
    if values["checkpoint"]:
        config = finetune("folder", size=size)
        config.finetune.checkpoint = values["checkpoint"]
    else:
        config = from_scratch(size)
    config.data.path = "images"
    return choose(config, argument)


def from_scratch(size: int) -> ConfigDict:
    """Returns the config of a small hybrid that starts from random parameters."""
    config = base_config()
    config.model.name = "R+ViT-Ti/16"  # A convolution with 24x24 outputs, then patches of 4x4.
    config.model.update(dict(patch_size=4, dim=96, depth=3, mlp_dim=192, heads=3))
    config.batch_size = 64
    config.epochs = 40.0
    config.data.source = "folder"
    config.data.image_size, config.data.test_resize = size, size
    config.data.crop = "random_resized"
    # Crops cover most of the image, because a defect may be at the edge.
    config.data.crop_area, config.data.crop_aspect = (0.8, 1.0), (0.9, 1.1)
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 100
    config.evaluate_every = config.checkpoint.every = 410
    return config
