"""Fully convolutional masked autoencoders (ConvNeXt V2, Woo et al., 2023; 2301.00808)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.convnext import Common, ConvNeXtBlock
from vit_jax.models.layers import named, numbered, run_blocks
from vit_jax.options.objective import FCMAEOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.hidden_pixels import HiddenPixels
from vit_jax.training.objectives.masking import pick, put
from vit_jax.training.objectives.objective import Batch, check_self_supervised


class FCMAE(HiddenPixels):
    """Prediction of the pixels of hidden patches by a ConvNeXt.

    A patch is the image region of one position in the ConvNeXt's last feature map. Hidden patches
    do not influence the encoder, including its GRN layers, as with sparse convolutions.

    The objective's parameters are the decoder: a dense layer, a mask token for hidden patches,
    ConvNeXt V2 blocks over the map of all patches, and another dense layer. All kernels have the
    model's initialization.
    """

    section: ClassVar = "fcmae"
    made_by: ClassVar = ("decoder_dim", "decoder_blocks")

    def __init__(self, model: nnx.Module, options: FCMAEOptions, *, rngs: nnx.Rngs):
        side, dim = model.mask_patch_size, options.decoder_dim
        grid = model.image_size[0] // side, model.image_size[1] // side
        super().__init__(grid, side, options.mask_ratio, options.normalize_targets)
        common = Common(
            grn=True,
            gelu=model.options.gelu,
            layer_scale=None,
            epsilon=model.stem_norm.epsilon,
            dtype=model.stem["0"].dtype,
            centred=True,
        )
        self.embedding = common.dense(model.options.widths[-1], dim, rngs)
        self.mask = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, dim)))
        blocks = options.decoder_blocks
        self.blocks = numbered(ConvNeXtBlock(dim, common, rngs) for _ in range(blocks))
        outputs = side**2 * model.channels
        self.prediction = common._replace(dtype=jnp.float32).dense(dim, outputs, rngs)

    @classmethod
    def make(cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "FCMAE":
        check_self_supervised(config)
        side = model.mask_patch_size
        if side is None:
            raise UserError(
                "config.objective.name='fcmae' excludes patches from convolutions: the model "
                "must be a ConvNeXt with model.stem='patches', whose outputs depend on one patch "
                "each"
            )
        if config.model.head_hidden:
            raise UserError(
                "config.objective.name='fcmae' trains nothing behind the last stage: it needs "
                "model.head_hidden=None"
            )
        height, width = model.image_size
        if height % side or width % side:
            raise UserError(
                f"config.objective.name='fcmae' hides patches of {side}x{side} pixels, which do "
                f"not divide images of {height}x{width}: give config.data.image_size a multiple "
                f"of {side}"
            )
        return cls(model, config.fcmae, rngs=rngs)

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        visible, hidden = jnp.split(batch["order"], [self.visible], axis=1)
        x = self.embedding(model.features_of(batch["image"], visible, rngs))
        masks = jnp.broadcast_to(
            self.mask[...].astype(x.dtype), (len(x), self.patches, x.shape[-1])
        )
        x = named("features", put(masks, visible, x).reshape(len(x), *self.grid, -1))
        x = run_blocks(
            [*self.blocks.values()], x, 0, lambda block: 0.0, None, remat=model.options.remat
        )
        return self.prediction(pick(x.reshape(len(x), self.patches, -1), hidden))


OBJECTIVE = FCMAE
