"""Tokenizer of patches with a frozen teacher: VQ-KD (BEiT v2, 2208.06366, section 2.2)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds, initializers
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.layers import named, numbered, run_layers
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.models.position import PositionEmbedding
from vit_jax.models.transformer import EncoderBlock, Stack, make_norm
from vit_jax.options.objective import VQKDOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.block_masked import PatchTeacher
from vit_jax.training.objectives.codebook import codes_after, k_means, means_of_codes, nearest
from vit_jax.training.objectives.codes import METRICS, dead_codes, usage_after, usage_metrics
from vit_jax.training.objectives.masking import check_hides_patches, patchify, unpatchify
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext
from vit_jax.training.objectives.patch_teacher import (
    cosine,
    features_of_teacher,
    teacher_patch_features,
)
from vit_jax.training.objectives.prototypes import unit

REMEDY = (
    "config.vqkd.revive_below=0.1 gives such codes to patches of the batch; or take a "
    "larger batch, or fewer config.vqkd.codes"
)


class TanhMlp(nnx.Module):
    """Two float32 dense layers with tanh between them; the first layer keeps the width."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        values = dict(kernel_init=initializers.normal(0.02), rngs=rngs)
        self.hidden = nnx.Linear(inputs, inputs, **values)
        self.out = nnx.Linear(inputs, outputs, **values)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layers to `[..., inputs]`; the result is `[..., outputs]`."""
        return self.out(jnp.tanh(self.hidden(x.astype(jnp.float32))))


class Decoder(nnx.Module):
    """ViT whose input is codes, with a class token and learned position embeddings.

    Args:
      features: number of output features for each patch.
      grid: rows and columns of patches.
      dim, depth, heads: width, number of layers and number of heads. The MLP has the width 4 `dim`.
      model: the encoder. The decoder has the encoder's dtype, `remat` and `scan`.
    """

    def __init__(
        self,
        code_dim: int,
        features: int,
        grid: tuple[int, int],
        *,
        dim: int,
        depth: int,
        heads: int,
        model: nnx.Module,
        rngs: nnx.Rngs,
    ):
        scheme, dtype = initializers.SCHEMES["vqkd"], model.patch_embedding.dtype
        stack = Stack(dim, heads, 4 * dim, gelu="erf", qkv_bias="qv", scheme=scheme, dtype=dtype)
        bias, values = scheme.patches_bias(code_dim), dict(dtype=dtype, rngs=rngs)
        self.embedding = nnx.Linear(
            code_dim, dim, kernel_init=scheme.patches, bias_init=bias, **values
        )
        self.cls = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, dim)))
        self.positions = PositionEmbedding("1d", grid, 1, dim, rngs)
        schemes = (scheme.of_layer(layer, depth, False) for layer in range(depth))
        stacks = (dataclasses.replace(stack, scheme=scheme) for scheme in schemes)
        self.blocks = numbered(EncoderBlock(stack, rngs=rngs) for stack in stacks)
        self.norm = make_norm(dim, stack, rngs)
        self.out = TanhMlp(dim, features, rngs=rngs)
        self.remat, self.scan = model.options.remat, model.options.scan

    def __call__(self, codes: jax.Array) -> jax.Array:
        """Predicts features from codes `[batch, patches, code_dim]`.

        The result is float32 `[batch, patches, features]`.
        """
        x = self.embedding(codes)
        cls = jnp.broadcast_to(self.cls[...].astype(x.dtype), (len(x), *self.cls.shape[1:]))
        x = jnp.concatenate([cls, x], axis=1) + self.positions().astype(x.dtype)
        blocks = list(self.blocks.values())
        x = run_layers(
            lambda block, x, _: named("tokens", block(x)),
            blocks,
            named("tokens", x),
            [None] * len(blocks),
            remat=self.remat,
            scan=self.scan,
        )
        return self.out(self.norm(x)[:, 1:])


class Tokeniser(nnx.Module):
    """Tokenizer: the projection and the codebook of a `vqkd` run. Maps patches to codes.

    Args:
      values: options of the section `vqkd` with which the tokenizer was trained.
      shapes: shapes of the objective's parameters and state, by path.

    Raises:
      UserError: the shapes do not belong to a `vqkd` run.
    """

    def __init__(
        self, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, rngs: nnx.Rngs
    ):
        try:
            inputs = shapes["projection/hidden/kernel"][0]
            outputs = shapes["projection/out/kernel"][1]
            codes, dim = shapes["codebook"]
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"it is not a tokenizer of vqkd ({type(error).__name__}: {error})"
            ) from error
        self.projection = TanhMlp(inputs, outputs, rngs=rngs)
        self.codebook = nnx.Param(jnp.zeros((codes, dim)))

    @property
    def features(self) -> int:
        """Number of features of an encoder token, the tokenizer's input."""
        return self.projection.hidden.in_features

    @property
    def count(self) -> int:
        """Number of codes."""
        return self.codebook.shape[0]

    def __call__(self, patches: jax.Array) -> jax.Array:
        """Converts an encoder's patch tokens to indices of codes, int32 `[...]`.

        Args:
          patches: patch tokens of the encoder, `[..., features]`.
        """
        return nearest(unit(self.projection(patches)), self.codebook[...])


class VQKD(PatchTeacher):
    """Quantization of patches to codebook entries, trained to predict a teacher's features.

    The model's output of each patch is projected to a vector with few dimensions and unit norm. The
    vector is quantized to the nearest code, with a straight-through gradient. A decoder predicts
    the teacher's features from the codes. The loss is 1 minus the cosine similarity of predicted
    and true features, plus the squared distance between vectors and their codes.

    Codes are state, not parameters. Each code is a moving average of its vectors in the global
    batch. In the first update the loss is computed with random codes. At the end of this update,
    k-means on the batch initializes the codes, and they are updated for the first time.

    Args:
      features: length of the teacher's feature vector of a patch.
      of_head: True: the features are outputs of the teacher's head. False: they are the teacher's
        patch tokens, that is, outputs of its method `features` with `dense=True`.
      seed: random seed of k-means, and of the new values of dead codes.

    Raises:
      UserError: the decoder's width is not divisible by its number of heads.
    """

    section: ClassVar = "vqkd"
    made_by: ClassVar = ("codes", "code_dim", "decoder_dim", "decoder_depth", "decoder_heads")
    carried: ClassVar = ("codebook", "usage")
    metrics: ClassVar = {"cosine": "number", "code_distance": "number"} | METRICS

    def __init__(
        self,
        options: VQKDOptions,
        model: TokenModel,
        features: int,
        *,
        of_head: bool,
        seed: int,
        rngs: nnx.Rngs,
    ):
        self.grid, self.patch, self.patches = model.grid, model.patch_size, math.prod(model.grid)
        self.codes, self.code_dim, self.seed = options.codes, options.code_dim, seed
        self.momentum, self.commitment = options.code_momentum, options.commitment
        self.revive_below, self.of_head = options.revive_below, of_head
        if options.decoder_dim % options.decoder_heads:
            raise UserError(
                f"config.vqkd.decoder_dim = {options.decoder_dim} must be divisible by "
                f"decoder_heads = {options.decoder_heads}"
            )
        self.projection = TanhMlp(model.dim, self.code_dim, rngs=rngs)
        self.decoder = Decoder(
            self.code_dim,
            features,
            model.grid,
            dim=options.decoder_dim,
            depth=options.decoder_depth,
            heads=options.decoder_heads,
            model=model,
            rngs=rngs,
        )

    @classmethod
    def make(
        cls,
        config: RunOptions,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: ImageModel,
    ) -> "VQKD":
        check_hides_patches(config, model, "codes")
        options = config.vqkd
        features = features_of_teacher(config, model, frozen)
        there = config.batch_size * math.prod(model.grid)
        if options.codes > there:
            raise UserError(
                f"config.vqkd.codes = {options.codes:,} are more than the {there:,} patches "
                "of a batch, of which the codes' first values are made: fewer codes, or a larger "
                "batch_size"
            )
        of_head = config.objective.teacher_features == "head"
        return cls(options, model, features, of_head=of_head, seed=config.seed, rngs=rngs)

    def initial_state(self, params: dict) -> dict[str, Any]:
        codes = np.random.default_rng(self.seed).normal(size=(self.codes, self.code_dim))
        codes /= np.linalg.norm(codes, axis=1, keepdims=True)
        return {"codebook": np.float32(codes), "usage": np.zeros(self.codes, np.float32)}

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        x = aux["projected"].reshape(-1, self.code_dim)
        key = jax.random.fold_in(jax.random.key(self.seed), update)

        def first():
            codes = k_means(x, self.codes, key)
            return codes, nearest(x, codes)

        def later():
            return state["codebook"], aux["given"].reshape(-1)

        codes, indices = jax.lax.cond(state["usage"].sum() > 0, later, first)
        means, hits = means_of_codes(x, indices, codes)
        codes = codes_after(codes, means, self.momentum)
        usage = usage_after(state["usage"], hits[None] / len(x), update)
        if self.revive_below:
            dead = usage * self.codes < self.revive_below
            drawn = jax.random.permutation(jax.random.fold_in(key, 1), len(x))[: self.codes]
            codes = jnp.where(dead[:, None], x[drawn], codes)
            # The usage of a revived code is set to 1 / (number of codes). Otherwise the next update
            # would treat the code as dead again. The sum of all usages is then above 1 for a while.
            usage = jnp.where(dead, 1 / self.codes, usage)
        return {"codebook": codes, "usage": usage}

    def warning(self, means: dict[str, float], update: int) -> str | None:
        return dead_codes(means, update, REMEDY)

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image: the mean over its patches.

        The metric `cosine` is the cosine similarity of predicted and true features. `code_distance`
        is the mean squared difference between vectors and their codes. The other metrics describe
        the recent code usage.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, and `taught` if the teacher needs
            another image size.
        """
        x = self.project(model, batch["image"], context.rngs)
        indices, codes = self.quantise(x, context.state["codebook"])
        teacher_features = teacher_patch_features(self.frozen, batch, self.of_head)
        predicted = self.decoder(x + jax.lax.stop_gradient(codes - x))
        cosines = cosine(predicted, teacher_features).mean(axis=1)
        distances = jnp.square(x - codes).mean(axis=(1, 2))
        metrics = {"cosine": cosines, "code_distance": distances}
        metrics |= usage_metrics(context.state["usage"], len(x))
        return Loss(
            1 - cosines + self.commitment * distances, metrics, {"projected": x, "given": indices}
        )

    def project(
        self, model: nnx.Module, images: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Encodes and projects patches to vectors of unit norm, `[batch, patches, code_dim]`."""
        x = model.features(images, rngs, dense=True)
        return unit(self.projection(x.reshape(len(x), self.patches, -1)))

    def quantise(self, x: jax.Array, codebook: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the index and the vector of each patch's nearest code.

        Indices are int32 `[batch, patches]`, vectors are `[batch, patches, code_dim]`.

        Args:
          x: output of `project`, `[batch, patches, code_dim]`.
          codebook: all codes, `[codes, code_dim]`.
        """
        numbers = nearest(jax.lax.stop_gradient(x), codebook)
        return numbers, codebook[numbers]

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the images and their reconstructions, each `[batch, height, width, channels]`.

        Pixels are in [0, 255]. The decoder predicts features, not pixels. In a reconstruction each
        patch is therefore replaced by another patch of the batch: the patch whose teacher features
        are nearest to the features that the decoder predicts.
        """
        images = batch["image"].astype(jnp.float32)
        _, codes = self.quantise(self.project(model, batch["image"]), context.state["codebook"])
        decoded, pixels = self.decoder(codes), patchify(images, self.patch)
        teacher_features = teacher_patch_features(self.frozen, batch, self.of_head).reshape(
            -1, decoded.shape[-1]
        )
        nearest_codes = cosine(decoded[:, :, None], teacher_features).argmax(-1)
        return images, unpatchify(
            pixels.reshape(-1, pixels.shape[-1])[nearest_codes], self.grid, self.patch
        )

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        graphdef, weights = nnx.split((model, self))

        def decoded(weights, images):
            model, objective = nnx.merge(graphdef, weights)
            return objective.decoder(objective.project(model, images))

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        searched = self.patches * self.codes * self.code_dim
        learnt = traced_multiply_adds(decoded, weights, image)
        # The teacher and the search for the nearest codes have no backward pass, hence the
        # division by 3: see `Objective.multiply_adds`.
        return learnt + (count_multiply_adds(self.frozen) + searched) / 3


OBJECTIVE = VQKD
