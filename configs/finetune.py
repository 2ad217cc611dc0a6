r"""Fine-tuning as in the paper (section 4.1, table 4), from any checkpoint of `load_model`.

    python -m vit_jax.main --config=configs/finetune.py:dataset=cifar10 --workdir=DIR \
        --config.finetune.checkpoint=ViT-B_16.npz

Data sets: imagenet2012, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102, folder with
--config.data.path=DIR, and vtab/TASK (vtab/clevr-count). `python -m vit_jax.sweep` accepts the same
flags. It chooses the learning rate on held-out training images, and then trains on all training
images.

Without a checkpoint `model=ViT-B/16` is required. With a checkpoint it is optional, and checks that
the checkpoint is such a model. The image size is 384; `size=512` sets another one. For H/14 use
size=378, because its patches cover only 378 of 384 pixels. The paper's results on ImageNet in table
2 also use --config.optimizer.average=0.9999.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import finetune


def get_config(argument=None):
    values, argument = named_values(argument, dataset="cifar10", model="", size="384")
    return choose(finetune(values["dataset"], values["model"], int(values["size"])), argument)
