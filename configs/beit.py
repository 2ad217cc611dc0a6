r"""Prediction of a tokenizer's codes for masked patches, and fine-tuning (BEiT, 2106.08254).

    python -m vit_jax.main --config=configs/dvae.py --workdir=TOKENISER
    python -m vit_jax.main --config=configs/beit.py:teacher=TOKENISER --workdir=DIR
    python -m vit_jax.main --config=configs/beit.py:task=finetune_i21k --workdir=DIR2 \
        --config.finetune.checkpoint=DIR
    python -m vit_jax.main --config=configs/beit.py:task=finetune_i1k --workdir=DIR3 \
        --config.finetune.checkpoint=DIR2

The values are from the authors' commands, for BEiT-B/16 and BEiT-L/16 (`model=`). `task=pretrain`
trains on ImageNet-21k, `task=pretrain_i1k` on ImageNet-1k for 800 epochs. After pre-training on
ImageNet-21k, the authors fine-tune on ImageNet-1k (`finetune`) and reach 83.7 (B) and 86.0 % (L).
If they fine-tune first with the labels of ImageNet-21k (`finetune_i21k`) and then on ImageNet-1k
(`finetune_i1k`), they reach 85.2 and 87.4 %. With `size=384` this is 86.8 and 88.4 %, and with
`size=512` 88.6 % (L).

`teacher=` is any tokenizer with one code for 8x8 pixels: DALL-E's encoder, converted by
`vit_jax.convert`, or a model of configs/dvae.py. It reads each crop at 112 pixels, so that it
computes as many codes, 14 x 14, as the model has patches. For a tokenizer with other patches set
--config.objective.teacher_size.
"""

from vit_jax.config import choose, chosen_teacher, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import Masked, Tuned, masked_codes, tuned_codes

EPOCHS = {"pretrain": 150, "pretrain_i1k": 800}
WARM_UP = 10_000  # Steps, on ImageNet-21k.
# For each task and model: recipe, True for mixup and CutMix, weight decay, and gradient clipping.
TUNED = {
    "finetune": {
        "BEiT-B/16": (Tuned(224, 100, 1024, 4e-3, 20, 0.65, 0.1, smoothing=0.1), True, 0.05, 0.0),
        "BEiT-L/16": (Tuned(224, 50, 1024, 1e-3, 5, 0.75, 0.2, smoothing=0.1), True, 0.05, 0.0),
    },
    "finetune_i21k": {
        "BEiT-B/16": (Tuned(224, 90, 4096, 3e-3, 5, 0.65, 0.2, smoothing=0.1), False, 0.05, 3.0),
        "BEiT-L/16": (Tuned(224, 90, 2048, 2e-3, 5, 0.75, 0.2, smoothing=0.1), False, 0.05, 1.0),
    },
    "finetune_i1k": {
        "BEiT-B/16": (Tuned(224, 30, 512, 2e-5, 5, 0.85, 0.1, smoothing=0.1), False, 1e-8, 0.0),
        "BEiT-L/16": (Tuned(224, 30, 512, 2e-5, 5, 0.9, 0.4, smoothing=0.1), False, 1e-8, 0.0),
    },
}
SIZES = {"BEiT-B/16": ("224", "384"), "BEiT-L/16": ("224", "384", "512")}


def get_config(argument=None):
    values, argument = named_values(
        argument, model="BEiT-B/16", task="pretrain", teacher="", size=""
    )
    model, task = values["model"], values["task"]
    if task not in (tasks := (*EPOCHS, *TUNED)):
        raise UserError(f"no task={task}; {nearest(task, tasks)}")
    if model not in SIZES:
        raise UserError(f"no recipe for {model!r}; {nearest(model, SIZES)}")
    if task in EPOCHS:
        if values["size"]:
            raise UserError(f"size={values['size']} is of fine-tuning: task={task} sees 224 pixels")
        row = Masked(
            EPOCHS[task], batch=2048, learning_rate=1.5e-3, warmup=10, stochastic_depth=0.1
        )
        config = masked_codes(model, row, i21k=task == "pretrain")
        if task == "pretrain":
            config.optimizer.warmup_steps = WARM_UP
        config.objective.teacher = chosen_teacher(values["teacher"], argument)
        config = choose(config, argument)
        # A code of the tokenizer covers 8 pixels per side, and a patch 16.
        config.objective.teacher_size = config.data.image_size // 2
        return config
    if values["teacher"]:
        raise UserError(f"teacher={values['teacher']} is of task=pretrain: task={task} has none")
    size = values["size"] or "224"
    sizes = SIZES[model] if task != "finetune_i21k" else ("224",)
    if size not in sizes:
        raise UserError(f"task={task} of {model} has no size={size}; there are: {', '.join(sizes)}")
    row, mixed, weight_decay, clip = TUNED[task][model]
    row = row._replace(size=int(size))
    return choose(
        tuned_codes(model, row, task == "finetune_i21k", mixed, weight_decay, clip), argument
    )
