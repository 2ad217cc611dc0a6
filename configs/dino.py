"""Self-distillation without labels on ImageNet-1k: DINO's two runs of ViT-S/16 (2104.14294).

    python -m vit_jax.main --config=configs/dino.py --workdir=DIR
    python -m vit_jax.main --config=configs/dino.py:run=boosted --workdir=DIR

The run `reference` (default) has 100 epochs with a batch size of 512; the authors report 69.3 %
with k-NN and 74.0 % with a linear probe. `boosted` has 300 epochs with a batch size of 1,024; they
report 73.3 and 76.0 %. `model=ViT-B/16` or another plain ViT selects the model. For ViT-B the
authors fix the norm of the prototypes at 1 in both runs.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.recipes import IMAGENET_IMAGES, TeacherRecipe, self_distillation

# Epochs, batch size, the teacher's final temperature, and the number of epochs until it is reached.
RUNS = {"reference": (100, 512, 0.04, 0), "boosted": (300, 1024, 0.07, 30)}


def get_config(argument=None):
    values, argument = named_values(argument, model="ViT-S/16", run="reference")
    model, run = values["model"], values["run"]
    if run not in RUNS:
        raise UserError(f"no run {run!r}; {nearest(run, RUNS)}")
    epochs, batch_size, temperature, warmup = RUNS[run]
    recipe = TeacherRecipe(
        epochs=epochs,
        epoch=IMAGENET_IMAGES // batch_size,
        learning_rate=5e-4 * batch_size / 256,
        warmup=10,
        weight_decay=(0.04, 0.4),
        momentum=0.996,
        area=(0.4, 1.0),
        local_area=(0.05, 0.4),
        temperature=(0.04, temperature),
        temperature_warmup=warmup,
    )
    config = self_distillation(recipe, batch_size)
    config.model.name, config.model.stochastic_depth = model, 0.1
    config.model.update(dict(gelu="erf", initialization="deit", position_resize="bicubic_offset"))
    config.optimizer.clip = "tensor"
    if run == "boosted" and "ViT-S" in model:
        config.dino.prototype_lengths = "learned"
    return choose(config, argument)
