"""Masked autoencoders (He et al., 2022; 2111.06377): the encoder reads only what is visible."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.layers import named, run_layers
from vit_jax.models.position import sincos2d
from vit_jax.models.transformer import EncoderBlock, Stack
from vit_jax.options import Option, flag, one_of, whole
from vit_jax.training.objectives.masking import check_hides_patches, patchify, pick, put, shuffled, unpatchify
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, Now, Objective

MASK_RATIO = 0.75  # The paper's.

OPTIONS = {
    "objective.decoder_dim": Option(512, whole(1, 2**20), "Width of mae's or vqkd's decoder.", smoke=32),
    "objective.decoder_depth": Option(8, whole(1, 10_000), "Layers of mae's or vqkd's decoder.", smoke=1),
    "objective.decoder_heads": Option(16, whole(1, 2**16), "Heads of mae's or vqkd's decoder.", smoke=2),
    "objective.decoder_position": Option(
        "sincos2d_mae", one_of("sincos2d", "sincos2d_mae"), "Fixed positions of mae's decoder."
    ),
    "objective.normalize_targets": Option(True, flag(), "To each patch's mean and deviation."),
}


class MAE(Objective):
    """Predicts the pixels of hidden patches from the encoder's output for the visible ones.

    Parameters: the decoder, which is a smaller ViT's encoder over all patches, with a learned token in place
    of each hidden one and fixed positions. Its norms have the constant of the model's.

    Args:
      model: the ViT that is trained; its positions are added at the stem.
      ratio: share of the patches that is hidden; the visible ones are rounded down.
      dim, depth, heads: of the decoder; its MLP is 4 dim wide.
      position: of the decoder: `sincos2d_mae`, or `sincos2d`, as of the `ViT`.
      normalize_targets: predict each patch's pixels less their mean, over their deviation; without it,
        pixels as the model normalises them.

    Raises:
      UserError: no patch is hidden or visible, or the model needs all of its patches.
    """

    made_by: ClassVar = ("decoder_dim", "decoder_depth", "decoder_heads", "decoder_position")

    def __init__(
        self,
        model: nnx.Module,
        ratio: float,
        *,
        dim: int,
        depth: int,
        heads: int,
        position: str,
        normalize_targets: bool,
        rngs: nnx.Rngs,
    ):
        if not model.keeps_any:
            raise UserError(
                "config.objective.name='mae' leaves patches out: it needs model.attention='full' and "
                "model.position='sincos2d_mae', 'sincos2d', '1d' or '2d' at the stem, without rope"
            )
        self.grid, self.patch = model.grid, model.patch_size
        self.normalize_targets, self.position = normalize_targets, position
        self.patches = math.prod(model.grid)
        self.visible = math.floor(self.patches * (1 - ratio) + 1e-9)  # 10 (1 - 0.9) is 0.99...
        if not 0 < self.visible < self.patches:
            raise UserError(
                f"config.objective.mask_ratio = {ratio} leaves {self.visible} of {self.patches} patches "
                "visible; it must leave some, and hide some"
            )
        if dim % heads or dim % 4:
            raise UserError(
                f"config.objective.decoder_dim = {dim} must be divisible by 4 and by decoder_heads = {heads}"
            )
        dtype, epsilon = model.patch_embedding.dtype, model.norm.epsilon
        values = dict(dtype=dtype, rngs=rngs)
        self.embedding = nnx.Linear(model.dim, dim, kernel_init=initializers.xavier(), **values)
        self.mask = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, dim)))
        scheme = initializers.SCHEMES["mae"]
        stack = Stack(dim, heads, 4 * dim, gelu="erf", epsilon=epsilon, scheme=scheme, dtype=dtype)
        self.blocks = nnx.Dict({f"{layer:02d}": EncoderBlock(stack, rngs=rngs) for layer in range(depth)})
        self.norm = nnx.LayerNorm(dim, epsilon=epsilon, **values)
        outputs = self.patch**2 * model.channels
        self.prediction = nnx.Linear(
            dim, outputs, kernel_init=initializers.xavier(), dtype=jnp.float32, rngs=rngs
        )

    @staticmethod
    def sees_length(config: ConfigDict) -> bool:
        return False

    @classmethod
    def make(cls, config: ConfigDict, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "MAE":
        check_hides_patches(config, model)
        values = config.objective
        return cls(
            model,
            MASK_RATIO if values.mask_ratio is None else values.mask_ratio,
            dim=values.decoder_dim,
            depth=values.decoder_depth,
            heads=values.decoder_heads,
            position=values.decoder_position,
            normalize_targets=values.normalize_targets,
            rngs=rngs,
        )

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """The batch with `order` int32 `[batch, patches]`, drawn for each image from its key: the first are
        visible."""
        return batch | {"order": shuffled(keys, self.patches).astype(jnp.int32)}

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        """Squared error of each image, the mean over the pixels of its hidden patches.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, and what `prepare` drew.
        """
        pixels = patchify(model.normalize(batch["image"]), self.patch)
        targets = pick(pixels, batch["order"][:, self.visible :])
        if self.normalize_targets:
            mean, deviation = moments(targets)
            targets = (targets - mean) / deviation
        return Loss(jnp.square(self.predict(model, batch, now.rngs) - targets).mean(axis=(1, 2)))

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Pixels of the hidden patches as the model normalises them, in the order's sequence, float32
        `[batch, hidden, pixels]`."""
        visible, hidden = jnp.split(batch["order"], [self.visible], axis=1)
        x = model.assemble(model.patches(batch["image"]), rngs, keep=visible)
        x = self.embedding(model.norm(model.encode(x, rngs)))
        positions = jnp.asarray(sincos2d(self.grid, self.mask.shape[-1], self.position), x.dtype)
        prefix = x[:, : model.prefix]
        seen = x[:, model.prefix : model.prefix + self.visible] + positions[visible]
        masks = self.mask[...].astype(x.dtype) + positions[hidden]
        # Hidden first, as the last layer returns what comes first; attention does not mind the order.
        x = named("tokens", jnp.concatenate([masks, prefix, seen], axis=1))

        def call(block, x, _, read=None):
            return named("tokens", block(x, read=read))

        *blocks, last = self.blocks.values()
        x = run_layers(call, blocks, x, [None] * len(blocks), remat=model.remat, scan=model.scan)
        x = run_layers(
            lambda *inputs: call(*inputs, read=hidden.shape[1]), [last], x, [None], remat=model.remat
        )
        return self.prediction(self.norm(x))

    def pictures(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> tuple[jax.Array, jax.Array]:
        """The images with hidden patches in grey, and with what is predicted in them, in [0, 255].

        A normalised prediction gets the mean and deviation of what was there, which it does not say.
        """
        hidden = batch["order"][:, self.visible :]
        images = model.normalize(batch["image"])
        pixels, known = self.predict(model, batch), patchify(images, self.patch)
        if self.normalize_targets:
            mean, deviation = moments(pick(known, hidden))
            pixels = pixels * deviation + mean
        grey = pick(patchify(model.normalize(jnp.zeros_like(images)), self.patch), hidden)
        filled = (put(known, hidden, content) for content in (grey, pixels))
        return tuple(model.denormalize(unpatchify(patches, self.grid, self.patch)) for patches in filled)


def moments(patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and deviation of each patch's pixels, `[batch, patches, 1]`; of n pixels, with n - 1."""
    mean = patches.mean(axis=-1, keepdims=True)
    return mean, jnp.sqrt(patches.var(axis=-1, keepdims=True, ddof=1) + 1e-6)
