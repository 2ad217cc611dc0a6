r"""Prediction of EVA-CLIP's features for masked patches, and fine-tuning (EVA-02).

    python -m vit_jax.main --config=configs/eva02.py:model=EVA02-B/14 --workdir=DIR
    python -m vit_jax.main --config=configs/eva02.py:model=EVA02-B/14,task=finetune \
        --workdir=DIR2 --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/eva02.py:model=EVA02-B/14,task=finetune_i21k \
        --workdir=DIR3 --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/eva02.py:model=EVA02-B/14,task=finetune_i1k \
        --workdir=DIR4 --config.finetune.checkpoint=DIR3

The values are from the authors' commands (2303.11331). Pre-training is on ImageNet-21k. After
`task=finetune` on ImageNet-1k, Ti, S, B and L reach 80.7, 85.8, 88.3 and 89.6 %. If B and L are
first fine-tuned on ImageNet-21k (`finetune_i21k`) and then on ImageNet-1k (`finetune_i1k`), they
reach 88.6 and 89.9 %. Fine-tuning can also start from a released model:
`--config.finetune.checkpoint=hf://timm/eva02_base_patch14_224.mim_in22k`.

`teacher=` replaces the authors' teacher EVA-CLIP-g/14 by another ViT with a head; for a ViT without
a head set `--config.objective.teacher_features=tokens`. The authors mask at most 105 of an image's
256 patches; here exactly 105 are masked.
"""

from vit_jax.config import choose, chosen_teacher, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import Masked, Tuned, masked_features, tuned_features

TEACHER = "hf://timm/eva_giant_patch14_clip_224.laion400m"
PRETRAINED = {
    "EVA02-Ti/14": Masked(
        epochs=240, batch=4000, learning_rate=3e-3, warmup=1, stochastic_depth=0.0
    ),
    "EVA02-S/14": Masked(
        epochs=240, batch=4000, learning_rate=3e-3, warmup=1, stochastic_depth=0.0
    ),
    "EVA02-B/14": Masked(
        epochs=150, batch=2048, learning_rate=1.5e-3, warmup=1, stochastic_depth=0.0
    ),
    "EVA02-L/14": Masked(
        epochs=150, batch=2048, learning_rate=1.5e-3, warmup=1, stochastic_depth=0.1
    ),
}
# Recipe by task and model. The authors' learning rate for L is 7e-5 if it was pre-trained on their
# 38 million images.
TUNED = {
    "finetune": {
        "EVA02-Ti/14": Tuned(336, 100, 1024, 2e-4, 5, 0.9, 0.1, smoothing=0.1),
        "EVA02-S/14": Tuned(336, 100, 1024, 1e-4, 5, 0.8, 0.1, smoothing=0.1),
        "EVA02-B/14": Tuned(448, 30, 1024, 1e-4, 3, 0.7, 0.1, smoothing=0.1),
        "EVA02-L/14": Tuned(448, 30, 1024, 5e-5, 3, 0.8, 0.15, smoothing=0.2),
    },
    "finetune_i21k": {
        "EVA02-B/14": Tuned(448, 40, 2048, 3e-4, 1, 0.7, 0.1, smoothing=0.1, least_area=0.2),
        "EVA02-L/14": Tuned(448, 20, 1024, 2e-4, 1, 0.75, 0.15, smoothing=0.1, least_area=0.2),
    },
    "finetune_i1k": {
        "EVA02-B/14": Tuned(448, 15, 512, 5e-5, 2, 0.8, 0.15, smoothing=0.2),
        "EVA02-L/14": Tuned(448, 20, 512, 2e-5, 2, 0.85, 0.15, smoothing=0.2),
    },
}


def get_config(argument=None):
    values, argument = named_values(argument, model="EVA02-B/14", task="pretrain", teacher="")
    model, task = values["model"], values["task"]
    if task not in (tasks := {"pretrain": PRETRAINED} | TUNED):
        raise UserError(f"no task={task}; {nearest(task, tasks)}")
    if model not in tasks[task]:
        raise UserError(f"no recipe for {model!r} and task={task}; {nearest(model, tasks[task])}")
    if task != "pretrain":
        if values["teacher"]:
            raise UserError(
                f"teacher={values['teacher']} is of task=pretrain: task={task} has none"
            )
        return choose(tuned_features(model, TUNED[task][model], task == "finetune_i21k"), argument)
    config = masked_features(
        model, PRETRAINED[model], chosen_teacher(values["teacher"], argument, TEACHER)
    )
    config.model.initialization, config.eva.embedding_gradient = "eva02", 0.1
    return choose(config, argument)
