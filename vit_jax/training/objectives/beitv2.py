"""Masked prediction of a learned tokeniser's codes, with patch aggregation (BEiT v2, 2208.06366)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.image_model import TokenModel
from vit_jax.models.layers import named, run_layers
from vit_jax.options import Option, of_objectives, whole
from vit_jax.training.objectives.beit import BEiT, code_losses
from vit_jax.training.objectives.block_masked import BlockMasked, check_same_places
from vit_jax.training.objectives.frozen import Frozen, WithHeads
from vit_jax.training.objectives.masking import check_hides_patches
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, Now
from vit_jax.training.objectives.prototypes import unit
from vit_jax.training.objectives.vqkd import Tokeniser

OPTIONS = {
    "objective.aggregate_from": Option(
        None,
        whole(1, 10_000),
        "Layer whose patches beitv2's patch aggregation reads, from 1; None: the third before the last.",
        needs=of_objectives("beitv2", also="objective.aggregate_layers"),
    ),
    "objective.aggregate_layers": Option(
        2,
        whole(0, 100),
        "Layers of beitv2's patch aggregation; 0: there is none.",
        smoke=1,
        needs=of_objectives("beitv2"),
    ),
}


class BEiTv2(BEiT):
    """Predicts the codes of masked patches twice: from the last layer, and through the class token.

    The tokeniser is what a run of `vqkd` leaves. In patch aggregation a few more layers read the last
    layer's class token with the patches of an earlier one, which say too little of the codes, so that the
    class token must say what is left. They end in the same norm and head; the loss is the sum of both
    cross-entropies. In fine-tuning these layers are left behind.

    Args:
      model: the ViT that is trained.
      codes: number of the tokeniser's codes.
      ratio: share of the patches that is masked, rounded to whole patches; None: the authors' 75 of 196.
      early: number of layers before the patches that are aggregated.
      layers: of the aggregation; 0: there is none.
      scheme: how these start; None: as the model's.
      rngs: the key for initialisation.

    Raises:
      UserError: no patch or all are masked, or there is nothing to aggregate.
    """

    def __init__(
        self,
        model: TokenModel,
        codes: int,
        ratio: float | None,
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
    def views(config: ConfigDict) -> tuple[View, ...]:
        """The picture, and where the tokeniser sees it at another size, that one too."""
        return BlockMasked.views(config)

    @property
    def metrics(self) -> dict[str, str]:
        """Names how often the likeliest code is the right one, and the loss of what is aggregated."""
        more = {"aggregated_loss": "number"} if self.layers is not None else {}
        return {"accuracy": "share"} | more

    @staticmethod
    def learns_from(config: ConfigDict) -> Frozen:
        return BEiT.learns_from(config)._replace(objective="vqkd", beside=Tokeniser)

    @classmethod
    def random_teacher(cls, config: ConfigDict, num_classes: int, rngs: nnx.Rngs) -> WithHeads:
        encoder, values = BlockMasked.random_teacher(config, 0, rngs), config.objective
        shapes = {
            "projection/hidden/kernel": (encoder.dim, encoder.dim),
            "projection/out/kernel": (encoder.dim, values.code_dim),
            "codebook": (values.codes, values.code_dim),
        }
        tokeniser = Tokeniser({}, shapes, rngs=rngs)
        tokeniser.codebook[...] = unit(jax.random.normal(rngs.params(), shapes["codebook"]))
        return WithHeads(encoder, tokeniser)

    @classmethod
    def make(
        cls, config: ConfigDict, model: nnx.Module, steps: int, rngs: nnx.Rngs, *, frozen: WithHeads
    ) -> "BEiTv2":
        check_hides_patches(config, model)
        values = config.objective
        codes = cls.count_codes(config, model, frozen)
        early = values.aggregate_from
        if early is None:
            early = max(1, model.depth - 3)  # The authors' 9 of 12 layers, and 21 of 24.
        own = initializers.aggregation(model.dim) if config.model.initialization == "beit" else None
        layers = values.aggregate_layers
        return cls(model, codes, values.mask_ratio, early, layers, scheme=own, rngs=rngs)

    @classmethod
    def count_codes(cls, config: ConfigDict, model: TokenModel, frozen: WithHeads) -> int:
        encoder, tokeniser = frozen.model, frozen.heads
        start = f"config.objective.teacher={config.objective.teacher!r}"
        if not isinstance(encoder, TokenModel) or tokeniser.features != encoder.dim:
            raise UserError(f"{start} has a tokeniser of other patches than its model's")
        check_same_places(config, model, "codes", encoder.grid, encoder.image_size, encoder.patch_size)
        return tokeniser.count

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        """The loss of each image, and the share of its masked patches whose code is the likeliest.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, `taught` where the tokeniser sees another
            size, and what `prepare` drew.
        """
        wanted = self.masked_tokens(batch)
        logits, *aggregated = self.predict_each(model, batch, now.rngs)
        metrics = {"accuracy": (logits.argmax(-1) == wanted).mean(axis=1)}
        losses = code_losses(logits, wanted)
        if aggregated:
            metrics["aggregated_loss"] = code_losses(*aggregated, wanted)
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
        """Scores the codes of the masked patches, float32 `[batch, masked, codes]`: by the last layer, and by
        the aggregation where there is one."""
        x = self.embed(model, batch, rngs)
        if self.layers is None:
            return (self.logits(model, model.encode(x, rngs), batch),)
        last, early = model.encode(x, rngs, after=self.early)
        mixed = self.aggregate(model, last, early, rngs)
        return tuple(self.logits(model, tokens, batch) for tokens in (last, mixed))

    def aggregate(
        self, model: TokenModel, last: jax.Array, early: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """The last layer's class token and an earlier layer's patches after the layers that read both.

        Args:
          last, early: all tokens, `[batch, tokens, dim]`, as the result is.
        """
        positions: dict[str, Any] = model.layer_positions(rngs)
        layers = list(self.layers.values())
        keys = [None] * len(layers) if rngs is None else list(jax.random.split(rngs.dropout(), len(layers)))

        def call(layer, x, key):
            return named("tokens", layer(x, None if key is None else nnx.Rngs(dropout=key), **positions))

        x = jnp.concatenate([last[:, : model.prefix], early[:, model.prefix :]], axis=1)
        return run_layers(call, layers, x, keys, remat=model.remat)


def _check_aggregates(model: TokenModel, early: int) -> None:
    """Raises UserError where a model has no class token, or no layer after so many that says more in it."""
    if not model.prefix:
        raise UserError(
            "config.objective.name='beitv2' aggregates patches through the class token: "
            "model.cls_token=True, or objective.aggregate_layers=0"
        )
    if not 0 < early < model.depth:
        raise UserError(
            f"config.objective.aggregate_from = {early} must be below the model's {model.depth} layers, and "
            "not 0"
        )
