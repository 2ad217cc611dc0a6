r"""Self-distillation of images and their patches without labels (DINOv2, 2304.07193).

    python -m vit_jax.main --config=configs/dinov2.py --workdir=DIR
    python -m vit_jax.main --config=configs/dinov2.py:run=large --workdir=DIR
    python -m vit_jax.main --config=configs/dinov2.py:run=high_resolution,from=DIR --workdir=DIR2
    python -m vit_jax.main --config=configs/dinov2.py:run=large,teacher=DIR2,model=DINOv2-S/14 \
        --workdir=DIR3
    python -m vit_jax.main --config=configs/dinov2.py:from=DINOv2-S/14 --workdir=DIR \
        --config.data.path=PHOTOS

The default run `short` is the authors' `vitl16_short`, ViT-L/16 on ImageNet-1k, for which they
report 81.6 % with k-NN and 82.9 % with a linear probe. `run=large` is the authors' `vitl14`, on
ImageNet-21k. `run=high_resolution` is the last phase of `large`: 10,000 steps at 518 pixels, with
all schedules compressed to this length and all other values unchanged (appendix B.2). The paper
lowers the learning rate by a factor that it does not specify; we use a quarter, as DINOv3 does.

With `teacher` a student is distilled from a frozen model with heads, without stochastic depth
(section 5). The teacher is a run or a converted training checkpoint.

With only `from` (the name of a published model, or a source as in `load_model`), training continues
from this model for 1,000 steps. The values are ours, for a folder of photographs and one device. If
the checkpoint has heads, they are used. Colours, crops and losses are the authors' in all runs.
"""

from vit_jax.config import choose, named_values
from vit_jax.errors import UserError, nearest
from vit_jax.published.weights import checkpoint_of
from vit_jax.recipes import DINOV2, self_distillation

LARGE = DINOV2._replace(
    epochs=500,
    learning_rate=2e-4 * (3072 / 1024) ** 0.5,
    warmup=80,
    weight_decay=(0.04, 0.2),
    momentum=0.994,
)
# An epoch has 20 steps, so that the authors' 500 epochs are 10,000 steps.
HIGH_RESOLUTION = LARGE._replace(epoch=20, learning_rate=LARGE.learning_rate / 4)
# The learning rate is ten times the final learning rate of DINOv2's training.
ON = DINOV2._replace(
    epochs=1,
    epoch=1000,
    learning_rate=1e-5,
    warmup=0.1,
    weight_decay=(0.04, 0.04),
    momentum=0.994,
    temperature=(0.07, 0.07),
    temperature_warmup=0,
    frozen=0,
)


def get_config(argument=None):
    values, argument = named_values(argument, model="", run="", teacher="", **{"from": ""})
    run = values["run"] or "short"
    if run not in (runs := ("short", "large", "high_resolution")):
        raise UserError(f"no run {run!r}; {nearest(run, runs)}")
    if run == "high_resolution":
        _refuse(
            values, ("model", "teacher"), "run=high_resolution goes on with the model of its run"
        )
        return choose(_high_resolution(values["from"], argument), argument)
    if values["from"]:
        why = "from=... alone goes on with its model by values of its own"
        _refuse(values, ("model", "run", "teacher"), why)
        return choose(_on_from(values["from"]), argument)
    return choose(_from_scratch(values, short=run == "short"), argument)


def _from_scratch(values, short):
    """Returns the config of the run `short` or `large`; with a teacher, of its distillation."""
    config = self_distillation(
        DINOV2 if short else LARGE, 2048 if short else 3072, 96 if short else 98
    )
    config.model.name = values["model"] or ("ViT-L/16" if short else "DINOv2-L/14")
    config.model.update(dict(layer_scale=1e-5, gelu="erf", initialization="dinov2"))
    config.model.position_resize = "bicubic_offset"
    _losses(config)
    config.model.stochastic_depth = 0.3 if short else 0.4
    config.optimizer.layer_decay, config.optimizer.embedding_rate = 0.9 if short else 1.0, 0.2
    if not short:
        _large(config)
        if not values["teacher"]:  # The released models are distilled and have a plain MLP.
            config.model.mlp, config.model.mlp_dim = "swiglu", 2736
    if values["teacher"]:
        config.objective.teacher, config.model.stochastic_depth = values["teacher"], 0.0
    return config


def _refuse(values, names, why):
    """Raises UserError if the user gave one of these arguments, which would have no effect here."""
    if given := [f"{name}={values[name]}" for name in names if values[name]]:
        raise UserError(f"{why}, and reads no {', no '.join(given)}: leave it out")


def _large(config):
    config.dino.update(dict(prototypes=131_072, bottleneck=384, centring="sinkhorn"))
    config.dino.update(dict(patch_prototypes=131_072, patch_bottleneck=256, koleo_group=32))
    config.data.path, config.data.train_split = "imagenet21k", "train[51200:]"
    config.data.dev_split, config.data.test_split = "train[25600:51200]", "train[:25600]"


def _high_resolution(source, argument):
    """Returns the config of the last phase, which starts from the model and heads of `source`."""
    if not source and argument != "smoke":
        raise UserError("run=high_resolution goes on from a run: run=high_resolution,from=WORKDIR")
    config = self_distillation(HIGH_RESOLUTION, 3072, 98)
    if argument == "smoke":
        config.model.name = "DINOv2-L/14"
    else:
        config.finetune.checkpoint = checkpoint_of(source)
        config.model.update(dict(name="", mean=None, std=None))
    config.data.image_size, config.data.test_resize = 518, 592
    _losses(config)
    _large(config)
    config.model.stochastic_depth, config.optimizer.embedding_rate = 0.4, 0.2
    config.evaluate_every, config.checkpoint.every = 2500, 500
    return config


def _losses(config):
    # The authors' code initializes the norms of prototypes to 1. It trains them, with weight decay,
    # like other parameters.
    config.dino.update(dict(prototype_lengths="learned"))
    config.dino.update(dict(patch_weight=1.0, koleo=0.1, koleo_group=64))  # The batch of a GPU.
    config.model.uniform_depth, config.model.depth_by = True, "subset"
    config.optimizer.clip = "module"


def _on_from(source):
    """Returns the config that continues the training of a published model, on one device."""
    config = self_distillation(ON, 64)
    config.finetune.checkpoint = checkpoint_of(source)
    config.model.update(dict(name="", dtype="float32", mean=None, std=None))
    config.data.source, config.data.path = "folder", ""
    config.data.train_split, config.data.test_split = "all[:95%]", "all[95%:]"
    _losses(config)
    config.dino.update(dict(prototypes=4096, koleo_group=None, local_size=98))
    config.optimizer.layer_decay = 0.9
    config.evaluate_every, config.checkpoint.every = 250, 250
    return config
