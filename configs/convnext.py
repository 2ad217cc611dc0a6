r"""ConvNeXt on ImageNet-1k or 21k, and its fine-tuning (2201.03545, tables 5 and 6).

The values are from the paper and the authors' commands. ConvNeXt V2's models are pre-trained by
FCMAE and then fine-tuned (2301.00808, and TRAINING.md of facebookresearch/ConvNeXt-V2).

    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-T --workdir=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-B,task=i21k --workdir=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-B,task=finetune,size=384 \
        --workdir=DIR2 --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXtV2-T,task=finetune_fcmae \
        --workdir=DIR3 --config.finetune.checkpoint=hf://timm/convnextv2_tiny.fcmae

Trained only on ImageNet-1k, T, S, B and L reach 82.1, 83.1, 83.8 and 84.3 %. Pre-trained on
ImageNet-21k and fine-tuned at 384 pixels, B, L and XL reach 86.8, 87.5 and 87.8 %.
`task=finetune_i1k` fine-tunes a model at 384 pixels that was trained on ImageNet-1k. Pre-trained by
FCMAE (`configs/fcmae.py`), ConvNeXt V2's Atto, T and B reach 76.7, 83.0 and 84.9 %.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import IMAGENET_21K_IMAGES, IMAGENET_IMAGES, deit_like

# Stochastic depth by task and model.
SKIPPED = {
    "i1k": {"ConvNeXt-T": 0.1, "ConvNeXt-S": 0.4, "ConvNeXt-B": 0.5, "ConvNeXt-L": 0.5},
    "i21k": {"ConvNeXt-B": 0.1, "ConvNeXt-L": 0.1, "ConvNeXt-XL": 0.2},
    "finetune": {"ConvNeXt-B": 0.2, "ConvNeXt-L": 0.3, "ConvNeXt-XL": 0.4},
    "finetune_i1k": {"ConvNeXt-B": 0.8, "ConvNeXt-L": 0.95},
    "finetune_fcmae": {"ConvNeXtV2-Atto": 0.1, "ConvNeXtV2-T": 0.2, "ConvNeXtV2-B": 0.1},
}
# Fine-tuning of ConvNeXt V2: epochs, warm-up epochs, learning rate for a batch size of 256, weight
# decay, layer-wise learning rate decay.
AFTER_FCMAE = {
    "ConvNeXtV2-Atto": (600, 0, 2e-4, 0.3, 0.9),
    "ConvNeXtV2-T": (300, 40, 8e-4, 0.05, 0.9),
    "ConvNeXtV2-B": (100, 20, 6.25e-4, 0.05, 0.6),
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ConvNeXt-T", task="i1k", size="")
    model, task = values["model"], values["task"]
    config = deit_like(
        model, task, SKIPPED, int(values["size"] or (384 if task == "finetune_i1k" else 224))
    )
    config.optimizer.decay, config.optimizer.clip_norm = "matrices", 0.0
    config.optimizer.end_learning_rate = 1e-6
    if task == "finetune_fcmae":
        epochs, warmup, rate, weight_decay, layer_decay = AFTER_FCMAE[model]
        config.epochs, config.batch_size = float(epochs), 1024
        config.optimizer.learning_rate, config.optimizer.weight_decay = (
            rate * 1024 / 256,
            weight_decay,
        )
        config.optimizer.warmup_steps = round(warmup * IMAGENET_IMAGES / config.batch_size)
        config.optimizer.layer_decay = layer_decay
        if model == "ConvNeXtV2-Atto":
            config.augment.mixup = 0.0
            config.loss.label_smoothing = 0.2
        else:
            config.augment.mixup, config.augment.cutmix = 0.8, 1.0
        averaged = True
    elif task.startswith("finetune"):
        config.epochs, config.batch_size = 30.0, 512
        config.optimizer.learning_rate, config.optimizer.weight_decay = 5e-5, 1e-8
        config.optimizer.warmup_steps = 0
        config.optimizer.layer_decay = 0.7 if task == "finetune_i1k" else 0.8
        config.augment.mixup = 0.0
        averaged = model == "ConvNeXt-XL"
    else:
        images, config.epochs, warmup = IMAGENET_IMAGES, 300.0, 20
        if task == "i21k":
            images, config.epochs, warmup = IMAGENET_21K_IMAGES, 90.0, 5
        config.batch_size = 4096
        config.optimizer.learning_rate, config.optimizer.weight_decay = 4e-3, 0.05
        config.optimizer.warmup_steps = round(warmup * images / config.batch_size)
        config.augment.mixup, config.augment.cutmix = 0.8, 1.0
        averaged = task == "i1k"
    if averaged:
        config.optimizer.average, config.optimizer.average_from = 0.9999, "weights"
    return choose(config, argument)
