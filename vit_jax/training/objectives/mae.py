"""Masked autoencoders (He et al., 2022; 2111.06377): the encoder reads only the visible patches."""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.layers import named, numbered, run_layers
from vit_jax.models.position import sincos2d
from vit_jax.models.transformer import EncoderBlock, Stack
from vit_jax.options.objective import MAEOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.hidden_pixels import HiddenPixels
from vit_jax.training.objectives.masking import check_hides_patches
from vit_jax.training.objectives.objective import Batch


class MAE(HiddenPixels):
    """Prediction of hidden patches' pixels from the encoder's output for visible patches.

    The objective's parameters are the decoder, a smaller Transformer over all patches. The decoder
    replaces each hidden patch by a mask token, adds fixed position embeddings, and uses the model's
    epsilon in its norms.

    Args:
      model: the ViT to train. It must add position embeddings at the stem (before the first layer).
      options: the section `mae` of the config.

    Raises:
      UserError: no patch or all patches are hidden, or the model cannot skip patches.
    """

    section: ClassVar = "mae"
    made_by: ClassVar = ("decoder_dim", "decoder_depth", "decoder_heads", "decoder_position")

    def __init__(self, model: nnx.Module, options: MAEOptions, *, rngs: nnx.Rngs):
        if not model.keeps_any:
            raise UserError(
                "config.objective.name='mae' leaves patches out: it needs model.attention='full' "
                "and model.position='sincos2d_mae', 'sincos2d', '1d' or '2d' at the stem, "
                "without rope"
            )
        super().__init__(
            model.grid, model.patch_size, options.mask_ratio, options.normalize_targets
        )
        self.position = options.decoder_position
        dim, heads = options.decoder_dim, options.decoder_heads
        if dim % heads or dim % 4:
            raise UserError(
                f"config.mae.decoder_dim = {dim} must be divisible by 4 and by "
                f"decoder_heads = {heads}"
            )
        dtype, epsilon = model.patch_embedding.dtype, model.norm.epsilon
        values = dict(dtype=dtype, rngs=rngs)
        self.embedding = nnx.Linear(model.dim, dim, kernel_init=initializers.xavier(), **values)
        self.mask = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, dim)))
        scheme = initializers.SCHEMES["mae"]
        stack = Stack(dim, heads, 4 * dim, gelu="erf", epsilon=epsilon, scheme=scheme, dtype=dtype)
        depth = options.decoder_depth
        self.blocks = numbered(EncoderBlock(stack, rngs=rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(dim, epsilon=epsilon, **values)
        outputs = self.patch**2 * model.channels
        self.prediction = nnx.Linear(
            dim, outputs, kernel_init=initializers.xavier(), dtype=jnp.float32, rngs=rngs
        )

    @classmethod
    def make(cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "MAE":
        check_hides_patches(config, model)
        return cls(model, config.mae, rngs=rngs)

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        visible, hidden = jnp.split(batch["order"], [self.visible], axis=1)
        x = model.assemble(model.patches(batch["image"]), rngs, keep=visible)
        x = self.embedding(model.norm(model.encode(x, rngs)))
        positions = jnp.asarray(sincos2d(self.grid, self.mask.shape[-1], self.position), x.dtype)
        prefix = x[:, : model.prefix]
        seen = x[:, model.prefix : model.prefix + self.visible] + positions[visible]
        masks = self.mask[...].astype(x.dtype) + positions[hidden]
        # The last layer only computes the first tokens, and only hidden patches are predicted.
        # Hidden patches are therefore the first tokens. The order does not change the result of
        # attention.
        x = named("tokens", jnp.concatenate([masks, prefix, seen], axis=1))

        def call(block, x, _, read=None):
            return named("tokens", block(x, read=read))

        *blocks, last = self.blocks.values()
        run = partial(run_layers, remat=model.options.remat)
        x = run(call, blocks, x, [None] * len(blocks), scan=model.options.scan)
        x = run(partial(call, read=hidden.shape[1]), [last], x, [None])
        return self.prediction(self.norm(x))


OBJECTIVE = MAE
