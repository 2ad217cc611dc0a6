"""DeiT on ImageNet-1k, with a teacher or without, and fine-tuned at 384 pixels (2012.12877, and its code).

    python -m vit_jax.main --config=configs/deit.py:model=ViT-S/16 --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:model=ViT-B/16,teacher=TEACHER --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:model=ViT-B/16,task=finetune_i1k --workdir=DIR2 \\
        --config.finetune.checkpoint=DIR

DeiT-Ti, S and B are ViT-Ti/16, S/16 and B/16. Alone they reach 72.2, 79.8 and 81.8 %; with a distillation
token that learns the choices of a RegNetY-16GF (82.9 %) 74.5, 81.2 and 83.4 %. There is no RegNet here, and
the teacher is another model of ImageNet's 1,000 classes, at best a ConvNet (BiT, ConvNeXt): in the paper's
table 2 DeiT-B has 83.1 % by RegNetY-16GF, 82.7 % by the 4GF, of 80.0 %, and 81.9 % by another DeiT-B, of
81.8 %. So a weaker ConvNet costs some tenths, and a Transformer nearly all of the gain.

The rate falls from the end of the warm-up on, step by step; in their code by whole epochs, along a cosine
that begins with the run. They report the parameters, not the average that they keep beside them. Heads start
at zero.
"""

from vit_jax.config import choose, named_values
from vit_jax.recipes import IMAGENET_IMAGES, deit_like

# Stochastic depth by task and model.
SKIPPED = {
    "i1k": {"ViT-Ti/16": 0.1, "ViT-S/16": 0.1, "ViT-B/16": 0.1},
    "finetune_i1k": {"ViT-B/16": 0.1},
}


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-S/16", teacher="", task="i1k")
    task, tuned = values["task"], values["task"] == "finetune_i1k"
    config = deit_like(values["model"], task, SKIPPED, 384 if tuned else 224)
    config.augment.mixup, config.augment.cutmix, config.data.repeats = 0.8, 1.0, 3
    config.optimizer.warmup_learning_rate, config.optimizer.clip_norm = 1e-6, 0.0
    if tuned:
        config.epochs, config.batch_size, config.optimizer.weight_decay = 30.0, 512, 1e-8
        rate = end = 5e-6
        config.data.test_crop, config.data.test_resize = "short_side", 438
    else:
        config.epochs, config.batch_size, config.optimizer.weight_decay = 300.0, 1024, 0.05
        rate, end = 5e-4 * config.batch_size / 512, 1e-5
        config.model.update(dict(gelu="erf", initialization="deit", position_resize="bicubic"))
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = rate, end
    config.optimizer.warmup_steps = round(5 * IMAGENET_IMAGES / config.batch_size)
    if values["teacher"]:
        config.model.distillation = "heads"
        config.objective.update(dict(name="distillation", distillation="hard", teacher=values["teacher"]))
        config.objective.teacher_dtype = "bfloat16"
    return choose(config, argument)
