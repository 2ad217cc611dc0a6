r"""Prediction of a learned tokenizer's codes for masked patches, and fine-tuning (BEiT v2).

    python -m vit_jax.main --config=configs/vqkd.py --workdir=TOKENISER
    python -m vit_jax.main --config=configs/beitv2.py:teacher=TOKENISER --workdir=DIR
    python -m vit_jax.main --config=configs/beitv2.py:task=finetune --workdir=DIR2 \
        --config.finetune.checkpoint=DIR

The paper is 2208.06366. The values are from the authors' commands on ImageNet-1k, for BEiT-B/16 and
BEiT-L/16 (`model=`), with 1,600 epochs, or 300 (`epochs=300`). After fine-tuning, B and L reach
85.5 and 87.3 %; with 300 epochs 85.0 and 86.6 %. If they are first fine-tuned with the labels of
ImageNet-21k (`finetune_i21k`) and then on ImageNet-1k (`finetune_i1k`), they reach 86.5 and 88.4 %.
"""

from vit_jax.config import choose, chosen_teacher, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import Masked, Tuned, masked_codes, tuned_codes

MODELS = ("BEiT-B/16", "BEiT-L/16")
# Stochastic depth and beta2 of pre-training, by the number of epochs.
PRETRAINED = {"300": (0.0, 0.98), "1600": (0.1, 0.999)}
# Recipe by task, model, and epochs of the pre-training.
TUNED = {
    ("finetune", "BEiT-B/16", "300"): Tuned(224, 100, 1024, 5e-4, 20, 0.65, 0.1, smoothing=0.1),
    ("finetune", "BEiT-B/16", "1600"): Tuned(224, 100, 1024, 5e-4, 20, 0.6, 0.2, smoothing=0.1),
    ("finetune", "BEiT-L/16", "300"): Tuned(224, 50, 1024, 5e-4, 5, 0.8, 0.2, smoothing=0.1),
    ("finetune", "BEiT-L/16", "1600"): Tuned(224, 50, 1024, 2e-4, 5, 0.8, 0.2, smoothing=0.1),
    ("finetune_i21k", "BEiT-B/16", "1600"): Tuned(
        224, 90, 4096, 6e-4, 20, 0.75, 0.1, smoothing=0.1
    ),
    ("finetune_i21k", "BEiT-L/16", "1600"): Tuned(
        224, 90, 4096, 6e-4, 20, 0.75, 0.2, smoothing=0.1
    ),
    ("finetune_i1k", "BEiT-B/16", "1600"): Tuned(224, 30, 1024, 5e-5, 20, 0.75, 0.1, smoothing=0.1),
    ("finetune_i1k", "BEiT-L/16", "1600"): Tuned(224, 20, 1024, 7e-5, 5, 0.8, 0.25, smoothing=0.1),
}
TASKS = ("pretrain", "finetune", "finetune_i21k", "finetune_i1k")


def get_config(argument=None):
    values, argument = named_values(
        argument, model="BEiT-B/16", task="pretrain", teacher="", epochs="1600"
    )
    model, task, epochs = values["model"], values["task"], values["epochs"]
    for name, value, known in (
        ("task", task, TASKS),
        ("model", model, MODELS),
        ("epochs", epochs, PRETRAINED),
    ):
        if value not in known:
            raise UserError(f"no {name}={value}; {nearest(value, known)}")
    if task == "pretrain":
        stochastic_depth, beta2 = PRETRAINED[epochs]
        row = Masked(int(epochs), 2048, 1.5e-3, 10, stochastic_depth)
        config = masked_codes(model, row, i21k=False)
        config.objective.name = "beitv2"
        config.objective.teacher = chosen_teacher(values["teacher"], argument)
        config.objective.teacher_dtype = "bfloat16"
        config.data.crop_area = (0.2, 1.0)
        config.optimizer.beta2 = beta2
        return choose(config, argument)
    if values["teacher"]:
        raise UserError(f"teacher={values['teacher']} is of task=pretrain: task={task} has none")
    if (row := TUNED.get((task, model, epochs))) is None:
        raise UserError(f"task={task} has no epochs={epochs}; there is: 1600")
    i21k, mixed = task == "finetune_i21k", task != "finetune_i1k"
    return choose(tuned_codes(model, row, i21k, mixed, weight_decay=0.05, clip=0.0), argument)
