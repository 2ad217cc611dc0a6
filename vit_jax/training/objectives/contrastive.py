"""Contrastive learning from image-text pairs: CLIP (2103.00020) and SigLIP (2303.15343).

The run's model is the image encoder (image tower). The text encoder (text tower) and the scale of
the similarities are parameters of the objective.

SigLIP 2 (2502.14786) adds a decoder that captions the image. In the last fifth of the run, SigLIP 2
also adds self-distillation and masked prediction on augmented views. The teacher is an EMA of the
image encoder.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.fields import TEXT, Field, draw_caption
from vit_jax.data.views import Augmentation, View
from vit_jax.errors import UserError
from vit_jax.models.image_model import TokenModel
from vit_jax.models.image_text import unit
from vit_jax.models.retrieval import RECALLS, Paired, distinct, recalls
from vit_jax.models.text import TextTower, text_options, tokenizer_of
from vit_jax.models.text_tokens import tokenizer_files, tokenizer_identity
from vit_jax.options.objective import ContrastiveOptions
from vit_jax.options.run import RunOptions
from vit_jax.options.text import TextOptions
from vit_jax.training.objectives.captioning import CaptionDecoder
from vit_jax.training.objectives.dino import DINO
from vit_jax.training.objectives.masking import shuffled, split_keys
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)
from vit_jax.training.objectives.pair_losses import Pairs, sigmoid_losses, softmax_losses

GLOBAL = "global"  # Name of the large views for self-distillation.
GLOBAL_AREA = 0.4, 1.0  # Area of a global crop relative to the image, as in DINO.


class Mirrored(NamedTuple):
    """Augmentation: a horizontal flip with probability 1/2, followed by `augment`."""

    augment: Augmentation

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        flipped = pixels[:, ::-1] if rng.random() < 0.5 else pixels
        return self.augment(np.ascontiguousarray(flipped), rng)


class Contrastive(Objective):
    """Matching of images and captions within a batch, with a sigmoid or a softmax loss.

    The objective's parameters are the text encoder, and the logarithm of the logits' scale. The
    sigmoid loss also has a bias. The caption decoder and the heads of self-distillation are
    optional.

    Args:
      decoder: the caption decoder; None: no captioning.
      distillation: self-distillation of the image encoder; None: no self-distillation.
      distilled_from: number of updates before self-distillation starts.

    Attributes:
      log_every: number of steps over which metrics are averaged.
    """

    log_every = 1

    section = "contrastive"
    split_metrics: ClassVar = {
        f"recall@{k}_{way}": "share" for way in ("image_to_text", "text_to_image") for k in RECALLS
    }
    files_option = "contrastive.tokenizer"
    made_by = (
        *("text_tower", "text_length", "text_dim", "text_depth", "text_heads", "text_mlp_dim"),
        *("text_gelu", "vocabulary"),
    )
    optional = ("decoder", "distillation")

    def __init__(
        self,
        text: TextOptions,
        options: ContrastiveOptions,
        decoder: CaptionDecoder | None = None,
        distillation: DINO | None = None,
        distilled_from: int = 0,
        *,
        rngs: nnx.Rngs,
    ):
        self.text = TextTower(text, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.log(jnp.float32(options.initial_scale)))
        sigmoid = options.loss == "sigmoid"
        self.logit_bias = nnx.Param(jnp.float32(options.initial_bias)) if sigmoid else None
        self.max_scale = options.max_scale
        self.text_frozen = options.text_frozen
        self.decoder, self.distillation = decoder, distillation
        self.weights = options.captioning, options.self_distillation
        self.parallel, self.distilled_from = options.parallel_captions, distilled_from
        self.patch_dropout = options.patch_dropout

    @property
    def metrics(self) -> dict[str, str]:
        """A dict with the format of each metric, `share` or `number`.

        `image_to_text` is the accuracy of matching in a batch, and `scale` the scale of the
        similarities.
        """
        found = {"image_to_text": "share", "scale": "number"}
        if self.decoder is not None:
            found["caption_loss"] = "number"
        if self.distillation is not None:
            found |= {"distillation_loss": "number"} | self.distillation.metrics
        return found

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return config.contrastive.self_distillation > 0

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        if not config.contrastive.self_distillation:
            return (View(),)

        def changed(view: View) -> View:
            area = GLOBAL_AREA if view.name == "image" else view.crop["area"]
            return view._replace(
                name=GLOBAL if view.name == "image" else view.name,
                crop={"kind": "random_resized", "area": area},
                augment=None,
                distort=tuple(map(Mirrored, view.distort)),
                training_only=True,
            )

        return (View(), *map(changed, DINO.views(config)))

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
        return tokenizer_files(Path(config.contrastive.tokenizer))

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
        options, start = config.contrastive, 0
        decoder = distillation = None
        if options.patch_dropout:
            _check_keeps_any(model)
        if options.captioning:
            if not isinstance(model, TokenModel):
                raise UserError(
                    "config.contrastive.captioning needs a model with tokens, such as a ViT: set "
                    "it to 0, or choose such a model"
                )
            depth = options.decoder_depth or max(1, options.text_depth // 2)
            end = tokenizer_of(options).end
            decoder = CaptionDecoder(text, depth, model.dim, end, rngs=rngs)
        if options.self_distillation:
            start = int(options.self_distillation_from * steps)
            distillation = DINO.make(config, model, steps - start, rngs)
        made = cls(text, options, decoder, distillation, start, rngs=rngs)
        made.log_every = config.log_every
        return made

    def frozen_prefixes(self) -> dict[str, int]:
        frozen = {"text": 2**31 - 1} if self.text_frozen else {}
        if self.distillation is None:
            return frozen
        later = self.distillation.frozen_prefixes()
        frozen |= {f"distillation/{path}": self.distilled_from + n for path, n in later.items()}
        return frozen | ({"distillation": self.distilled_from} if self.distilled_from else {})

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds random values of each image for patch dropout, captioning and self-distillation.

        A batch in evaluation is returned unchanged: there is no patch dropout, and captions are
        predicted token by token.

        Returns:
          The batch with these additional entries:

          - `keep`, with patch dropout: a random key for each image.
          - `parallel`, with captioning: bool `[batch]`, True if all tokens of the caption are
            predicted in parallel.
          - with self-distillation: the masks from `DINO.prepare`.
        """
        if "valid" in batch:
            return batch
        of_patches, of_captions, of_masks = split_keys(keys, 3)
        if self.distillation is not None and GLOBAL in batch:
            batch = self.distillation.prepare(batch, of_masks)
        if self.decoder is not None:
            draws = jax.vmap(jax.random.uniform)(of_captions)
            batch |= {"parallel": draws < self.parallel}
        if self.patch_dropout:
            batch |= {"keep": of_patches}
        return batch

    @property
    def scale(self) -> jax.Array:
        """Factor by which the cosine similarities of images and texts are multiplied."""
        logarithm = self.logit_scale[...]
        if self.max_scale is not None:
            logarithm = _at_most(logarithm, math.log(self.max_scale))
        return jnp.exp(logarithm)

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the metrics of each image.

        The loss is the sum of

        - the sigmoid or softmax loss over the captions of the batch,
        - `captioning` times the mean cross-entropy of the caption's tokens,
        - `self_distillation` times DINO's loss, which starts at the share `self_distillation_from`
          of the run.

        The metrics are the accuracy of matching, the scale of the similarities, the caption loss
        and the loss of self-distillation. An image is matched correctly if its own caption is the
        most similar one of the batch. If n captions are equally similar, its accuracy is 1/n.
        """
        embeddings, patches = self._embed(model, batch, context.rngs)
        images, texts = unit(embeddings.astype(jnp.float32)), unit(self.text(batch[TEXT]))
        scale = self.scale
        keep = batch.get("valid", jnp.ones(len(images), bool))
        pairs = Pairs(images, texts, scale, keep)
        if self.logit_bias is None:
            losses, matched = softmax_losses(pairs)
        else:
            losses, matched = sigmoid_losses(pairs, self.logit_bias[...], context.mesh)
        metrics = {"image_to_text": matched, "scale": jnp.full(len(images), scale)}
        captioning, distillation = self.weights
        aux = {}
        if self.decoder is not None:
            parallel = batch.get("parallel", jnp.zeros(len(images), bool))
            metrics["caption_loss"] = self.decoder.losses(patches, batch[TEXT], parallel)
            losses = losses + captioning * metrics["caption_loss"]
        if self.distillation is not None and GLOBAL in batch:
            distilled = self._distil(model, batch, context)
            metrics |= {"distillation_loss": distilled.each} | distilled.metrics
            losses, aux = losses + distillation * distilled.each, distilled.aux
        outputs = {"images": images, "texts": texts, "tokens": batch[TEXT]}
        return Loss(losses, metrics, aux, outputs={} if context.rngs else outputs)

    def _embed(
        self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns image embeddings `[batch, dim]`, and encoded patches for the caption decoder.

        Without a caption decoder the patches are None.
        """
        images = batch["image"]
        if self.decoder is None and "keep" not in batch:
            return model(images, rngs), None
        keep = None
        if "keep" in batch:
            count = math.prod(model.grid)
            kept = max(1, round((1 - self.patch_dropout) * count))
            keep = shuffled(batch["keep"], count)[:, :kept]
        x = model.encode(model.assemble(model.patches(images), rngs, keep=keep), rngs)
        x = x if model.norm is None else model.norm(x)
        return model.classify(x), x[:, model.patch_tokens]

    def _distil(self, model: nnx.Module, batch: Batch, context: StepContext) -> Loss:
        """Returns the loss and the metrics of self-distillation for each image, `[batch]`.

        All values are zero before self-distillation starts.
        """
        graphdef, state = nnx.split((model, self.distillation))
        key = None if context.rngs is None else context.rngs.dropout()
        views = batch | {"image": batch[GLOBAL]}

        def distil(state):
            model, distillation = nnx.merge(graphdef, state)
            rngs = None if key is None else nnx.Rngs(dropout=key)
            update = context.update - self.distilled_from
            found = distillation(model, views, context._replace(rngs=rngs, update=update))
            return found.each, found.metrics, found.aux

        def nothing(state):
            found = jax.eval_shape(distil, state)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)

        each, metrics, aux = jax.lax.cond(
            context.update > self.distilled_from, distil, nothing, state
        )
        return Loss(each, metrics, aux)

    def initial_state(self, params: dict) -> dict[str, Any]:
        return {} if self.distillation is None else self.distillation.initial_state(params)

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        """Returns the state of self-distillation after an update.

        Until self-distillation starts, the teacher is a copy of the student.
        """
        if self.distillation is None:
            return state
        first = self.distillation.initial_state(params)
        later = self.distillation.update_state(state, params, aux, update - self.distilled_from)
        return jax.tree.map(
            lambda x, y: jnp.where(update > self.distilled_from, x, y), later, first
        )

    def warning(self, means: dict[str, float], update: int) -> str | None:
        # Before self-distillation starts, its metrics are 0. Means that include such steps would be
        # too small, and would cause a false warning.
        if self.distillation is None or update - self.log_every < self.distilled_from:
            return None
        return self.distillation.warning(means, update - self.distilled_from)

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        """Returns the multiply-adds of an image, averaged over the steps of the run.

        Self-distillation runs only in a part of the steps.
        """
        if self.distillation is None:
            return super().multiply_adds(model, batch)
        alone = {key: x for key, x in batch.items() if key in ("image", TEXT)} if batch else None
        steps = self.distilled_from + self.distillation.steps
        share = self.distillation.steps / steps
        return super().multiply_adds(model, alone) + share * self.distillation.multiply_adds(model)

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns recall at 1, 5 and 10 over the split, from images to captions and vice versa.

        A retrieved caption is correct if its tokens equal the tokens of the image's own caption.
        """
        return recalls(self.paired(outputs)[0])

    @staticmethod
    def paired(outputs: dict[str, np.ndarray]) -> tuple[Paired, np.ndarray]:
        first, texts = distinct(outputs["tokens"])
        pairs = np.stack([np.arange(len(outputs["images"])), texts], axis=1)
        return Paired(outputs["images"], outputs["texts"][first], pairs), first


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _at_most(x: jax.Array, limit: float) -> jax.Array:
    """Returns min(x, limit) of a parameter x, with a gradient that can lower x to the limit.

    If x is at the limit or above, only gradients that lower x are passed. The gradient of
    `jnp.minimum` would be 0 above the limit, and x would stay there. CLIP's code instead clips the
    parameter itself after each update.
    """
    return jnp.minimum(x, limit)


def _at_most_backward(limit: float, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where((x < limit) | (gradient > 0), gradient, 0),)


_at_most.defvjp(lambda x, limit: (_at_most(x, limit), x), _at_most_backward)


def _check_keeps_any(model: nnx.Module) -> None:
    """Raises UserError if the model does not support patch dropout."""
    if not isinstance(model, TokenModel) or not model.keeps_any or model.options.registers:
        raise UserError(
            "config.contrastive.patch_dropout leaves patches out: it needs a ViT with full "
            "attention and position embeddings at the stem, without rope and registers, or 0"
        )


def _width(model: nnx.Module) -> int:
    """Returns the width of the image encoder's outputs."""
    graphdef, params = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
    return jax.eval_shape(lambda x, y: nnx.merge(graphdef, x)(y), params, image).shape[-1]


OBJECTIVE = Contrastive
