"""Masked prediction of a learned tokenizer's codes, and patch aggregation (BEiT v2, 2208.06366)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.image_model import TokenModel
from vit_jax.models.layers import named, run_layers
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.beit import RANDOM_CODES, BEiT, code_losses
from vit_jax.training.objectives.block_masked import BlockMasked, check_same_places
from vit_jax.training.objectives.frozen import TeacherSpec, WithHeads
from vit_jax.training.objectives.masking import check_hides_patches
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext
from vit_jax.training.objectives.prototypes import unit
from vit_jax.training.objectives.vqkd import Tokeniser

RANDOM_CODE_DIM = 32  # Width of the codes of the untrained tokenizer for smoke tests.


class BEiTv2(BEiT):
    """Two predictions of masked patches' codes: by the last layer, and by patch aggregation.

    The tokenizer is the result of a `vqkd` run. For patch aggregation, additional layers read the
    last layer's class token and an earlier layer's patches. The earlier patches contain too little
    information about the codes, so the class token learns to contain the missing information.

    The two predictions use the same norm and head. The loss is the sum of their cross-entropies.
    Fine-tuning does not use the additional layers.

    Args:
      early: number of the layer whose patches are aggregated, counted from 1.
      layers: number of aggregation layers; 0: no patch aggregation.
      scheme: initialization of the aggregation layers; None: the model's initialization.

    Raises:
      UserError: `ratio` masks no patch, or all patches; or the model has no class token, or no
        layer after `early`.
    """

    section: ClassVar = "beitv2"

    def __init__(
        self,
        model: TokenModel,
        codes: int,
        ratio: float,
        early: int,
        layers: int,
        *,
        scheme: initializers.Scheme | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(model, codes, ratio, rngs=rngs)
        if layers:
            _check_aggregates(model, early)
        self.early = early
        self.layers = model.more_layers(layers, early, scheme, rngs=rngs) if layers else None

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        return BlockMasked.views(config)

    @property
    def metrics(self) -> dict[str, str]:
        """A dict with the formats of the metrics, such as `number`.

        `accuracy` is the share of masked patches whose code is predicted correctly.
        `aggregated_loss` is the cross-entropy of the patch aggregation's prediction. Without patch
        aggregation, `accuracy` is the only metric.
        """
        more = {"aggregated_loss": "number"} if self.layers is not None else {}
        return {"accuracy": "share"} | more

    @staticmethod
    def teacher_spec(config: RunOptions) -> TeacherSpec:
        return BEiT.teacher_spec(config)._replace(objective="vqkd", make_heads=Tokeniser)

    @classmethod
    def random_teacher(cls, config: RunOptions, num_classes: int, rngs: nnx.Rngs) -> WithHeads:
        encoder = BlockMasked.random_teacher(config, 0, rngs)
        shapes = {
            "projection/hidden/kernel": (encoder.dim, encoder.dim),
            "projection/out/kernel": (encoder.dim, RANDOM_CODE_DIM),
            "codebook": (RANDOM_CODES, RANDOM_CODE_DIM),
        }
        tokeniser = Tokeniser({}, shapes, rngs=rngs)
        tokeniser.codebook[...] = unit(jax.random.normal(rngs.params(), shapes["codebook"]))
        return WithHeads(encoder, tokeniser)

    @classmethod
    def make(
        cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs, *, frozen: WithHeads
    ) -> "BEiTv2":
        check_hides_patches(config, model)
        options = config.beitv2
        codes = cls.count_codes(config, model, frozen)
        early = options.aggregate_from
        if early is None:
            early = max(1, model.depth - 3)  # The authors' 9 of 12 layers, and 21 of 24.
        scheme = (
            initializers.aggregation(model.dim) if config.model.initialization == "beit" else None
        )
        layers = options.aggregate_layers
        return cls(model, codes, options.mask_ratio, early, layers, scheme=scheme, rngs=rngs)

    @classmethod
    def count_codes(cls, config: RunOptions, model: TokenModel, frozen: WithHeads) -> int:
        encoder, tokeniser = frozen.model, frozen.heads
        start = f"config.objective.teacher={config.objective.teacher!r}"
        if not isinstance(encoder, TokenModel) or tokeniser.features != encoder.dim:
            raise UserError(f"{start} has a tokenizer of other patches than its model's")
        check_same_places(
            config, model, "codes", encoder.grid, encoder.image_size, encoder.patch_size
        )
        return tokeniser.count

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        target_tokens = self.masked_tokens(batch)
        logits, *aggregated = self.predict_each(model, batch, context.rngs)
        metrics = {"accuracy": (logits.argmax(-1) == target_tokens).mean(axis=1)}
        losses = code_losses(logits, target_tokens)
        if aggregated:
            metrics["aggregated_loss"] = code_losses(*aggregated, target_tokens)
            losses = losses + metrics["aggregated_loss"]
        return Loss(losses, metrics)

    def tokens(self, batch: Batch) -> jax.Array:
        x = self.frozen.model.features(batch.get("taught", batch["image"]), dense=True)
        return self.frozen.heads(x.reshape(len(x), self.patches, -1))

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        return self.predict_each(model, batch, rngs)[0]

    def predict_each(
        self, model: TokenModel, batch: Batch, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, ...]:
        """Returns one or two predictions: the logits of the masked patches' codes.

        The first prediction is from the last layer. With patch aggregation, the second prediction
        is from the aggregation layers. Each is float32 `[batch, masked, codes]`.
        """
        x = self.embed(model, batch, rngs)
        if self.layers is None:
            return (self.logits(model, model.encode(x, rngs), batch),)
        last, early = model.encode(x, rngs, after=self.early)
        mixed = self.aggregate(model, last, early, rngs)
        return tuple(self.logits(model, tokens, batch) for tokens in (last, mixed))

    def aggregate(
        self, model: TokenModel, last: jax.Array, early: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Applies the aggregation layers to the class token and the patches of different layers.

        Returns all tokens after the last aggregation layer, `[batch, tokens, dim]`.

        Args:
          last: all tokens after the last layer, `[batch, tokens, dim]`. Provides the class token.
          early: all tokens after an earlier layer, `[batch, tokens, dim]`. Provides the patches.
        """
        positions: dict[str, Any] = model.layer_positions(rngs)
        layers = list(self.layers.values())
        keys = [None] * len(layers)
        if rngs is not None:
            keys = list(jax.random.split(rngs.dropout(), len(layers)))

        def call(layer, x, key):
            layer_rngs = None if key is None else nnx.Rngs(dropout=key)
            return named("tokens", layer(x, layer_rngs, **positions))

        x = jnp.concatenate([last[:, : model.prefix], early[:, model.prefix :]], axis=1)
        return run_layers(call, layers, x, keys, remat=model.options.remat)


def _check_aggregates(model: TokenModel, early: int) -> None:
    """Raises UserError if the model has no class token, or no layer after layer `early`."""
    if not model.prefix:
        raise UserError(
            "config.objective.name='beitv2' aggregates patches through the class token: "
            "model.cls_token=True, or beitv2.aggregate_layers=0"
        )
    if not 0 < early < model.depth:
        raise UserError(
            f"config.beitv2.aggregate_from = {early} must be below the model's {model.depth} "
            "layers, and not 0"
        )


OBJECTIVE = BEiTv2
