"""The Vision Transformer (Dosovitskiy et al., 2021, section 3.1): images to logits.

Names of axes: batch height width channels tokens dim heads head_dim mlp_dim classes. A model
contains only parameters. It has no random state and no running statistics. Dropout is applied only
in calls with `rngs`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.errors import UserError
from vit_jax.models import initializers, vit_names
from vit_jax.models.attention import cudnn_takes
from vit_jax.models.dropout import drop
from vit_jax.models.family import Family
from vit_jax.models.image_model import ImagesLike, TokenModel, height_and_width
from vit_jax.models.layers import captures, named, numbered, platform, rising, run_layers
from vit_jax.models.position import (
    FIXED,
    ROPES,
    BiasLayout,
    PositionEmbedding,
    RelativeLayout,
    Rotation,
    draw_scale,
    places_of,
    rotation_angles,
)
from vit_jax.models.resnet import HEAD_AXES, RESNET_AXES, ResNet, classifier, resnet_stride
from vit_jax.models.token_merging import encode_merged
from vit_jax.models.transformer import (
    AttentionPooling,
    AxialBlock,
    EncoderBlock,
    Stack,
    WindowBlock,
    make_norm,
)
from vit_jax.models.vit_adaptation import ADAPTATION
from vit_jax.options.model import ViTOptions


class ViT(TokenModel):
    """A Vision Transformer for images of one size.

    The tokens are, in this order: class token, distillation token, patches in raster order,
    registers. `ViTOptions` describes the arguments.

    Raises:
      UserError: arguments contradict one another.
    """

    options: ViTOptions
    options_type = ViTOptions
    captures = ("attention", "tokens")

    def __init__(self, options: ViTOptions, *, rngs: nnx.Rngs):
        super().__init__(options)
        stride = options.patch_size * resnet_stride(options.resnet_blocks, options.resnet_stem)
        _check_together(options, stride)
        (height, width), kind = self.image_size, options.position
        self.grid = (height // stride, width // stride)
        self.prefix_tokens = _prefix_tokens(options)
        self.tokens = self.prefix + math.prod(self.grid) + options.registers

        offsets, biases = (self.layout.rows if kind == x else 0 for x in ("relative", "bias"))
        # All layers share one table of attention biases, or each layer has its own table.
        shared = biases > 0 and options.position_at == "shared"
        self.bias_table = (
            nnx.Param(initializers.full((biases, options.heads), 0)) if shared else None
        )
        self.stack = _stack(options, offsets, 0 if shared else biases)
        # The order of these calls must not change, because it determines the random keys of the
        # parameters.
        self._make_embedding(rngs)
        self._make_tokens(rngs)
        self._make_layers(rngs)
        self._make_pooling(rngs)
        features = 2 * self.dim if options.pooling == "cls_gap" else self.dim
        self.head = classifier(features, options, rngs)
        two_heads = options.distillation == "heads"
        self.distillation_head = classifier(self.dim, options, rngs) if two_heads else None

    def _make_embedding(self, rngs: nnx.Rngs) -> None:
        """Creates the patch embedding, the ResNet before it, and the norms before the encoder."""
        options, stack, side = self.options, self.stack, self.patch_size
        self.resnet = _resnet(options, rngs)
        inputs = options.channels if self.resnet is None else self.resnet.channels
        self.patch_embedding = nnx.Conv(
            inputs,
            self.dim,
            kernel_size=(side, side),
            strides=(side, side),
            padding="VALID",
            kernel_init=stack.scheme.patches,
            bias_init=stack.scheme.patches_bias(side**2 * inputs),
            use_bias=options.stem_norm != "tokens",
            dtype=stack.dtype,
            rngs=rngs,
        )
        norm = partial(make_norm, self.dim, stack, rngs)
        self.patch_norm = norm() if options.stem_norm == "patches" else None
        self.stem_norm = norm() if options.stem_norm == "tokens" else None

    def _make_tokens(self, rngs: nnx.Rngs) -> None:
        """Creates the learned tokens, and the position embeddings that are added to tokens."""
        options, scheme, small = self.options, self.stack.scheme, initializers.normal(0.02)
        # If the scheme has no initializer for tokens, a token with a learned position embedding
        # starts at zero, because its position embedding is already random.
        learned = options.position in ("1d", "2d")
        for token in self.prefix_tokens:
            # A token without a position embedding must not start at zero, where the gradient of a
            # layer norm is very large: 1 / sqrt(epsilon) = 1,000.
            shape, drawn = (1, 1, self.dim), scheme.token or (None if learned else small)
            first = drawn(rngs.params(), shape) if drawn else initializers.full(shape, 0)
            setattr(self, token, nnx.Param(first))

        def positions():
            return PositionEmbedding(
                options.position,
                self.grid,
                self.prefix,
                self.dim,
                rngs,
                resize=options.position_resize,
                drawn=scheme.positions,
            )

        if options.position_at == "every":
            self.position_embedding = nnx.Dict(
                {f"{layer:02d}": positions() for layer in range(self.depth)}
            )
        else:
            added = learned or options.position in FIXED
            self.position_embedding = positions() if added else None
        if options.registers:
            drawn, shape = scheme.token or small, (1, options.registers, self.dim)
            self.register_tokens = nnx.Param(drawn(rngs.params(), shape))

    def _make_layers(self, rngs: nnx.Rngs) -> None:
        """Creates the encoder."""
        options = self.options

        def block(layer):
            rate = self.layer_rate(layer)
            layer_stack = self._layer_stack(self.stack.scheme, layer, self.depth)
            if options.attention == "axial":
                return AxialBlock(self.grid, layer_stack, rate, rngs=rngs)
            if options.attention == "windows" and not self._attends_globally(layer):
                return WindowBlock(self.grid, options.window, layer_stack, rate, rngs=rngs)
            return EncoderBlock(layer_stack, rate, rngs=rngs)

        self.blocks = numbered(map(block, range(self.depth)))

    def _layer_stack(self, scheme: initializers.Scheme, layer: int, depth: int) -> Stack:
        """Returns the settings of a layer, with the layer's own initializers."""
        layer_scheme = scheme.of_layer(layer, depth, self.stack.sub_norm != "none")
        return dataclasses.replace(self.stack, scheme=layer_scheme)

    def _attends_globally(self, layer: int) -> bool:
        """Returns True if a layer has global attention; other layers have attention within windows.

        The layers with global attention are evenly spaced.
        """
        count = min(self.options.global_layers, self.depth)
        return (layer + 1) * count // self.depth > layer * count // self.depth

    def _make_pooling(self, rngs: nnx.Rngs) -> None:
        """Creates the layers that pool the tokens, between the encoder and the head."""
        options, stack = self.options, self.stack
        plain = options.final_norm and not options.fc_norm
        self.norm = make_norm(self.dim, stack, rngs) if plain else None
        self.fc_norm = make_norm(self.dim, stack, rngs) if options.fc_norm else None
        if options.pooling == "map":
            pooling_stack = dataclasses.replace(stack, heads=options.pool_heads or options.heads)
            self.attention_pooling = AttentionPooling(pooling_stack, rngs=rngs)
        dense = partial(nnx.Linear, kernel_init=initializers.lecun(), dtype=stack.dtype, rngs=rngs)
        self.pre_logits = dense(self.dim, self.dim) if options.pre_logits else None

    @property
    def position_resize(self) -> str:
        """Interpolation of learned position embeddings, one of `POSITION_RESIZES`."""
        return self.options.position_resize

    @property
    def embeds_pixels(self) -> bool:
        return self.options.resnet_blocks is None

    @property
    def attends_fully(self) -> bool:
        return self.options.attention == "full"

    @property
    def keeps_any(self) -> bool:
        options = self.options
        in_stem = options.position in ("1d", "2d", *FIXED) and options.position_at == "stem"
        return in_stem and options.rope == "none" and self.attends_fully

    @property
    def takes_queries(self) -> bool:
        options = self.options
        some_images = options.depth_by == "subset" and options.stochastic_depth > 0
        in_scores = options.position in ("relative", "bias")
        return self.attends_fully and not in_scores and not some_images

    @property
    def pools_plainly(self) -> bool:
        options = self.options
        more = options.pre_logits or options.fc_norm or options.pool_all
        return options.pooling in ("cls", "gap") and not more

    def __call__(
        self,
        images: ImagesLike,
        rngs: nnx.Rngs | None = None,
        *,
        whole: bool = False,
        capture: Sequence[str] = (),
    ) -> Any:
        """Maps images to logits `[batch, classes]`, as in `ImageModel`.

        With `capture`, the list `tokens` contains the tokens `[batch, tokens, dim]` before the
        first layer and after each layer. The list `attention` contains the attention weights of
        each layer, float32 `[batch, heads, tokens, tokens]`. A layer with axial attention adds two
        arrays instead. The first contains the weights within each row of patches, `[batch * rows,
        heads, columns, columns]`; the second contains the weights within each column, `[batch *
        columns, heads, rows, rows]`. In training with `depth_by="subset"`, a layer's weights
        contain only the images for which the layer is computed.

        Args:
          whole: compute all tokens of the last layer, including those that the head does not read.
        """
        if capture:
            with self.capturing(capture) as captured:
                return self(images, rngs, whole=True), captured
        return self.classify(self.encoded(images, rngs, whole))

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the input of the head, `[batch, dim]`.

        Args:
          dense: return the last layer's patches instead, `[batch, rows, columns, dim]`. The patches
            are normalized by the model's final norm. A model with `fc_norm` has no such norm, and
            its patches are not normalized.
        """
        x = self.encoded(images, rngs, whole=dense)
        return x[:, self.patch_tokens].reshape(-1, *self.grid, self.dim) if dense else self.pool(x)

    def each_head(self, images: ImagesLike, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, ...]:
        return self._read_by_heads(self.encoded(images, rngs))

    def encoded(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, whole: bool = False
    ) -> jax.Array:
        """Returns the last layer's tokens after the final norm, if any, `[batch, tokens, dim]`.

        Args:
          whole: return all tokens. False: return only the tokens that the head reads.
        """
        read = self.prefix if self.options.pooling == "cls" and not whole else None
        x = self.assemble(self.patches(images), rngs)
        if self.options.merge_tokens and rngs is None and not whole:
            x = self._encode_merged(x, read)
        else:
            x = self.encode(x, rngs, read)
        return x if self.norm is None else self.norm(x)

    def resized(self, image_size: int | tuple[int, int]) -> "ViT":
        """Returns the same model for another image size, with interpolated learned positions.

        Gradients flow to the original positions.

        Raises:
          UserError: the patch size does not divide the image size.
        """
        size = height_and_width(image_size)
        if size == self.image_size:
            return self
        stride = self.image_size[0] // self.grid[0]
        _check_size(size, stride, f"the patches' stride {stride}")
        other = nnx.clone(self)
        other.options = dataclasses.replace(self.options, image_size=size)
        other.grid = (size[0] // stride, size[1] // stride)
        other.tokens = self.prefix + math.prod(other.grid) + self.options.registers
        if isinstance(self.position_embedding, PositionEmbedding):
            other.position_embedding = self.position_embedding.resized(other.grid)
        elif self.position_embedding is not None:
            for layer, positions in self.position_embedding.items():
                other.position_embedding[layer] = positions.resized(other.grid)
        name = "bias_table" if self.options.position == "bias" else "relative_embedding"
        for block in other.blocks.values():
            if isinstance(block, AxialBlock | WindowBlock):
                block.grid = other.grid
            elif self.options.position in ("relative", "bias") and self.bias_table is None:
                table = self.layout.resized(getattr(block.attention, name)[...], other.grid)
                setattr(block.attention, name, nnx.Param(table))
        if self.bias_table is not None:
            other.bias_table = nnx.Param(self.layout.resized(self.bias_table[...], other.grid))
        return other

    @property
    def layout(self) -> RelativeLayout | BiasLayout:
        """Layout of the position table or bias table of a model with relative positions.

        It must only be used if `options.position` is `relative` or `bias`.
        """
        kind = BiasLayout if self.options.position == "bias" else RelativeLayout
        return kind(self.grid, self.prefix, self.options.registers)

    @property
    def pixel_kernel(self) -> jax.Array:
        return (self.patch_embedding if self.resnet is None else self.resnet.root).kernel[...]

    def patches(self, images: ImagesLike) -> jax.Array:
        pixels = self.normalize(images)
        features = pixels if self.resnet is None else self.resnet(pixels)[-1]
        x = self._embed(features)
        return x if self.patch_norm is None else self.patch_norm(x)

    def _embed(self, features: jax.Array) -> jax.Array:
        """Embeds `[batch, height, width, channels]` as `[batch, patches, dim]`."""
        if platform() != "gpu":
            x = self.patch_embedding(features)
            return x.reshape(x.shape[0], -1, self.dim)
        # On a GPU the product of flattened patches and kernel is faster than a convolution.
        kernel = self.patch_embedding.kernel[...].astype(self.patch_embedding.dtype)
        (side, _, channels, _), (batch, height, width, _) = kernel.shape, features.shape
        rows, columns = height // side, width // side
        features = features[:, : rows * side, : columns * side].astype(kernel.dtype)
        patches = features.reshape(batch, rows, side, columns, side, channels).swapaxes(2, 3)
        x = patches.reshape(batch * rows * columns, -1) @ kernel.reshape(-1, self.dim)
        bias = self.patch_embedding.bias
        x = x if bias is None else x + bias[...].astype(x.dtype)
        return with_layout_constraint(x.reshape(batch, rows * columns, self.dim), Layout((0, 1, 2)))

    def assemble(
        self, patches: jax.Array, rngs: nnx.Rngs | None = None, keep: jax.Array | None = None
    ) -> jax.Array:
        """Adds position embeddings, if any, and the other tokens; returns `[batch, tokens, dim]`.

        Args:
          patches: patch embeddings, `[batch, patches, dim]`.
          keep: raster indices of the patches to return, int32 `[batch, kept]`. The patches are
            returned in the order of these indices. The argument requires `position_at="stem"` and
            a model without `rope` and without relative positions, because the encoder's layers
            would apply these positions to the wrong patches. None: all patches.
        """

        def repeated(token):
            return jnp.broadcast_to(
                token[...].astype(patches.dtype), (patches.shape[0], *token.shape[1:])
            )

        prefix = [repeated(getattr(self, token)) for token in self.prefix_tokens]
        x = jnp.concatenate([*prefix, patches], axis=1)
        if self.position_embedding is not None and self.options.position_at == "stem":
            x = x + self.position_embedding().astype(x.dtype)
        if keep is not None:
            kept = jnp.take_along_axis(x[:, self.prefix :], keep[..., None], axis=1)
            x = jnp.concatenate([x[:, : self.prefix], kept], axis=1)
        if self.options.registers:
            x = jnp.concatenate([x, repeated(self.register_tokens)], axis=1)
        x = drop(x, self.options.dropout, rngs)
        return x if self.stem_norm is None else self.stem_norm(x)

    def layer_rate(self, layer: int, depth: int | None = None) -> float:
        """Returns the stochastic depth rate of a layer.

        Args:
          layer: index of the layer, from 0.
          depth: number of layers over which the rate rises; None: the model's depth.
        """
        rate = self.options.stochastic_depth
        return rate if self.options.uniform_depth else rising(rate, layer, depth or self.depth)

    def layer_positions(self, rngs: nnx.Rngs | None = None) -> dict[str, Any]:
        positions, rope = {}, self.options.rope
        if self.options.position == "relative":
            positions["offsets"] = self.layout.offsets()
        if self.bias_table is not None:
            positions["bias"] = self.layout.spread(self.bias_table[...].astype(jnp.float32))
        elif self.options.position == "bias":
            positions["layout"] = self.layout
        if rope == "mixed":
            registers = self.options.registers
            positions["places"] = places_of(self.grid, self.prefix, registers)
        elif rope != "none":
            positions["rotation"] = self._rotation(rngs)
        return positions

    def encode(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        read: int | None = None,
        after: int | None = None,
    ) -> Any:
        options, tokens, positions = self.options, x.shape[1], self.layer_positions(rngs)
        more = self._tokens_to_even(x, positions, rngs)
        if more:
            x = jnp.pad(x, ((0, 0), (0, more), (0, 0)))
            if "rotation" in positions:
                positions["rotation"] = [
                    jnp.pad(t, ((0, more), (0, 0), (0, 0))) for t in positions["rotation"]
                ]
            if "places" in positions:
                positions["places"] = np.pad(positions["places"], ((0, more), (0, 0)))
            positions["attended"] = tokens
        call, layer_args = self._calls(positions, rngs)
        blocks = list(self.blocks.values())
        x, last = named("tokens", x), len(blocks) if read is None else len(blocks) - 1
        early, run = after or 0, partial(run_layers, remat=options.remat)
        early_tokens = run(call, blocks[:early], x, layer_args[:early], scan=options.scan)
        x = run(call, blocks[early:last], early_tokens, layer_args[early:last], scan=options.scan)
        x = run(partial(call, read=read), blocks[last:], x, layer_args[last:])[:, :tokens]
        return x if after is None else (x, early_tokens[:, :tokens])

    def _encode_merged(self, x: jax.Array, read: int | None) -> jax.Array:
        """Applies all layers; each layer merges `merge_tokens` patches into other patches.

        Returns the tokens after the last layer. The registers, which are the last tokens, are
        returned only if the head pools them.
        """
        count, blocks = self.options.merge_tokens, [*self.blocks.values()]
        x, patches = encode_merged(blocks, x, self.patch_tokens, count, read)
        return x if self.options.pool_all else x[:, : patches.stop]

    def encode_with(
        self,
        x: jax.Array,
        queries: jax.Array,
        layers: int,
        mask: Callable[[int, jax.Array], jax.Array | None],
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        options, positions = self.options, self.layer_positions(rngs)
        call, layer_args = self._calls(positions, rngs)
        blocks, early = list(self.blocks.values()), self.depth - layers
        run, x = partial(run_layers, remat=options.remat), named("tokens", x)
        x = run(call, blocks[:early], x, layer_args[:early], scan=options.scan)
        x = named("tokens", jnp.concatenate([x, queries.astype(x.dtype)], axis=1))
        behind = ((0, queries.shape[1]), (0, 0))
        if "rotation" in positions:  # Queries are rotated by an angle of 0.
            positions["rotation"] = [
                jnp.pad(table, (*behind, (0, 0)), constant_values=fill)
                for table, fill in zip(positions["rotation"], (1, 0), strict=True)
            ]
        if "places" in positions:
            positions["places"] = np.pad(positions["places"], behind)
        for number in range(layers):
            masked = partial(call, mask=mask(number, x))
            layer = slice(early + number, early + number + 1)
            x = run(masked, blocks[layer], x, layer_args[layer])
        return x

    def _calls(
        self, positions: dict[str, Any], rngs: nnx.Rngs | None
    ) -> tuple[Callable[..., jax.Array], list[dict[str, Any]]]:
        """Returns a function that applies a layer, and a list of each layer's inputs.

        The inputs are a dictionary with the layer's random key, its stochastic depth rate and its
        position embeddings.

        Args:
          positions: keyword arguments that all layers share, from `layer_positions`. The function
            reads this dictionary each time it is called. Therefore later changes of the dictionary
            take effect.
        """
        options = self.options
        key = None if rngs is None else rngs.dropout()

        def inputs(number, layer):
            every = options.position_at == "every"
            return dict(
                key=None if key is None else jax.random.fold_in(key, number),
                stochastic_depth=jnp.float32(self.layer_rate(number))
                if options.stochastic_depth
                else None,
                positions=self.position_embedding[layer]() if every else None,
            )

        def call(block, x, inputs, **more):
            shared = options.position_at == "shared" and self.position_embedding is not None
            table = self.position_embedding() if shared else inputs["positions"]
            if table is not None:
                behind = x.shape[1] - table.shape[1]  # Registers and other tokens.
                x = x + jnp.pad(table, ((0, 0), (0, behind), (0, 0))).astype(x.dtype)
            rngs = None if inputs["key"] is None else nnx.Rngs(dropout=inputs["key"])
            x = block(x, rngs, stochastic_depth=inputs["stochastic_depth"], **positions, **more)
            return named("tokens", x)

        return call, [inputs(number, layer) for number, layer in enumerate(self.blocks)]

    def _tokens_to_even(
        self, x: jax.Array, positions: dict[str, Any], rngs: nnx.Rngs | None
    ) -> int:
        """Returns the number of padding tokens, 0 or 1, that make the number of tokens even.

        The number is 1 only if the number of tokens is odd and attention is computed by cuDNN.
        Without the padding token, each layer would have to copy its queries, keys and values to pad
        them.
        """
        plain = self.attends_fully and not positions.keys() & {"offsets", "bias", "layout"}
        drops = self.stack.attention_dropout and rngs is not None
        fused = plain and not drops and not captures() and cudnn_takes(x.dtype, self.stack.head_dim)
        return x.shape[1] % 2 if fused else 0

    def more_layers(
        self, count: int, first: int, scheme: initializers.Scheme | None = None, *, rngs: nnx.Rngs
    ) -> nnx.Dict:
        if not self.attends_fully:
            raise UserError(
                "model.attention='axial' supports the grid of patches only, no other tokens"
            )
        depth, scheme = max(self.depth, first + count), scheme or self.stack.scheme
        blocks = {}
        for layer in range(first, first + count):
            stack, rate = self._layer_stack(scheme, layer, depth), self.layer_rate(layer, depth)
            blocks[f"{layer:02d}"] = EncoderBlock(stack, rate, rngs=rngs)
        return nnx.Dict(blocks)

    def _rotation(self, rngs: nnx.Rngs | None) -> Rotation:
        """Returns the cosines and sines that rotate queries and keys, `[tokens, 1, head_dim]` each.

        In training the coordinates of patches are randomly rescaled.
        """
        options, head_dim = self.options, self.dim // self.heads
        unit = options.rope_grid or self.grid
        angles = rotation_angles(
            options.rope, self.grid, unit, self.prefix_tokens, options.registers, head_dim
        )
        if rngs is None or options.rope_rescale == 1:
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        angles = angles * draw_scale(options.rope_rescale, rngs.dropout())
        return jnp.cos(angles), jnp.sin(angles)

    def classify(self, x: jax.Array) -> jax.Array:
        """Pools tokens `[batch, tokens, dim]` and applies the head: returns logits.

        A model without a head returns the pooled features. If the model has a final norm, it must
        have been applied to `x` already. A model with `fc_norm` applies this norm here, after
        pooling.
        """
        if self.head is None:
            return self.pool(x)
        logits, *taught = self._read_by_heads(x)
        return (logits + taught[0]) / 2 if taught else logits

    def _read_by_heads(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the logits of the head and, if any, of the distillation head."""
        logits = self.head(self.pool(x))
        if self.distillation_head is None:
            return (logits,)
        return logits, self.distillation_head(x[:, 1])

    def pool(self, x: jax.Array) -> jax.Array:
        """Pools tokens `[batch, tokens, dim]` to the input of the head, `[batch, dim]`.

        With `pooling="cls_gap"` the result is `[batch, 2 * dim]`: class token and mean of patches.
        """
        pooling = self.options.pooling
        patches = x if self.options.pool_all else x[:, self.patch_tokens]
        if pooling == "cls":
            pooled = x[:, 0]
        elif pooling == "gap":
            pooled = patches.mean(axis=1)
        elif pooling == "cls_gap":
            pooled = jnp.concatenate([x[:, 0], patches.mean(axis=1)], axis=-1)
        else:
            pooled = self.attention_pooling(patches)
        if self.fc_norm is not None:
            pooled = self.fc_norm(pooled)
        if self.pre_logits is not None:
            pooled = jnp.tanh(self.pre_logits(pooled))
        return pooled


def _prefix_tokens(options: ViTOptions) -> tuple[str, ...]:
    """Returns the names of the tokens before the patches."""
    cls = ("cls",) if options.cls_token or options.pooling in ("cls", "cls_gap") else ()
    return cls if options.distillation == "none" else (*cls, "distillation_token")


def _resnet(options: ViTOptions, rngs: nnx.Rngs) -> ResNet | None:
    """Returns the ResNet before the encoder of a hybrid; None if the model is no hybrid."""
    if options.resnet_blocks is None:
        return None
    return ResNet(
        options.resnet_blocks,
        options.resnet_width,
        options.channels,
        stem=options.resnet_stem,
        preactivation=False,
        epsilons=options.resnet_epsilons,
        remat=options.remat,
        dtype=jnp.dtype(options.dtype),
        rngs=rngs,
    )


def _stack(options: ViTOptions, offsets: int, biases: int) -> Stack:
    """Returns the settings of a ViT's encoder layers; for `offsets` and `biases` see `Stack`."""
    names = [field.name for field in dataclasses.fields(Stack) if hasattr(options, field.name)]
    values = {name: getattr(options, name) for name in names} | dict(
        offsets=offsets,
        biases=biases,
        epsilon=options.norm_epsilon,
        scheme=initializers.SCHEMES[options.initialization],
        dtype=jnp.dtype(options.dtype),
    )
    return Stack(**values)


def _check_together(options: ViTOptions, stride: int) -> None:
    """Raises UserError if arguments contradict one another.

    `stride` is the distance between the centres of neighbouring patches in pixels.
    """
    words = f"patch size {options.patch_size}"
    if options.resnet_blocks is not None:
        words = f"the hybrid's stride {stride}"
    _check_size(height_and_width(options.image_size), stride, words)
    _check_pooling(options)
    _check_axial(options)
    _check_windows(options)
    _check_positions(options)
    _check_rope(options)
    _check_layers(options)
    _check_map_pooling(options)
    _check_merging(options)


def _check_pooling(options: ViTOptions) -> None:
    dim, heads, pooling = options.dim, options.heads, options.pooling
    if dim % heads:
        raise UserError(f"{heads} heads do not divide the width {dim} (model.heads, model.dim)")
    if options.cls_token and pooling in ("cls", "cls_gap"):
        raise UserError(
            f"model.cls_token is for model.pooling='gap' and 'map'; {pooling!r} has one anyway"
        )
    if pooling == "cls_gap" and (options.fc_norm or options.pre_logits):
        raise UserError(
            "model.pooling='cls_gap' reads two vectors, and model.fc_norm and pre_logits take one"
        )
    if options.fc_norm and options.distillation == "heads":
        raise UserError(
            "model.fc_norm normalizes one vector, and model.distillation='heads' reads two"
        )
    if options.distillation != "none" and pooling != "cls":
        raise UserError(
            "model.distillation needs the class token in addition to its own: model.pooling='cls'"
        )


def _has_other_tokens(options: ViTOptions) -> bool:
    """Returns True if the model has tokens in addition to the patches."""
    return bool(_prefix_tokens(options)) or options.registers > 0


def _check_axial(options: ViTOptions) -> None:
    in_layers = options.rope != "none" or options.position in ("none", "relative", "bias")
    if options.attention == "axial" and (_has_other_tokens(options) or in_layers):
        raise UserError(
            "model.attention='axial' keeps the grid of patches: it needs model.pooling='gap' or "
            "'map', no class token, no registers, and model.position='1d', '2d' or 'sincos2d' "
            "without rope"
        )


def _check_windows(options: ViTOptions) -> None:
    if options.attention != "windows":
        return
    in_layers = options.rope == "mixed" or options.position in ("relative", "bias")
    if _has_other_tokens(options) or in_layers:
        raise UserError(
            "model.attention='windows' divides the grid of patches: it needs model.pooling='gap' "
            "or 'map', no class token, no registers, and positions that are added to the patches "
            "or are a fixed rope"
        )
    if options.scan and 0 < options.global_layers < options.depth:
        raise UserError(
            "model.scan compiles one layer for all, and model.attention='windows' has two kinds "
            "of layers: use model.scan=False, or model.global_layers=0"
        )


def _check_positions(options: ViTOptions) -> None:
    dim, position, place = options.dim, options.position, options.position_at
    once = ("1d", "2d", "bias") if place == "shared" else ("1d", "2d")
    if place != "stem" and position not in once:
        raise UserError(
            f"model.position_at={place!r} is for model.position={', '.join(map(repr, once))}"
        )
    if position in ("2d", *FIXED) and dim % 4:
        raise UserError(f"model.position={position!r} needs a width divisible by 4, not {dim}")
    if options.distillation == "heads" and not options.num_classes:
        raise UserError("model.distillation='heads' needs classes; without them it is 'token'")


def _check_rope(options: ViTOptions) -> None:
    rope, head_dim = options.rope, options.dim // options.heads
    if rope != "none" and head_dim % 4:
        raise UserError(f"model.rope needs heads of a width divisible by 4, not {head_dim}")
    if options.rope_grid is not None and not (rope in ROPES and ROPES[rope].stretched):
        raise UserError(f"model.rope_grid is for model.rope='eva02' and 'pe', not {rope!r}")
    if options.rope_rescale != 1 and rope not in ROPES:
        raise UserError(f"model.rope_rescale is for model.rope={', '.join(ROPES)}, not {rope!r}")


def _check_layers(options: ViTOptions) -> None:
    if options.fc_norm and not options.final_norm:
        raise UserError("model.fc_norm moves the final norm, and model.final_norm=False removes it")
    if options.layer_scale is not None and options.norm_at == "after":
        raise UserError(
            "model.layer_scale is for model.norm_at='before'; norms behind branches scale them"
        )
    by_subset = options.depth_by == "subset" and options.stochastic_depth > 0
    if by_subset and options.scan and not options.uniform_depth:
        raise UserError(
            "model.depth_by='subset' skips more images in later layers, and model.scan "
            "compiles one layer for all: use model.uniform_depth=True, or model.scan=False"
        )


def _check_map_pooling(options: ViTOptions) -> None:
    dim, pooling, heads = options.dim, options.pooling, options.pool_heads
    if options.pool_all and pooling not in ("gap", "map"):
        raise UserError(f"model.pool_all is for model.pooling='gap' and 'map', not {pooling!r}")
    if heads is not None and (pooling != "map" or dim % heads):
        raise UserError(
            f"model.pool_heads is for model.pooling='map', and must divide the width {dim}"
        )


def _check_merging(options: ViTOptions) -> None:
    in_layers = options.rope != "none" or options.position in ("relative", "bias")
    in_layers = in_layers or options.position_at != "stem" or options.attention != "full"
    if options.merge_tokens > 0 and in_layers:
        raise UserError(
            "model.merge_tokens is for model.attention='full' with positions that are added once, "
            "before the first layer: no rope, no relative positions; use model.merge_tokens=0"
        )


def _check_size(size: tuple[int, int], stride: int, words: str) -> None:
    """Raises UserError if the stride does not divide the height and width of the images.

    `size` (height and width) and `stride` are in pixels. `words` describes the stride in the error
    message, such as "patch size 16".
    """
    height, width = size
    if height % stride or width % stride:
        down = max(stride, height // stride * stride)
        raise UserError(
            f"{words} does not divide the image of {height}x{width} pixels; "
            f"use an image size such as {down} or {down + stride}, or another patch size"
        )


def _smallest(values: dict) -> dict:
    blocks = values.get("resnet_blocks")
    small = dict(dim=64, depth=2, mlp_dim=128, heads=2)
    stride = resnet_stride(blocks, values.get("resnet_stem", "large"))
    small["image_size"] = 4 * values["patch_size"] * stride
    return small if not blocks else small | dict(resnet_blocks=(1,) * len(blocks))


STEM = ("resnet", "patch_embedding", "patch_norm", "cls", "distillation_token")
STEM += ("position_embedding", "register_tokens", "stem_norm")


def _layer(path: str) -> float:
    """Returns the index of a parameter's encoder layer.

    The result is -1 for parameters before the encoder, and infinite for parameters after it.
    """
    first, *rest = path.split("/")
    if first in ("blocks", "position_embedding") and rest[0].isdigit():
        return int(rest[0])
    return -1 if first in STEM else math.inf


FAMILY = Family(
    model=ViT,
    names=vit_names.NAMES,
    parse=vit_names.parse,
    spell=vit_names.spell,
    source=vit_names.source,
    smallest=_smallest,
    axes=(
        (r"attention(_pooling)?/out/kernel", "heads head_dim -> dim"),
        (r"attention/qkv/kernel", "dim -> part heads head_dim"),
        (r"attention/qkv/bias", "part heads head_dim"),
        (r"bias_table", "offsets heads"),
        (r"attention/frequencies", "axes heads pairs"),
        (r"attention_pooling/query/kernel", "dim -> heads head_dim"),
        (r"attention_pooling/query/bias", "heads head_dim"),
        (r"attention_pooling/key_value/kernel", "dim -> part heads head_dim"),
        (r"attention_pooling/key_value/bias", "part heads head_dim"),
        (r"mlp/fc1/kernel", "dim -> mlp_dim"),
        (r"mlp/fc1/kernel", "dim -> part mlp_dim"),  # A gated MLP; the two parts are the halves.
        (r"mlp/fc1/bias", "mlp_dim"),
        (r"mlp/fc1/bias", "part mlp_dim"),
        (r"mlp/fc2/kernel", "mlp_dim -> dim"),
        (r"patch_embedding/kernel", "height width channels -> dim"),
        (r"pre_logits/kernel", "dim -> dim"),
        *RESNET_AXES,
        *HEAD_AXES,
    ),
    layer=lambda model: _layer,
    embedding=("patch_embedding", "patch_norm"),
    adaptation=ADAPTATION,
)
