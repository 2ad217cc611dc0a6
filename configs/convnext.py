"""ConvNeXt on ImageNet-1k or 21k, and fine-tuned (2201.03545, tables 5 and 6, and the authors' commands).

    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-T --workdir=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-B,task=i21k --workdir=DIR
    python -m vit_jax.main --config=configs/convnext.py:model=ConvNeXt-B,task=finetune,size=384 \\
        --workdir=DIR2 --config.finetune.checkpoint=DIR

Trained on ImageNet-1k alone T, S, B and L reach 82.1, 83.1, 83.8 and 84.3 %; B, L and XL from ImageNet-21k,
at 384 pixels, 86.8, 87.5 and 87.8 %. `task=finetune_i1k` goes on at 384 pixels with a model of ImageNet-1k.
"""

from vit_jax.config import base_config, choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import IMAGENET_IMAGES

IMAGENET_21K_IMAGES = 14_197_122  # Of the release of fall 2011, which has 21,841 classes.

# Stochastic depth by task and model.
SKIPPED = {
    "i1k": {"ConvNeXt-T": 0.1, "ConvNeXt-S": 0.4, "ConvNeXt-B": 0.5, "ConvNeXt-L": 0.5},
    "i21k": {"ConvNeXt-B": 0.1, "ConvNeXt-L": 0.1, "ConvNeXt-XL": 0.2},
    "finetune": {"ConvNeXt-B": 0.2, "ConvNeXt-L": 0.3, "ConvNeXt-XL": 0.4},
    "finetune_i1k": {"ConvNeXt-B": 0.8, "ConvNeXt-L": 0.95},
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ConvNeXt-T", task="i1k", size="")
    model, task = values["model"], values["task"]
    if task not in SKIPPED:
        raise UserError(f"no recipe for task={task}; {nearest(task, SKIPPED)}")
    if model not in SKIPPED[task]:
        raise UserError(f"no recipe for {model!r} and task={task}; {nearest(model, SKIPPED[task])}")
    size = int(values["size"] or (384 if task == "finetune_i1k" else 224))
    config = base_config()
    config.model.name, config.model.dtype = model, "bfloat16"
    config.model.stochastic_depth = SKIPPED[task][model]
    config.data.source, config.data.path = "tfds", "imagenet2012"
    config.data.train_split, config.data.test_split = "train", "validation"
    config.data.crop, config.data.crop_area = "random_resized", (0.08, 1.0)
    config.data.interpolation = config.data.test_interpolation = "bicubic"
    config.data.image_size = size
    if size < 384:
        config.data.test_resize = round(size * 256 / 224)
    else:  # The whole image, squeezed.
        config.data.test_crop, config.data.test_resize = "square", size
    config.augment.policy, config.augment.erasing = "rand-m9-mstd0.5-inc1", 0.25
    config.loss.label_smoothing = 0.1
    config.optimizer.decay, config.optimizer.clip_norm, config.optimizer.count_from = "matrices", 0.0, 0
    config.optimizer.schedule, config.optimizer.end_learning_rate = "cosine", 1e-6
    config.evaluate_every, config.checkpoint.every = 5000, 2000
    if task.startswith("finetune"):
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
            config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
            config.data.dev_split, config.data.test_split = "train[25600:51200]", "train[:25600]"
        config.batch_size = 4096
        # ImageNet's, by which the authors normalise; fine-tuning takes them from its checkpoint.
        config.model.mean, config.model.deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        config.optimizer.learning_rate, config.optimizer.weight_decay = 4e-3, 0.05
        config.optimizer.warmup_steps = round(warmup * images / config.batch_size)
        config.augment.mixup, config.augment.cutmix = 0.8, 1.0
        averaged = task == "i1k"
    if averaged:
        config.optimizer.average, config.optimizer.average_from = 0.9999, "weights"
    return choose(config, argument)
