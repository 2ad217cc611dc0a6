"""Fine-tuning as in the paper (section 4.1, table 4), from any checkpoint that `load_model` takes.

    python -m vit_jax.main --config=configs/finetune.py:dataset=cifar10 --workdir=DIR \\
        --config.finetune.checkpoint=ViT-B_16.npz

Data sets: imagenet2012, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102, folder with
--config.data.path=DIR, and vtab/TASK (vtab/clevr-count). `python -m vit_jax.sweep` with the same
flags finds the learning rate on held-out training images and then trains on all of them.
`model=ViT-B/16` makes sure that the checkpoint is one (and is needed without a checkpoint);
`size=512` is for other sizes than 384. Table 2's ImageNet figures add
--config.optimizer.average=0.9999. At 384 pixels H/14 takes size=378, which is all that it sees of
them.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import finetune


def get_config(argument=None):
    values, argument = named_values(argument, dataset="cifar10", model="", size="384")
    return choose(finetune(values["dataset"], values["model"], int(values["size"])), argument)
