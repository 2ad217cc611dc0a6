r"""Prediction of CLIP's features for masked patches, and fine-tuning (EVA, 2211.07636).

    python -m vit_jax.main --config=configs/eva.py --workdir=DIR
    python -m vit_jax.main --config=configs/eva.py:task=finetune_i21k --workdir=DIR2 \
        --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/eva.py:task=finetune_i1k --workdir=DIR3 \
        --config.finetune.checkpoint=DIR2
    python -m vit_jax.main --config=configs/eva.py:task=finetune_i1k,size=560 --workdir=DIR4 \
        --config.finetune.checkpoint=DIR2

The values are from the authors' commands for EVA-g/14, which reaches 89.6 and 89.7 % on ImageNet-1k
at 336 and 560 pixels. They train on 30 million images of seven data sets; this config trains only
on ImageNet-21k, which is about half of these images. `model=` trains another ViT in the same way.
`teacher=` replaces the teacher CLIP-L/14 by another ViT with a head; for a ViT without a head set
`--config.objective.teacher_features=tokens`. The authors mask at most 105 of an image's 256
patches; here exactly 105 are masked.
"""

from vit_jax.config import choose, chosen_teacher, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import Masked, Tuned, masked_features, tuned_features

TEACHER = "hf://timm/vit_large_patch14_clip_224.openai"
PRETRAINED = Masked(epochs=150, batch=4096, learning_rate=1e-3, warmup=2, stochastic_depth=0.1)
TUNED = {
    ("finetune_i21k", "224"): Tuned(
        224, 60, 4096, 1e-4, 15, 0.85, 0.4, smoothing=0.1, least_area=0.5
    ),
    ("finetune_i1k", "336"): Tuned(336, 10, 512, 3e-5, 2, 0.95, 0.4, smoothing=0.3),
    ("finetune_i1k", "560"): Tuned(560, 15, 512, 3e-5, 2, 0.95, 0.4, smoothing=0.3),
}
SIZES = {"finetune_i21k": "224", "finetune_i1k": "336"}


def get_config(argument=None):
    values, argument = named_values(
        argument, model="EVA-g/14", task="pretrain", teacher="", size=""
    )
    model, task = values["model"], values["task"]
    if task not in (tasks := ("pretrain", *SIZES)):
        raise UserError(f"no task={task}; {nearest(task, tasks)}")
    if task == "pretrain":
        if values["size"]:
            raise UserError(
                f"size={values['size']} is of fine-tuning: task=pretrain sees 224 pixels"
            )
        config = masked_features(
            model, PRETRAINED, chosen_teacher(values["teacher"], argument, TEACHER)
        )
        # The authors' code has an initialization for EVA-g/14 and another one for other models.
        config.model.initialization = "eva" if model == "EVA-g/14" else "beit"
        return choose(config, argument)
    if values["teacher"]:
        raise UserError(f"teacher={values['teacher']} is of task=pretrain: task={task} has none")
    row = TUNED.get((task, values["size"] or SIZES[task]))
    if row is None:
        sizes = ", ".join(size for name, size in TUNED if name == task)
        raise UserError(f"task={task} has no size={values['size']}; there are: {sizes}")
    config = tuned_features(model, row, task == "finetune_i21k")
    if task == "finetune_i21k":
        config.augment.cutmix, config.optimizer.end_learning_rate = 1.0, 1e-6
        config.optimizer.beta2, config.optimizer.epsilon = 0.98, 1e-6
    return choose(config, argument)
