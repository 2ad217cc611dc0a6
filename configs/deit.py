r"""DeiT and DeiT III on ImageNet, and their fine-tuning at higher resolution.

The values are from the papers (2012.12877, 2204.07118) and their code.

    python -m vit_jax.main --config=configs/deit.py:model=ViT-S/16 --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:model=ViT-B/16,teacher=TEACHER --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:model=ViT-B/16,task=finetune_i1k \
        --workdir=DIR2 --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/deit.py:recipe=deit3,model=ViT-B/16 --workdir=DIR

DeiT-Ti, S and B are ViT-Ti/16, S/16 and B/16. Without a teacher they reach 72.2, 79.8 and 81.8 %.
With a distillation token and a RegNetY-16GF (82.9 %) as the teacher they reach 74.5, 81.2 and 83.4
%. RegNet is not available here; use another classifier of ImageNet's 1,000 classes, preferably a
ConvNet (BiT, ConvNeXt). In the paper's table 2, DeiT-B reaches 83.1 % with RegNetY-16GF, 82.7 %
with RegNetY-4GF (80.0 %), and 81.9 % with another DeiT-B (81.8 %) as the teacher. So a weaker
ConvNet helps a little less, and a Transformer hardly helps.

`recipe=deit3` is for ViT-S/16, B/16, L/16 and H/14. Its tasks and final accuracies:

| task | training | S | B | L | H |
| i1k | 800 epochs at 224, 192, 192 and 154 pixels | 81.4 % | | | |
| finetune_i1k | continues at 224 | | 83.8 % | 84.9 % | 85.2 % |
| finetune_i1k_384 | continues at 384 | 83.4 % | 85.0 % | 85.8 % | |
| i21k | 240 epochs at 224, H 90 at 126 | | | | |
| finetune | ImageNet-1k from ImageNet-21k, at 224 | 83.1 % | 85.7 % | 87.0 % | 87.2 % |

Before fine-tuning at 224, B and L reach 82.8 and 84.0 %.

There are some differences from the authors' code. Their H/14 has images of 160 and 128 pixels, of
which its patches cover only 154 and 126. Their class token has no position embedding; here it has
one, so the sum of token and embedding changes twice as fast. Here the learning rate decays at each
step after the warm-up; theirs decays once per epoch, along a cosine that starts with the run.

As in their code, the parameters are evaluated and not an average of them. DeiT's heads are
initialized with zeros. DeiT III's are not, because LAMB scales the update of a kernel by its norm.
"""

from vit_jax.config import base_config, choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import IMAGENET_21K_IMAGES, IMAGENET_IMAGES, deit_like

# Stochastic depth by task and model.
SKIPPED = {
    "i1k": {"ViT-Ti/16": 0.1, "ViT-S/16": 0.1, "ViT-B/16": 0.1},
    "finetune_i1k": {"ViT-B/16": 0.1},
}
DEIT3_SKIPPED = {
    "i1k": {"ViT-S/16": 0.05, "ViT-B/16": 0.2, "ViT-L/16": 0.45, "ViT-H/14": 0.6},
    "finetune_i1k": {"ViT-B/16": 0.2, "ViT-L/16": 0.45, "ViT-H/14": 0.55},
    "finetune_i1k_384": {"ViT-S/16": 0.0, "ViT-B/16": 0.15, "ViT-L/16": 0.4},
    "i21k": {"ViT-S/16": 0.05, "ViT-B/16": 0.1, "ViT-L/16": 0.3, "ViT-H/14": 0.5},
    "finetune": {"ViT-S/16": 0.05, "ViT-B/16": 0.15, "ViT-L/16": 0.4, "ViT-H/14": 0.45},
}
# Epochs, batch size, learning rate and weight decay.
DEIT3_TASKS = {
    "i1k": (800, 2048, 3e-3, 0.05),
    "finetune_i1k": (20, 512, 1e-5, 0.1),
    "finetune_i1k_384": (20, 512, 1e-5, 0.1),
    "i21k": (240, 2048, 1e-3, 0.02),
    "finetune": (50, 2048, 3e-4, 0.02),
}
# Image sizes of pre-training other than 224.
DEIT3_SIZES = {("i1k", "ViT-B/16"): 192, ("i1k", "ViT-L/16"): 192}
DEIT3_SIZES |= {("i1k", "ViT-H/14"): 154, ("i21k", "ViT-H/14"): 126}


def get_config(argument=None):
    defaults = dict(recipe="deit", model="ViT-S/16", teacher="", task="i1k")
    values, argument = named_values(argument, **defaults)
    recipes = {"deit": deit, "deit3": deit3}
    if values["recipe"] not in recipes:
        raise UserError(f"no recipe={values['recipe']}; {nearest(values['recipe'], recipes)}")
    config = recipes[values["recipe"]](values["model"], values["task"])
    if values["teacher"]:
        if values["recipe"] != "deit":
            raise UserError(f"teacher={values['teacher']} is of recipe=deit: DeiT III has none")
        config.model.distillation = "heads"
        config.objective.update(dict(name="distillation", teacher=values["teacher"]))
        config.distillation.kind = "hard"
        config.objective.teacher_dtype = "bfloat16"
    return choose(config, argument)


def deit(model, task):
    """Returns DeiT's config of a model and a task, without a teacher."""
    tuned = task == "finetune_i1k"
    config = deit_like(model, task, SKIPPED, 384 if tuned else 224)
    config.augment.mixup, config.augment.cutmix, config.data.repeats = 0.8, 1.0, 3
    config.optimizer.warmup_learning_rate, config.optimizer.clip_norm = 1e-6, 0.0
    if tuned:
        config.finetune.head = "kept"
        config.epochs, config.batch_size, config.optimizer.weight_decay = 30.0, 512, 1e-8
        rate = end = 5e-6
        config.data.test_crop, config.data.test_resize = "short_side", 438
    else:
        config.epochs, config.batch_size, config.optimizer.weight_decay = 300.0, 1024, 0.05
        rate, end = 5e-4 * config.batch_size / 512, 1e-5
        config.model.update(dict(gelu="erf", initialization="deit", position_resize="bicubic"))
    config.optimizer.learning_rate, config.optimizer.end_learning_rate = rate, end
    config.optimizer.warmup_steps = round(5 * IMAGENET_IMAGES / config.batch_size)
    return config


def deit3(model, task):
    """Returns DeiT III's config of a model and a task."""
    size = 384 if task == "finetune_i1k_384" else DEIT3_SIZES.get((task, model), 224)
    config = deit_like(model, task, DEIT3_SKIPPED, size)
    config.model.uniform_depth = True
    config.data.test_crop, config.data.test_resize = "short_side", size
    config.augment.mixup, config.augment.cutmix, config.augment.erasing = 0.8, 1.0, 0.0
    epochs, config.batch_size, rate, decay = DEIT3_TASKS[task]
    config.epochs = 90.0 if (task, model) == ("i21k", "ViT-H/14") else float(epochs)
    config.optimizer.learning_rate = 4e-3 if (task, model) == ("i1k", "ViT-S/16") else rate
    config.optimizer.warmup_learning_rate, config.optimizer.end_learning_rate = 1e-6, 1e-5
    config.optimizer.weight_decay = decay
    images = IMAGENET_21K_IMAGES if task == "i21k" else IMAGENET_IMAGES
    config.optimizer.warmup_steps = round(5 * images / config.batch_size)
    if task.startswith("finetune_i1k"):
        config.optimizer.clip_norm, config.finetune.head = 0.0, "kept"
        return config
    config.optimizer.name, config.optimizer.clip_norm, config.model.head_std = (
        "lamb",
        1.0,
        0.02,
    )
    config.augment.policy, config.augment.three_augment = None, 0.3
    if task != "finetune":
        config.model.update(dict(gelu="erf", initialization="deit3", position_resize="bicubic"))
        config.model.layer_scale = 1e-4
    if task == "i1k":
        config.loss.name, config.loss.label_smoothing, config.data.repeats = "binary", 0.0, 3
    else:
        config.data.crop, config.augment.mixup = "simple_random", 0.0
        config.data.crop_area = base_config().data.crop_area  # Unused by this crop.
    return config
