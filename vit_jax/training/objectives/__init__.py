"""What a run trains for. All objectives go through the one step of `training/step.py`.

An objective is a module whose parameters are what training needs beyond the model's; they are kept with the
run's state, and no checkpoint that is loaded from it has them. It has

  metrics                    names of what it reports beside the loss: shares of 1
  prepare(batch, keys)       the batch with what is drawn at random for each image, from its key
  (model, batch, rngs)       the loss and the metrics of each image, `[batch]`

and one that hides patches has `pictures(model, batch)`: what is visible, and what is predicted.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.config import is_supervised
from vit_jax.data.randaugment import resolve
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds
from vit_jax.models.image_model import TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.training.objectives.classification import Classification
from vit_jax.training.objectives.mae import MAE
from vit_jax.training.objectives.masked_patch import MaskedPatch

MASK_RATIOS = {"masked_patch": 0.5, "mae": 0.75}  # The papers'.


def make_objective(config: ConfigDict, model: nnx.Module, *, rngs: nnx.Rngs) -> nnx.Module:
    """The config's objective for a model, which may be abstract.

    Raises:
      UserError: it does not fit the model or the config's other values.
    """
    values = config.objective
    if is_supervised(config):
        if getattr(model, "distillation", "none") == "heads":
            raise UserError(
                "model.distillation='heads' trains its second head on a teacher's answers, and there is no "
                "teacher; model.distillation='token' trains the one head, and keeps the token"
            )
        return Classification(config.loss.name, config.loss.label_smoothing)
    _, mixup = resolve(config.augment.level, config.augment.randaugment, config.augment.mixup)
    given = dict(mixup=mixup, cutmix=config.augment.cutmix, erasing=config.augment.erasing)
    for key, value in given.items():
        if value:
            raise UserError(
                f"config.augment.{key} is {value} and must be 0: config.objective.name={values.name!r} "
                "predicts what is in whole images"
            )
    if config.finetune.train != "all" or config.optimizer.average:
        raise UserError(
            f"config.objective.name={values.name!r} trains all parameters and evaluates them as they are: "
            "config.finetune.train='all' and config.optimizer.average=0"
        )
    if not isinstance(model, TokenModel) or not model.embeds_pixels:
        raise UserError(
            f"config.objective.name={values.name!r} hides patches of pixels; the model must be a ViT, not a "
            "hybrid or a ResNet, whose features see beyond a patch"
        )
    if not model.pools_plainly:
        raise UserError(
            f"config.objective.name={values.name!r} trains nothing behind the encoder: it needs "
            "model.pooling='cls' or 'gap', model.pre_logits=False and model.fc_norm=False"
        )
    ratio = MASK_RATIOS[values.name] if values.mask_ratio is None else values.mask_ratio
    if values.name == "masked_patch":
        return MaskedPatch(model, ratio, values.target, rngs=rngs)
    return MAE(
        model,
        ratio,
        dim=values.decoder_dim,
        depth=values.decoder_depth,
        heads=values.decoder_heads,
        position=values.decoder_position,
        normalize_targets=values.normalize_targets,
        rngs=rngs,
    )


def forward_multiply_adds(objective: nnx.Module, model: nnx.Module) -> int:
    """Of an image's way to its loss; both may be abstract. A classifier's are those that the papers count."""
    if isinstance(objective, Classification):
        return count_multiply_adds(model)
    graphdef, weights = nnx.split((model, objective))

    def losses(weights, image, key):
        model, objective = nnx.merge(graphdef, weights)
        return objective(model, objective.prepare({"image": image}, key[None]))

    image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
    return traced_multiply_adds(losses, weights, image, jax.random.key(0))
