"""The Vision Transformer (Dosovitskiy et al., 2021, section 3.1), images to logits.

Dimensions are named: batch height width channels tokens dim heads head_dim hidden classes.
A model holds parameters and nothing else: no random state, no statistics. Dropout is active
when a call brings `rngs`, and only then.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.arguments import MOST_LAYERS, SIDE, check_arguments, or_none
from vit_jax.errors import UserError
from vit_jax.models import initializers, vit_names
from vit_jax.models.dropout import drop
from vit_jax.models.family import Family
from vit_jax.models.image_model import ImagesLike, TokenModel, height_and_width
from vit_jax.models.layers import named, rising, run_layers
from vit_jax.models.pixels import Statistic
from vit_jax.models.position import (
    FIXED,
    RESIZES,
    ROPES,
    BiasLayout,
    PositionEmbedding,
    RelativeLayout,
    Rotation,
    draw_scale,
    places_of,
    rotation_angles,
)
from vit_jax.models.resnet import (
    HEAD_AXES,
    RESNET_ARGUMENTS,
    RESNET_AXES,
    ResNet,
    linear_head,
    resnet_stride,
)
from vit_jax.models.transformer import AttentionPooling, AxialBlock, EncoderBlock, Stack, make_norm
from vit_jax.options import Option, flag, number, one_of, several, whole

# A ViT's own arguments, beside those of the ResNet before it.
ARGUMENTS = {
    "patch_size": SIDE,
    "dim": whole(1, 2**20),
    "depth": whole(1, MOST_LAYERS),
    "hidden": whole(1, 2**20),
    "heads": whole(1, 2**16),
    "registers": whole(0, 2**16),
    "cls_token": flag(),
    "fc_norm": flag(),
    "final_norm": flag(),
    "stem_norm": one_of("none", "patches", "tokens"),
    "pooling": one_of("cls", "gap", "cls_gap", "map"),
    "pool_all": flag(),
    "pool_heads": or_none(whole(1, 2**16)),
    "distillation": one_of("none", "token", "heads"),
    "position": one_of("1d", "2d", "relative", "bias", "sincos2d", "sincos2d_mae", "none"),
    "position_at": one_of("stem", "every", "shared"),
    "position_resize": one_of(*RESIZES),
    "rope": one_of("none", *ROPES, "mixed"),
    "rope_rescale": number(least=1, most=1e3),
    "rope_grid": or_none(several(SIDE, count=2)),
    "attention": one_of("full", "axial"),
    "mlp": one_of("gelu", "swiglu"),
    "norm": one_of("layer", "rms"),
    "norm_at": one_of("before", "after"),
    "sub_norm": one_of("none", "mlp", "both"),
    "qk_norm": flag(),
    "qkv_bias": one_of("all", "qv", "none"),
    "bias": flag(),
    "pre_logits": flag(),
    "dropout": number(least=0, below=1),
    "attention_dropout": number(least=0, below=1),
    "uniform_depth": flag(),
    "depth_by": one_of("image", "subset"),
    "initialization": one_of(*initializers.SCHEMES),
    "scan": flag(),
}

OPTIONS = {
    "model.patch_size": Option(None, ARGUMENTS["patch_size"], "Side of a patch in pixels."),
    "model.dim": Option(None, ARGUMENTS["dim"], "Width of a token."),
    "model.depth": Option(None, ARGUMENTS["depth"], "Number of encoder layers."),
    "model.hidden": Option(None, ARGUMENTS["hidden"], "Width of the MLP."),
    "model.heads": Option(None, ARGUMENTS["heads"], "Attention heads."),
    "model.registers": Option(None, ARGUMENTS["registers"], "Learned tokens without a meaning of their own."),
    "model.cls_token": Option(
        None, ARGUMENTS["cls_token"], "Keep a class token beside the pooling gap or map."
    ),
    "model.fc_norm": Option(None, ARGUMENTS["fc_norm"], "Normalise behind the pooling, in place of before."),
    "model.final_norm": Option(None, ARGUMENTS["final_norm"], "Normalise behind the encoder."),
    "model.stem_norm": Option(
        None, ARGUMENTS["stem_norm"], "Normalise before the encoder: patch embeddings, or tokens."
    ),
    "model.pooling": Option(None, ARGUMENTS["pooling"], "What the head reads of the tokens."),
    "model.pool_all": Option(None, ARGUMENTS["pool_all"], "Pool class token and registers with the patches."),
    "model.pool_heads": Option(None, ARGUMENTS["pool_heads"], "Heads of attention pooling."),
    "model.distillation": Option(None, ARGUMENTS["distillation"], "DeiT's distillation token, and its head."),
    "model.position": Option(None, ARGUMENTS["position"], "Kind of position embedding (appendix D.4)."),
    "model.position_at": Option(
        None, ARGUMENTS["position_at"], "Where positions are added: once, or before each layer."
    ),
    "model.position_resize": Option(
        None, ARGUMENTS["position_resize"], "How learned positions are resized for other images."
    ),
    "model.rope": Option(None, ARGUMENTS["rope"], "How queries and keys turn with row and column."),
    "model.rope_grid": Option(None, ARGUMENTS["rope_grid"], "The grid in which rope counts."),
    "model.rope_rescale": Option(
        None, ARGUMENTS["rope_rescale"], "Most by which training stretches rope's coordinates at random."
    ),
    "model.attention": Option(None, ARGUMENTS["attention"], "Among all tokens, or within rows and columns."),
    "model.mlp": Option(None, ARGUMENTS["mlp"], "Kind of MLP."),
    "model.norm": Option(None, ARGUMENTS["norm"], "Kind of norm."),
    "model.norm_at": Option(None, ARGUMENTS["norm_at"], "Normalise a branch's input, or its result."),
    "model.sub_norm": Option(
        None, ARGUMENTS["sub_norm"], "Normalise within branches: the MLP's hidden values, or the heads' too."
    ),
    "model.qk_norm": Option(None, ARGUMENTS["qk_norm"], "Normalise queries and keys."),
    "model.qkv_bias": Option(None, ARGUMENTS["qkv_bias"], "Which of queries, keys and values have biases."),
    "model.bias": Option(None, ARGUMENTS["bias"], "Biases of the encoder's other dense layers."),
    "model.pre_logits": Option(None, ARGUMENTS["pre_logits"], "The pre-training head's hidden tanh layer."),
    "model.dropout": Option(None, ARGUMENTS["dropout"], "Rate after dense layers and position embeddings."),
    "model.attention_dropout": Option(
        None, ARGUMENTS["attention_dropout"], "Rate of dropped attention weights."
    ),
    "model.uniform_depth": Option(
        None, ARGUMENTS["uniform_depth"], "Stochastic depth has one rate in all layers."
    ),
    "model.depth_by": Option(
        None,
        ARGUMENTS["depth_by"],
        "Stochastic depth skips each image by chance, or computes branches for a drawn subset alone.",
    ),
    "model.initialization": Option(
        None,
        ARGUMENTS["initialization"],
        "First values of the parameters: the paper's, or those of the named model's code in PyTorch.",
    ),
    "model.scan": Option(None, ARGUMENTS["scan"], "Compile one encoder layer for all.", operational=True),
}


class ViT(TokenModel):
    """A Vision Transformer for images of one size.

    The tokens are, in this order: class token, distillation token, patches in raster order, registers.

    Args:
      image_size: height and width in pixels, or one number for a square.
      num_classes: width of the linear head; 0 for none: the call then returns what would enter it.
      patch_size: side of a patch P in pixels; of a hybrid, in positions of the ResNet's features.
      dim, depth, hidden, heads: the paper's D, number of layers L, MLP size and heads (table 1).
      channels: of the images.
      mean, deviation: of the pixels that it is trained on, in [0, 1], for all channels or for each; it
        normalises by them whatever it is given. 0.5 and 0.5 make [-1, 1].
      resnet_blocks: of a hybrid: units in each stage of the ResNet that reads the images (section 3.1,
        "Hybrid Architecture"); an empty tuple is its root alone, None no ResNet.
      resnet_width: factor on the ResNet's channels.
      resnet_stem: `large`, the ResNet's root divides the image's sides by 4; `small`, it keeps them, for
        images of 32 pixels or so.
      resnet_epsilons: `google` or `timm`, whose small constants in the ResNet's norms.
      pooling: `cls` reads the class token, `gap` averages the patches, `cls_gap` reads both side by side
        (DINOv2's classifiers), `map` attends to the patches with a learned query (appendix D.3).
      cls_token: keep a class token with `gap` and `map` too, which do not read it; the layers do (timm,
        MAE's fine-tuning).
      pool_all: `gap` and `map` read class token and registers too.
      pool_heads: heads of `map`; None for as many as the layers have.
      fc_norm: normalise what was pooled, in place of each token before (timm, MAE's fine-tuning).
      final_norm: normalise behind the layers, there or as `fc_norm` says.
      stem_norm: normalise before the layers: `patches`, their embeddings (AIMv2; Fini et al., 2024), or
        `tokens`, with their positions, whose patches then have no bias (CLIP; Radford et al., 2021).
      distillation: `token` adds DeiT's distillation token, `heads` a linear head on it too, whose
        logits are averaged with the class token's (Touvron et al., 2021).
      position: `1d` learns a vector for each token, `2d` one for each row and column, `relative` one
        for each offset between tokens, `none` (appendix D.4); `bias` a number for each offset, head and layer
        (BEiT; Bao et al., 2022); `sincos2d` and `sincos2d_mae` are fixed, with the frequencies of
        big_vision's code and of MAE's.
      position_at: where 1d and 2d are added: at the `stem`, before `every` layer (each with its own),
        or `shared` by all layers; and `shared` is one table of biases for all layers (BEiT's pre-training).
      position_resize: how 1d and 2d are interpolated for images of another size, of `RESIZES`; `linear` as
        the paper's code, the others as the libraries that checkpoints come from.
      rope: how queries and keys turn with their row and column: `none`, one of `ROPES`, or `mixed`, by
        learned frequencies of each head and layer (Heo et al., 2024).
      rope_grid: the grid in which `eva02` and `pe` count, that of pre-training; None for the model's own.
      rope_rescale: in training, coordinates are multiplied by a number drawn for each step from its inverse
        to this, evenly on a logarithmic scale (DINOv3); 1 for none.
      registers: number of learned tokens without a meaning of their own (Darcet et al., 2024).
      attention: `full`, or `axial`: each layer becomes a row layer and a column layer (appendix D.6).
      mlp: `gelu`, or `swiglu`, with a gate as wide as `hidden`.
      gelu: `tanh` (Flax's approximation, as the authors trained), `erf` (exact) or `quick` (OpenAI's CLIP).
      norm: `layer`, or `rms`, which takes no mean and has no bias (Zhang and Sennrich, 2019).
      norm_at: `before` each branch, or `after`: its result is normalised, and its input is not.
      sub_norm: normalise the hidden values of each `mlp`, or of `both` branches also what the heads attended
        (sub-LN; Wang et al., 2022).
      qk_norm: normalise queries and keys.
      qkv_bias: biases of `all` of queries, keys and values, of `qv` alone (BEiT), or of `none`.
      bias: biases of the encoder's other dense layers.
      layer_scale: initial value of LayerScale; None for none.
      pre_logits: put the pre-training head's hidden tanh layer before the linear head (section 3.1).
      dropout: rate after every dense layer but q, k, v, and after the position embeddings.
      attention_dropout: rate of attention weights that are dropped.
      stochastic_depth: rate of skipped branches in the last layer; it rises linearly from 0.
      uniform_depth: it is that in all layers.
      depth_by: `image` skips each image by chance and computes its branch all the same; `subset` draws a
        fixed number of images and computes the branch for them alone (DINOv2). It draws them within groups
        of consecutive images (`dropout.subset_sizes`), so that a device with whole groups needs no others.
        A rate is met to the nearest image of a group: one that drops less than half an image drops none.
      head_bias: initial value of the head's biases (-10 for sigmoid pre-training).
      head_deviation: of the normal values that the head's kernel starts from; 0: zeros.
      initialization: the first values of the parameters: `flax`, the paper's, or those of a model's code in
        PyTorch: `mae`, `deit` (DINO's too), `deit3`, `dinov2`, `beit`, `eva` (EVA-g's), `vqkd`, `eva02`.
      norm_epsilon: of the norms.
      remat: what the backward pass computes anew instead of keeping it: `none`; `dots`, all but the
        products with parameters; `full`, all but each layer's input (Chen et al., 2016).
      scan: compile one encoder layer and run it for all: compiles faster, needs more memory.
      dtype: of the computation; parameters, normalisation statistics, softmax and logits are float32.
      rngs: the key for initialisation.

    Raises:
      UserError: an argument of another type or out of its bounds, or some that do not fit one another.
    """

    arguments = RESNET_ARGUMENTS | ARGUMENTS
    captures = ("attention", "tokens")

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        hidden: int,
        heads: int,
        channels: int = 3,
        mean: Statistic = 0.5,
        deviation: Statistic = 0.5,
        resnet_blocks: tuple[int, ...] | None = None,
        resnet_width: float = 1,
        resnet_stem: str = "large",
        resnet_epsilons: str = "google",
        pooling: str = "cls",
        cls_token: bool = False,
        pool_all: bool = False,
        pool_heads: int | None = None,
        fc_norm: bool = False,
        final_norm: bool = True,
        stem_norm: str = "none",
        distillation: str = "none",
        position: str = "1d",
        position_at: str = "stem",
        position_resize: str = "linear",
        rope: str = "none",
        rope_grid: tuple[int, int] | None = None,
        rope_rescale: float = 1.0,
        registers: int = 0,
        attention: str = "full",
        mlp: str = "gelu",
        gelu: str = "tanh",
        norm: str = "layer",
        norm_at: str = "before",
        sub_norm: str = "none",
        qk_norm: bool = False,
        qkv_bias: str = "all",
        bias: bool = True,
        layer_scale: float | None = None,
        pre_logits: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        uniform_depth: bool = False,
        depth_by: str = "image",
        head_bias: float = 0.0,
        head_deviation: float = 0.0,
        initialization: str = "flax",
        norm_epsilon: float = 1e-6,
        remat: str = "none",
        scan: bool = False,
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        given = SimpleNamespace(**locals())
        check_arguments(vars(given), self.arguments)
        height, width = height_and_width(image_size)
        stride = patch_size * resnet_stride(resnet_blocks, resnet_stem)
        _check_together(given, (height, width), stride)

        super().__init__((height, width), channels, mean, deviation)
        self.num_classes = num_classes
        self.patch_size, self.dim, self.depth, self.hidden, self.heads = patch_size, dim, depth, hidden, heads
        self.pooling, self.distillation = pooling, distillation
        self.cls_token = cls_token or pooling in ("cls", "cls_gap")
        self.position, self.position_at, self.position_resize = position, position_at, position_resize
        self.registers, self.rope, self.attention = registers, rope, attention
        self.rope_rescale, self.pool_all, self.uniform_depth = rope_rescale, pool_all, uniform_depth
        self.remat, self.scan = remat, scan
        self.embeds_pixels, self.attends_fully = resnet_blocks is None, attention == "full"
        stem = position in ("1d", "2d", *FIXED) and position_at == "stem"
        self.pools_plainly = pooling in ("cls", "gap") and not (pre_logits or fc_norm or pool_all)
        self.keeps_any = stem and rope == "none" and attention == "full"
        self.grid = (height // stride, width // stride)
        self.rope_grid = tuple(rope_grid) if rope_grid else None
        present = {"cls": self.cls_token, "distillation_token": distillation != "none"}
        self.prefix_tokens = tuple(token for token, there in present.items() if there)
        self.tokens = self.prefix + math.prod(self.grid) + registers
        self.dropout, self.stochastic_depth = dropout, stochastic_depth

        offsets, biases = (self.layout.rows if position == kind else 0 for kind in ("relative", "bias"))
        # One table of biases for all layers, or one in each.
        shared = biases > 0 and position_at == "shared"
        self.bias_table = nnx.Param(jnp.zeros((biases, heads))) if shared else None
        stack = _stack(given, offsets, 0 if shared else biases)
        self.stack = stack
        # In this order, as parameters are drawn one after the other.
        self._make_stem(given, stack, rngs)
        self._make_layers(given, stack, rngs)
        features = 2 * dim if pooling == "cls_gap" else dim
        self.head = (
            linear_head(features, num_classes, head_bias, rngs, head_deviation) if num_classes else None
        )
        two_heads = num_classes and distillation == "heads"
        self.distillation_head = (
            linear_head(dim, num_classes, head_bias, rngs, head_deviation) if two_heads else None
        )

    def _make_stem(self, given: SimpleNamespace, stack: Stack, rngs: nnx.Rngs) -> None:
        """Makes what comes before the encoder: patch embedding, tokens, positions."""

        def hybrid_trunk():
            return ResNet(
                tuple(given.resnet_blocks),
                given.resnet_width,
                self.channels,
                stem=given.resnet_stem,
                preactivation=False,
                epsilons=given.resnet_epsilons,
                remat=self.remat,
                dtype=stack.dtype,
                rngs=rngs,
            )

        self.resnet = None if given.resnet_blocks is None else hybrid_trunk()
        inputs = self.channels if self.resnet is None else self.resnet.channels
        self.patch_embedding = nnx.Conv(
            inputs,
            self.dim,
            kernel_size=(self.patch_size, self.patch_size),
            strides=(self.patch_size, self.patch_size),
            padding="VALID",
            kernel_init=stack.scheme.patches,
            bias_init=stack.scheme.patches_bias(self.patch_size**2 * inputs),
            use_bias=given.stem_norm != "tokens",
            dtype=stack.dtype,
            rngs=rngs,
        )
        self.patch_norm = make_norm(self.dim, stack, rngs) if given.stem_norm == "patches" else None
        self.stem_norm = make_norm(self.dim, stack, rngs) if given.stem_norm == "tokens" else None
        learned = self.position in ("1d", "2d")  # Then a token's position gives it its first values.
        small = initializers.normal(0.02)

        for token in self.prefix_tokens:
            # A layer norm of zeros has a gradient of 1 / sqrt(epsilon), which is 1,000.
            shape, drawn = (1, 1, self.dim), stack.scheme.token or (None if learned else small)
            setattr(self, token, nnx.Param(drawn(rngs.params(), shape) if drawn else jnp.zeros(shape)))

        def positions():
            return PositionEmbedding(
                self.position,
                self.grid,
                self.prefix,
                self.dim,
                rngs,
                resize=self.position_resize,
                drawn=stack.scheme.positions,
            )

        if self.position_at == "every":
            self.position_embedding = nnx.Dict({f"{layer:02d}": positions() for layer in range(self.depth)})
        else:
            self.position_embedding = positions() if learned or self.position in FIXED else None
        if self.registers:
            drawn = stack.scheme.token or small
            self.register_tokens = nnx.Param(drawn(rngs.params(), (1, self.registers, self.dim)))

    def _make_layers(self, given: SimpleNamespace, stack: Stack, rngs: nnx.Rngs) -> None:
        """Makes the encoder, and what lies between it and the head."""

        def block(layer):
            rate, scheme = (
                self.layer_rate(layer),
                stack.scheme.of_layer(layer, self.depth, given.sub_norm != "none"),
            )
            own = dataclasses.replace(stack, scheme=scheme)
            if self.attention == "axial":
                return AxialBlock(self.grid, own, rate, rngs=rngs)
            return EncoderBlock(own, rate, rngs=rngs)

        # Named by depth, so that a checkpoint's paths are strings that sort in order.
        self.blocks = nnx.Dict({f"{layer:02d}": block(layer) for layer in range(self.depth)})
        plain = given.final_norm and not given.fc_norm
        self.norm = make_norm(self.dim, stack, rngs) if plain else None
        self.fc_norm = make_norm(self.dim, stack, rngs) if given.fc_norm else None
        if self.pooling == "map":
            heads = given.pool_heads or self.heads
            self.attention_pooling = AttentionPooling(dataclasses.replace(stack, heads=heads), rngs=rngs)

        def hidden_layer():
            return nnx.Linear(
                self.dim, self.dim, kernel_init=initializers.lecun(), dtype=stack.dtype, rngs=rngs
            )

        self.pre_logits = hidden_layer() if given.pre_logits else None

    def __call__(
        self,
        images: ImagesLike,
        rngs: nnx.Rngs | None = None,
        *,
        whole: bool = False,
        capture: Sequence[str] = (),
    ) -> Any:
        """Images `[batch, height, width, channels]`, uint8 or in [-1, 1], to logits `[batch, classes]`.

        Args:
          rngs: a `dropout` stream; with it the call is a training call.
          whole: compute all tokens of the last layer, also those that the head does not read.
          capture: intermediate results to return beside the logits, of `captures`, a list of each:
            `attention`, float32 `[batch, heads, tokens, tokens]` of each layer (of axial attention
            `[batch * lines, heads, line, line]`, rows before columns; in training by `subset` of the images
            that a layer keeps); `tokens`, `[batch, tokens, dim]`
            before the first layer and after each.

        Raises:
          UserError: images of another shape or type; nothing of that name can be captured.
        """
        if capture:
            with self.capturing(capture) as found:
                return self(images, rngs, whole=True), found
        return self.classify(self.encoded(images, rngs, whole))

    def features(self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False) -> Any:
        """Turns images into what enters the head, `[batch, dim]`.

        Args:
          dense: give the last layer's patches instead, `[batch, rows, columns, dim]`: normalised, except in a
            model with an `fc_norm`, which normalises what was pooled and nothing before.
        """
        x = self.encoded(images, rngs, whole=dense)
        return x[:, self.patch_tokens].reshape(-1, *self.grid, self.dim) if dense else self.pool(x)

    def each_head(self, images: ImagesLike, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, ...]:
        """Turns images into the logits of the head, and of the distillation head where there is one."""
        return self._read_by_heads(self.encoded(images, rngs))

    def encoded(self, images: ImagesLike, rngs: nnx.Rngs | None = None, whole: bool = False) -> jax.Array:
        """Turns images into the last layer's normalised tokens, `[batch, tokens, dim]`.

        Without a final norm they are as the layer gives them.

        Args:
          whole: all of them, also those that the head does not read.
        """
        read = self.prefix if self.pooling == "cls" and not whole else None
        x = self.encode(self.assemble(self.patches(images), rngs), rngs, read)
        return x if self.norm is None else self.norm(x)

    def resized(self, image_size: int | tuple[int, int]) -> "ViT":
        """The same model for images of another size: learned positions are interpolated, and share gradients.

        Raises:
          UserError: the patches do not divide it.
        """
        size = height_and_width(image_size)
        if size == self.image_size:
            return self
        stride = self.image_size[0] // self.grid[0]
        _check_size(size, stride, f"the patches' stride {stride}")
        other = nnx.clone(self)
        other.image_size, other.grid = size, (size[0] // stride, size[1] // stride)
        other.tokens = self.prefix + math.prod(other.grid) + self.registers
        if isinstance(self.position_embedding, PositionEmbedding):
            other.position_embedding = self.position_embedding.resized(other.grid)
        elif self.position_embedding is not None:
            for layer, positions in self.position_embedding.items():
                other.position_embedding[layer] = positions.resized(other.grid)
        name = "bias_table" if self.position == "bias" else "relative_embedding"
        for block in other.blocks.values():
            if isinstance(block, AxialBlock):
                block.grid = other.grid
            elif self.position in ("relative", "bias") and self.bias_table is None:
                table = self.layout.resized(getattr(block.attention, name)[...], other.grid)
                setattr(block.attention, name, nnx.Param(table))
        if self.bias_table is not None:
            other.bias_table = nnx.Param(self.layout.resized(self.bias_table[...], other.grid))
        return other

    @property
    def layout(self) -> RelativeLayout | BiasLayout:
        """The layout of tables by offset over the tokens, where `position` is relative or bias."""
        kind = BiasLayout if self.position == "bias" else RelativeLayout
        return kind(self.grid, self.prefix, self.registers)

    @property
    def pixel_kernel(self) -> jax.Array:
        return (self.patch_embedding if self.resnet is None else self.resnet.root).kernel[...]

    def patches(self, images: ImagesLike) -> jax.Array:
        """Images, uint8 or floats in [-1, 1], to patch embeddings in raster order, `[batch, patches, dim]`.

        Raises:
          UserError: images of another shape or type.
        """
        pixels = self.normalize(images)
        features = pixels if self.resnet is None else self.resnet(pixels)[-1]
        x = self.patch_embedding(features)
        x = x.reshape(x.shape[0], -1, self.dim)
        return x if self.patch_norm is None else self.patch_norm(x)

    def assemble(
        self, patches: jax.Array, rngs: nnx.Rngs | None = None, keep: jax.Array | None = None
    ) -> jax.Array:
        """Patch embeddings to all tokens with their positions, `[batch, tokens, dim]`.

        Args:
          keep: int32 `[batch, kept]`: only these patches of each image, in this order. The layers then have
            no positions of their own: `position_at` is stem, and neither `rope` nor `relative` is.
        """

        def repeated(token):
            return jnp.broadcast_to(token[...].astype(patches.dtype), (patches.shape[0], *token.shape[1:]))

        prefix = [repeated(getattr(self, token)) for token in self.prefix_tokens]
        x = jnp.concatenate([*prefix, patches], axis=1)
        if self.position_embedding is not None and self.position_at == "stem":
            x = x + self.position_embedding().astype(x.dtype)
        if keep is not None:
            kept = jnp.take_along_axis(x[:, self.prefix :], keep[..., None], axis=1)
            x = jnp.concatenate([x[:, : self.prefix], kept], axis=1)
        if self.registers:
            x = jnp.concatenate([x, repeated(self.register_tokens)], axis=1)
        x = drop(x, self.dropout, rngs)
        return x if self.stem_norm is None else self.stem_norm(x)

    def layer_rate(self, layer: int, depth: int | None = None) -> float:
        """Stochastic depth of a layer, of so many in all; None: of its own."""
        if self.uniform_depth:
            return self.stochastic_depth
        return rising(self.stochastic_depth, layer, depth or self.depth)

    def layer_positions(self, rngs: nnx.Rngs | None = None) -> dict[str, Any]:
        positions = {}
        if self.position == "relative":
            positions["offsets"] = self.layout.offsets()
        if self.bias_table is not None:
            positions["bias"] = self.layout.spread(self.bias_table[...].astype(jnp.float32))
        elif self.position == "bias":
            positions["layout"] = self.layout
        if self.rope == "mixed":
            positions["places"] = places_of(self.grid, self.prefix, self.registers)
        elif self.rope != "none":
            positions["rotation"] = self._rotation(rngs)
        return positions

    def encode(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        read: int | None = None,
        after: int | None = None,
    ) -> Any:
        positions = self.layer_positions(rngs)
        key = None if rngs is None else rngs.dropout()

        def inputs(number, layer):
            """One layer's own inputs: its key, its rate of stochastic depth, its positions."""
            every = self.position_at == "every"
            return dict(
                key=None if key is None else jax.random.fold_in(key, number),
                stochastic_depth=jnp.float32(self.layer_rate(number)) if self.stochastic_depth else None,
                positions=self.position_embedding[layer]() if every else None,
            )

        def call(block, x, inputs, **read):
            shared = self.position_at == "shared" and self.position_embedding is not None
            table = self.position_embedding() if shared else inputs["positions"]
            if table is not None:
                x = x + jnp.pad(table, ((0, 0), (0, self.registers), (0, 0))).astype(x.dtype)
            rngs = None if inputs["key"] is None else nnx.Rngs(dropout=inputs["key"])
            x = block(x, rngs, stochastic_depth=inputs["stochastic_depth"], **positions, **read)
            return named("tokens", x)

        own = [inputs(number, layer) for number, layer in enumerate(self.blocks)]
        blocks = list(self.blocks.values())
        x, last = named("tokens", x), len(blocks) if read is None else len(blocks) - 1
        early = after or 0
        x = run_layers(call, blocks[:early], x, own[:early], remat=self.remat, scan=self.scan)
        kept = x
        x = run_layers(call, blocks[early:last], x, own[early:last], remat=self.remat, scan=self.scan)
        x = run_layers(partial(call, read=read), blocks[last:], x, own[last:], remat=self.remat)
        return x if after is None else (x, kept)

    def more_layers(
        self, count: int, first: int, scheme: initializers.Scheme | None = None, *, rngs: nnx.Rngs
    ) -> nnx.Dict:
        if self.attention == "axial":
            raise UserError("model.attention='axial' has no layers for what is beside the grid of patches")
        depth = max(self.depth, first + count)
        blocks = {}
        for layer in range(first, first + count):
            values = (scheme or self.stack.scheme).of_layer(layer, depth, self.stack.sub_norm != "none")
            own = dataclasses.replace(self.stack, scheme=values)
            blocks[f"{layer:02d}"] = EncoderBlock(own, self.layer_rate(layer, depth), rngs=rngs)
        return nnx.Dict(blocks)

    def _rotation(self, rngs: nnx.Rngs | None) -> Rotation:
        """Cosines and sines of all tokens, `[tokens, 1, head_dim]`; in training, of rescaled coordinates."""
        unit, head_dim = self.rope_grid or self.grid, self.dim // self.heads
        angles = rotation_angles(self.rope, self.grid, unit, self.prefix_tokens, self.registers, head_dim)
        if rngs is None or self.rope_rescale == 1:
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        angles = angles * draw_scale(self.rope_rescale, rngs.dropout())
        return jnp.cos(angles), jnp.sin(angles)

    def classify(self, x: jax.Array) -> jax.Array:
        """Turns tokens `[batch, tokens, dim]` into logits, or into what would enter the head.

        They are normalised, unless the model has no final norm, or an `fc_norm`, which does it here.
        """
        if self.head is None:
            return self.pool(x)
        logits, *taught = self._read_by_heads(x)
        return (logits + taught[0]) / 2 if taught else logits

    def _read_by_heads(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Logits of the head, and of the distillation head where there is one."""
        own = self.head(self.pool(x))
        return (own,) if self.distillation_head is None else (own, self.distillation_head(x[:, 1]))

    def pool(self, x: jax.Array) -> jax.Array:
        """Turns tokens `[batch, tokens, dim]` into what enters the head, `[batch, dim]`, or twice as wide."""
        patches = x if self.pool_all else x[:, self.patch_tokens]
        if self.pooling == "cls":
            pooled = x[:, 0]
        elif self.pooling == "gap":
            pooled = patches.mean(axis=1)
        elif self.pooling == "cls_gap":
            pooled = jnp.concatenate([x[:, 0], patches.mean(axis=1)], axis=-1)
        else:
            pooled = self.attention_pooling(patches)
        if self.fc_norm is not None:
            pooled = self.fc_norm(pooled)
        if self.pre_logits is not None:
            pooled = jnp.tanh(self.pre_logits(pooled))
        return pooled


def _stack(given: SimpleNamespace, offsets: int, biases: int) -> Stack:
    """The values that a ViT's layers share, by its arguments."""
    return Stack(
        given.dim,
        given.heads,
        given.hidden,
        mlp=given.mlp,
        gelu=given.gelu,
        dropout=given.dropout,
        attention_dropout=given.attention_dropout,
        depth_by=given.depth_by,
        layer_scale=given.layer_scale,
        qk_norm=given.qk_norm,
        qkv_bias=given.qkv_bias,
        bias=given.bias,
        norm=given.norm,
        norm_at=given.norm_at,
        sub_norm=given.sub_norm,
        rope=given.rope,
        offsets=offsets,
        biases=biases,
        epsilon=given.norm_epsilon,
        scheme=initializers.SCHEMES[given.initialization],
        dtype=jnp.dtype(given.dtype),
    )


def _check_together(given: SimpleNamespace, size: tuple[int, int], stride: int) -> None:
    """Raises UserError for arguments of `ViT` that do not fit one another.

    Args:
      size: height and width of the images.
      stride: pixels from one patch to the next.
    """
    dim, heads, position = given.dim, given.heads, given.position
    hybrid = given.resnet_blocks is not None
    _check_size(size, stride, f"the hybrid's stride {stride}" if hybrid else f"patch size {given.patch_size}")
    if dim % heads:
        raise UserError(f"{heads} heads do not divide the width {dim} (model.heads, model.dim)")
    if given.cls_token and given.pooling in ("cls", "cls_gap"):
        raise UserError(
            f"model.cls_token is for model.pooling='gap' and 'map'; {given.pooling!r} has one anyway"
        )
    if given.pooling == "cls_gap" and (given.fc_norm or given.pre_logits):
        raise UserError(
            "model.pooling='cls_gap' reads two vectors, and model.fc_norm and pre_logits take one"
        )
    if given.fc_norm and given.distillation == "heads":
        raise UserError("model.fc_norm normalises one vector, and model.distillation='heads' reads two")
    if given.distillation != "none" and given.pooling != "cls":
        raise UserError("model.distillation needs the class token beside its own: model.pooling='cls'")
    more_than_patches = given.pooling in ("cls", "cls_gap") or given.cls_token or given.registers
    in_layers = given.rope != "none" or position in ("none", "relative", "bias")
    if given.attention == "axial" and (more_than_patches or in_layers):
        raise UserError(
            "model.attention='axial' keeps the grid of patches: it needs model.pooling='gap' or 'map', "
            "no class token, no registers, and model.position='1d', '2d' or 'sincos2d' without rope"
        )
    once = ("1d", "2d", "bias") if given.position_at == "shared" else ("1d", "2d")
    if given.position_at != "stem" and position not in once:
        raise UserError(
            f"model.position_at={given.position_at!r} is for model.position={', '.join(map(repr, once))}"
        )
    if position in ("2d", *FIXED) and dim % 4:
        raise UserError(f"model.position={position!r} needs a width divisible by 4, not {dim}")
    if given.distillation == "heads" and not given.num_classes:
        raise UserError("model.distillation='heads' needs classes; without them it is 'token'")
    if given.rope != "none" and dim // heads % 4:
        raise UserError(f"model.rope needs heads of a width divisible by 4, not {dim // heads}")
    if given.rope_grid and not (given.rope in ROPES and ROPES[given.rope].stretched):
        raise UserError(f"model.rope_grid is for model.rope='eva02' and 'pe', not {given.rope!r}")
    if given.rope_rescale != 1 and given.rope not in ROPES:
        raise UserError(f"model.rope_rescale is for model.rope={', '.join(ROPES)}, not {given.rope!r}")
    if given.fc_norm and not given.final_norm:
        raise UserError("model.fc_norm says where the final norm is, and model.final_norm=False that none is")
    if given.layer_scale is not None and given.norm_at == "after":
        raise UserError("model.layer_scale is for model.norm_at='before'; norms behind branches scale them")
    if given.depth_by == "subset" and given.stochastic_depth and given.scan and not given.uniform_depth:
        raise UserError(
            "model.depth_by='subset' leaves out more images in later layers, and model.scan compiles one "
            "layer for all: use model.uniform_depth=True, or model.scan=False"
        )
    if given.pool_all and given.pooling not in ("gap", "map"):
        raise UserError(f"model.pool_all is for model.pooling='gap' and 'map', not {given.pooling!r}")
    if given.pool_heads and (given.pooling != "map" or dim % given.pool_heads):
        raise UserError(f"model.pool_heads is for model.pooling='map', and must divide the width {dim}")


def _check_size(size: tuple[int, int], stride: int, words: str) -> None:
    """Raises UserError unless the stride, in these words, divides the height and width of the images."""
    height, width = size
    if height % stride or width % stride:
        down = max(stride, height // stride * stride)
        raise UserError(
            f"{words} does not divide the image of {height}x{width} pixels; "
            f"use an image size such as {down} or {down + stride}, or another patch size"
        )


def _smallest(values: dict) -> dict:
    blocks = values.get("resnet_blocks")
    small = dict(dim=64, depth=2, hidden=128, heads=2)
    stride = resnet_stride(blocks, values.get("resnet_stem", "large"))
    small["image_size"] = 4 * values["patch_size"] * stride
    return small if not blocks else small | dict(resnet_blocks=(1,) * len(blocks))


STEM = ("resnet", "patch_embedding", "patch_norm", "cls", "distillation_token", "position_embedding")
STEM += ("register_tokens", "stem_norm")


def _layer(path: str) -> float:
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
        (r"mlp/fc1/kernel", "dim -> hidden"),
        (r"mlp/fc1/kernel", "dim -> part hidden"),  # A gate and what it gates.
        (r"mlp/fc1/bias", "hidden"),
        (r"mlp/fc1/bias", "part hidden"),
        (r"mlp/fc2/kernel", "hidden -> dim"),
        (r"patch_embedding/kernel", "height width channels -> dim"),
        (r"pre_logits/kernel", "dim -> dim"),
        *RESNET_AXES,
        *HEAD_AXES,
    ),
    layer=lambda model: _layer,
    embedding=("patch_embedding", "patch_norm"),
)
