"""Contrastive learning from image-text pairs: CLIP (2103.00020) and SigLIP (2303.15343).

The model of the run is the image tower. The text tower and the scale of the similarities are the
objective's parameters.
"""

from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.fields import TEXT, Field, draw_caption
from vit_jax.errors import UserError
from vit_jax.models.image_text import unit
from vit_jax.models.retrieval import RECALLS, Paired, distinct, recalls
from vit_jax.models.text import TextTower, text_options, tokenizer_of
from vit_jax.models.text_tokens import TOKENIZER_FILES, tokenizer_identity
from vit_jax.options.objective import ContrastiveOptions
from vit_jax.options.run import RunOptions
from vit_jax.options.text import TextOptions
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)
from vit_jax.training.objectives.pair_losses import Pairs, sigmoid_losses, softmax_losses


class Contrastive(Objective):
    """Matching of images and captions within a batch, by a sigmoid of each pair or by a softmax.

    Parameters are the text tower's, and the logarithm of the scale and the bias of the logits.

    Args:
      text: arguments of the text tower.
      options: the config's section.
      rngs: random keys for initialization.
    """

    section = "contrastive"
    metrics: ClassVar = {"image_to_text": "share", "scale": "number"}
    split_metrics: ClassVar = {
        f"recall@{k}_{way}": "share" for way in ("image_to_text", "text_to_image") for k in RECALLS
    }
    made_by = (
        *("text_tower", "text_length", "text_dim", "text_depth", "text_heads", "text_mlp_dim"),
        *("text_gelu", "vocabulary"),
    )

    def __init__(self, text: TextOptions, options: ContrastiveOptions, *, rngs: nnx.Rngs):
        self.text = TextTower(text, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.log(jnp.float32(options.initial_scale)))
        sigmoid = options.loss == "sigmoid"
        self.logit_bias = nnx.Param(jnp.float32(options.initial_bias)) if sigmoid else None
        self.max_scale = options.max_scale
        self.text_frozen = options.text_frozen

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        tokenizer = tokenizer_of(config.contrastive)

        def encode(captions, rng):
            return tokenizer([draw_caption(captions, rng)])[0]

        options = config.contrastive
        identity = f"{tokenizer_identity(Path(options.tokenizer))}, {options.text_length} tokens"
        return (Field(TEXT, (options.text_length,), np.int32, encode, identity),)

    @staticmethod
    def files(config: RunOptions) -> tuple[Path, ...]:
        folder = Path(config.contrastive.tokenizer)
        return tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())

    @staticmethod
    def outputs(config: RunOptions) -> int:
        return config.contrastive.embedding_dim or 0

    @classmethod
    def make(
        cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs
    ) -> "Contrastive":
        check_self_supervised(config, all_trained=False)
        if model.num_classes and not config.finetune.checkpoint and not config.model.head_std:
            raise UserError(
                "config.contrastive.embedding_dim adds a projection, which must not start at "
                "zeros: set config.model.head_std, such as 0.02"
            )
        text = text_options(config.contrastive, _width(model), model.options.dtype)
        return cls(text, config.contrastive, rngs=rngs)

    def frozen_prefixes(self) -> dict[str, int]:
        return {"text": 2**31 - 1} if self.text_frozen else {}

    @property
    def scale(self) -> jax.Array:
        """Factor of the cosine similarities."""
        scale = jnp.exp(self.logit_scale[...])
        return scale if self.max_scale is None else jnp.minimum(scale, self.max_scale)

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image with the captions of the batch.

        Metrics are whether the image's own caption is the most similar one of the batch, and the
        scale of the similarities.
        """
        images = unit(model(batch["image"], context.rngs).astype(jnp.float32))
        texts = unit(self.text(batch[TEXT]))
        scale = self.scale
        keep = batch.get("mask", jnp.ones(len(images), bool))
        pairs = Pairs(images, texts, scale, keep)
        if self.logit_bias is None:
            losses, found = softmax_losses(pairs)
        else:
            losses, found = sigmoid_losses(pairs, self.logit_bias[...], context.mesh)
        metrics = {"image_to_text": found, "scale": jnp.full(len(images), scale)}
        outputs = {"images": images, "texts": texts, "tokens": batch[TEXT]}
        return Loss(losses, metrics, outputs={} if context.rngs else outputs)

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns recall at 1, 5 and 10 of the captions of all images, and of the images.

        The retrieved caption is right if its tokens are those of the image's first caption.
        """
        return recalls(self.paired(outputs)[0])

    @staticmethod
    def paired(outputs: dict[str, np.ndarray]) -> tuple[Paired, np.ndarray]:
        first, texts = distinct(outputs["tokens"])
        pairs = np.stack([np.arange(len(outputs["images"])), texts], axis=1)
        return Paired(outputs["images"], outputs["texts"][first], pairs), first


def _width(model: nnx.Module) -> int:
    """Returns the width of the image tower's outputs."""
    graphdef, params = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
    return jax.eval_shape(lambda x, y: nnx.merge(graphdef, x)(y), params, image).shape[-1]


OBJECTIVE = Contrastive
