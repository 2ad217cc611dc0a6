r"""Swin and Swin V2 on ImageNet-1k or 21k, and their fine-tuning (2103.14030, 2111.09883).

The values are from the authors' configs.

    python -m vit_jax.main --config=configs/swin.py:model=Swin-T --workdir=DIR
    python -m vit_jax.main --config=configs/swin.py:model=Swin-B,task=i21k --workdir=DIR
    python -m vit_jax.main --config=configs/swin.py:model=Swin-B/w12,task=finetune --workdir=DIR2 \
        --config.finetune.checkpoint=DIR

Trained only on ImageNet-1k, Swin-T, S and B reach 81.2, 83.2 and 83.5 %, and SwinV2-{T,S,B}/w16
82.8, 84.1 and 84.6 %. Pre-trained on ImageNet-21k and fine-tuned at 384 pixels, Swin-{B,L}/w12
reach 86.4 and 87.3 %, and SwinV2-{B,L}/w12to24 87.1 and 87.6 %. `task=finetune_i1k` fine-tunes a
model at 384 pixels that was trained on ImageNet-1k, and reaches 84.5 %. If the windows of `model`
are not those of the checkpoint, position bias tables are resized.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import IMAGENET_21K_IMAGES, IMAGENET_IMAGES, deit_like

# Stochastic depth by task and model, and image sizes other than 224.
SKIPPED = {
    "i1k": {
        **{"Swin-T": 0.2, "Swin-S": 0.3, "Swin-B": 0.5},
        **{"SwinV2-T/w8": 0.2, "SwinV2-S/w8": 0.3, "SwinV2-B/w8": 0.5},
        **{"SwinV2-T/w16": 0.2, "SwinV2-S/w16": 0.3, "SwinV2-B/w16": 0.5},
    },
    "i21k": {
        **{"Swin-T": 0.1, "Swin-S": 0.2, "Swin-B": 0.2, "Swin-L": 0.2},
        **{"SwinV2-B/w12": 0.2, "SwinV2-L/w12": 0.2},
    },
    "finetune": {
        **{
            "Swin-T": 0.1,
            "Swin-S": 0.2,
            "Swin-B": 0.2,
            "Swin-L": 0.2,
            "Swin-B/w12": 0.2,
            "Swin-L/w12": 0.2,
        },
        **{f"SwinV2-{size}/{windows}": 0.2 for size in "BL" for windows in ("w12to16", "w12to24")},
    },
    "finetune_i1k": {"Swin-B/w12": 0.5},
}
SIZES = {"Swin/w12": 384, "SwinV2/w8": 256, "SwinV2/w16": 256, "SwinV2/w12": 192}
SIZES |= {"SwinV2/w12to16": 256, "SwinV2/w12to24": 384}


def get_config(argument=None):
    values, argument = named_values(argument, model="Swin-T", task="i1k")
    model, task = values["model"], values["task"]
    family, _, windows = model.partition("/")
    size = SIZES.get(f"{family.split('-')[0]}/{windows}", 224)
    config = deit_like(model, task, SKIPPED, size)
    # DeiT's augmentation, but without repeated images and without averaged parameters. As in timm,
    # RandAugment replaces colour jitter.
    config.augment.mixup, config.augment.cutmix = 0.8, 1.0
    config.optimizer.clip_norm = 5.0
    images, config.batch_size, config.epochs = IMAGENET_IMAGES, 1024, 30.0
    rate, warmup, config.optimizer.weight_decay = 2e-5, 5, 1e-8  # Learning rate for 512 images.
    if task == "i1k":
        config.epochs, rate, warmup, config.optimizer.weight_decay = 300.0, 5e-4, 20, 0.05
    elif task == "i21k":
        images, config.batch_size, config.epochs, rate = IMAGENET_21K_IMAGES, 4096, 90.0, 1.25e-4
        config.optimizer.weight_decay = 0.1 if model.startswith("SwinV2") else 0.05
    rate *= config.batch_size / 512
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = rate, rate / 100
    config.optimizer.warmup_learning_rate = rate / 1000
    config.optimizer.warmup_steps = round(warmup * images / config.batch_size)
    return choose(config, argument)
