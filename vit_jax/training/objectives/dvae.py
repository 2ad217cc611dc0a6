"""Discrete variational autoencoder of DALL-E (Ramesh et al., 2021; 2102.12092, section 2.1)."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dall_e import DVAE as Encoder
from vit_jax.models.dall_e import CodeBlock, convolution
from vit_jax.models.image_model import CodeModel
from vit_jax.options.objective import DVAEOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.averages import Momentum, with_weights
from vit_jax.training.objectives.codes import (
    EARLY,
    METRICS,
    dead_codes,
    frequencies,
    usage_after,
    usage_metrics,
)
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    average_of,
    check_self_supervised,
)

# Keys in the state: the averages of the encoder's parameters and of the decoder's parameters.
AVERAGE, OWN_AVERAGE = "average", "own_average"
EDGE = 0.1  # A pixel u in [0, 1] becomes 0.8 u + 0.1, because the logits of 0 and 1 are infinite.


class DVAE(Objective):
    """Discrete autoencoder: an encoder from images to codes, and a decoder from codes to pixels.

    The encoder returns a grid of logits of the codes. In training a code is drawn at random from
    the logits at each grid position and relaxed (Gumbel-softmax): the decoder's input is a weighted
    mean of the codes' vectors, at a falling temperature. In evaluation the most likely codes are
    used.

    The loss of an image is the sum of two terms:

    - The mean over pixels and channels of -log p(pixel). p is a logit-Laplace distribution, and the
      decoder returns its centre and log scale (appendix A.3).
    - The mean over grid positions of the KL divergence of the code's distribution from the uniform
      distribution. Its weight is divided by the number of pixels and channels in the image region
      of one grid position.

    The loss is thus the negative evidence lower bound, divided by the number of pixels and
    channels.

    With `config.optimizer.average`, moving averages of encoder and decoder are evaluated, and
    exported at the end of a run. The objective's parameters are the decoder, which mirrors the
    encoder.

    Args:
      average: moving average of the parameters; None: no average.
    """

    metrics: ClassVar = {"divergence": "number", "error": "number", **METRICS}
    section: ClassVar = "dvae"
    made_by: ClassVar = ("codes",)

    def __init__(
        self, options: DVAEOptions, model: Encoder, average: Momentum | None, *, rngs: nnx.Rngs
    ):
        self.average = average
        self.codes, self.stride = model.num_classes, model.code_stride
        self.channels = model.channels
        first, last = options.temperature, options.temperature_end
        self.temperature = first, last, options.temperature_steps
        self.weight = options.kl_weight, options.kl_steps
        self.decoder = Decoder(model, rngs=rngs)

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def eval_params(config: RunOptions) -> str | None:
        return AVERAGE if config.optimizer.average else None

    @staticmethod
    def own_eval_params(config: RunOptions) -> str | None:
        return OWN_AVERAGE if config.optimizer.average else None

    @staticmethod
    def outputs(config: RunOptions) -> int:
        return config.dvae.codes

    @classmethod
    def make(cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "DVAE":
        check_self_supervised(config, averages=True)
        if not isinstance(model, Encoder):
            raise UserError(
                f"config.objective.name='dvae' trains an encoder of codes and its decoder: "
                f"config.model.name must be 'DVAE', not a {type(model).__name__}"
            )
        if model.num_classes != config.dvae.codes:
            raise UserError(
                f"config.dvae.codes={config.dvae.codes:,}, and the model's head has "
                f"{model.num_classes:,}: a model for this objective has a head of its codes"
            )
        start = config.finetune
        if start.checkpoint and (start.head, start.objective) == ("new", "kept"):
            raise UserError(
                "config.finetune.head='new' initializes the codes' scores, but the decoder is of "
                "the old codes: give config.finetune.head='kept', or "
                "config.finetune.objective='new' too"
            )
        return cls(config.dvae, model, average_of(config), rngs=rngs)

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the metrics of each image.

        The metric `error` is the mean absolute difference between decoded and original pixels in
        [0, 255]. `divergence` is the KL divergence of the codes' distribution from the uniform
        distribution in nats, averaged over grid positions. The other metrics describe the recent
        code usage.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`.
        """
        images = batch["image"]
        scores = model.code_scores(images).astype(jnp.float32)
        reconstruction, chances = self.decode_scores(scores, context), jax.nn.log_softmax(scores)
        divergence = (jnp.exp(chances) * (chances + math.log(self.codes))).sum(-1).mean((1, 2))
        pixels = images.astype(jnp.float32) / 255
        losses = logit_laplace(reconstruction, EDGE + (1 - 2 * EDGE) * pixels).mean((1, 2, 3))
        losses += self.divergence_weight(context) / (self.stride**2 * self.channels) * divergence
        error = jnp.abs(decoded(reconstruction) - 255 * pixels).mean((1, 2, 3))
        usage = context.state.get("usage", np.zeros(self.codes, np.float32))
        chosen = scores.argmax(-1).reshape(len(scores), -1)
        return Loss(
            losses,
            {"divergence": divergence, "error": error, **usage_metrics(usage, len(images))},
            {"usage": frequencies(chosen, self.codes)},
        )

    def decode_scores(self, scores: jax.Array, context: StepContext) -> jax.Array:
        """Draws codes from their logits, and decodes them to the parameters of `logit_laplace`.

        In evaluation the most likely codes are decoded instead. The result is
        `[batch, height, width, 2 * channels]`.

        Args:
          scores: logits of the codes, `[batch, rows, columns, codes]`.
        """
        if context.rngs is None:
            return self.evaluated_decoder(context).of_codes(scores.argmax(-1))
        noise = jax.random.gumbel(context.rngs.dropout(), scores.shape)
        return self.decoder(
            self.decoder.codes(jax.nn.softmax((scores + noise) / self.heat(context)))
        )

    def evaluated_decoder(self, context: StepContext) -> "Decoder":
        """Returns the decoder for evaluation, with averaged parameters if the state has them."""
        if OWN_AVERAGE not in context.state:
            return self.decoder
        return with_weights(self.decoder, context.state[OWN_AVERAGE]["decoder"])

    def heat(self, context: StepContext) -> jax.Array:
        """Returns the temperature of the Gumbel-softmax at update `context.update`."""
        first, last, steps = self.temperature
        return last + (first - last) * (1 - _risen(context.update, steps))

    def divergence_weight(self, context: StepContext) -> jax.Array:
        """Returns the weight of the KL divergence at update `context.update`."""
        weight, steps = self.weight
        return weight * _risen(context.update, steps)

    def initial_state(self, params: dict) -> dict[str, Any]:
        state: dict[str, Any] = {"usage": np.zeros(self.codes, np.float32)}
        if self.average:
            state |= {AVERAGE: params, OWN_AVERAGE: self.own_weights()}
        return state

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        new = {"usage": usage_after(state["usage"], aux["usage"], update)}
        if self.average:
            new[AVERAGE] = self.average.after(state[AVERAGE], params, update)
            new[OWN_AVERAGE] = self.average.after(state[OWN_AVERAGE], self.own_weights(), update)
        return new

    def warning(self, means: dict[str, float], update: int) -> str | None:
        remedy = "lower config.dvae.kl_weight or the learning rate, or use fewer codes"
        # Codes become distinct only as the temperature of the Gumbel-softmax falls. The first tenth
        # of its schedule is therefore without a warning.
        return dead_codes(means, update, remedy, max(EARLY, self.temperature[2] // 10))

    def pictures(
        self, model: CodeModel, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the images and their reconstructions from the most likely codes.

        Both are float32 `[batch, height, width, channels]`, in [0, 255].
        """
        images = batch["image"]
        codes = model.code_scores(images).argmax(-1)
        return images.astype(jnp.float32), decoded(self.evaluated_decoder(context).of_codes(codes))


class Decoder(nnx.Module):
    """Decoder with the encoder's stages in reverse order, and upsampling by 2 between them.

    The encoder may be abstract.
    """

    def __init__(self, encoder: Encoder, *, rngs: nnx.Rngs):
        widths, blocks = encoder.options.widths[::-1], encoder.options.blocks[::-1]
        before, gain = max(1, widths[-1] // 2), 1 / sum(blocks) ** 2
        values: dict[str, Any] = dict(dtype=encoder.stem.dtype, rngs=rngs)
        drawn = initializers.normal(1 / math.sqrt(encoder.num_classes))
        self.codes = nnx.Linear(
            encoder.num_classes, before, kernel_init=drawn, dtype=jnp.float32, rngs=rngs
        )
        self.stages = nnx.Dict()
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            parts = {}
            for place in range(1, count + 1):
                parts[f"{place:02d}"] = CodeBlock(before, width, (1, 3, 3, 3), gain, **values)
                before = width
            self.stages[f"{stage}"] = nnx.Dict(parts)
        self.output = convolution(before, 2 * encoder.channels, 1, **values)

    def of_codes(self, codes: jax.Array) -> jax.Array:
        """Decodes codes to the parameters of `logit_laplace`.

        The result is `[batch, height, width, 2 * channels]`.

        Args:
          codes: indices of the codes, int32 `[batch, rows, columns]`.
        """
        return self(self.codes.kernel[...][codes] + self.codes.bias[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Decodes code vectors to the parameters of `logit_laplace`.

        The result is float32 `[batch, height, width, 2 * channels]`.

        Args:
          x: code vectors, `[batch, rows, columns, dim]`.
        """
        for stage, parts in self.stages.items():
            if stage != "1":
                x = x.repeat(2, axis=1).repeat(2, axis=2)
            for block in parts.values():
                x = block(x)
        return self.output(nnx.relu(x)).astype(jnp.float32)


def logit_laplace(prediction: jax.Array, pixels: jax.Array) -> jax.Array:
    """Returns the negative log density of each pixel (2102.12092, appendix A.3).

    The logit of a pixel, log(u / (1 - u)), has a Laplace distribution.

    Args:
      prediction: output of the decoder, `[..., 2 * channels]`. The first half of the last axis
        contains the centres of the distributions, the second half their log scales.
      pixels: values between 0 and 1, `[..., channels]`.
    """
    centre, scale = jnp.split(prediction, 2, axis=-1)
    logit = jnp.log(pixels) - jnp.log1p(-pixels)
    density = math.log(2) + scale + jnp.abs(logit - centre) * jnp.exp(-scale)
    return density + jnp.log(pixels) + jnp.log1p(-pixels)


def decoded(prediction: jax.Array) -> jax.Array:
    """Converts the decoder's output to pixels in [0, 255], `[..., channels]`.

    A pixel is computed from the centre of its logit-Laplace distribution.

    Args:
      prediction: output of the decoder, `[..., 2 * channels]`. The first half of the last axis
        contains the centres of the distributions, the second half their log scales.
    """
    centre, _ = jnp.split(prediction, 2, axis=-1)
    return 255 * jnp.clip((nnx.sigmoid(centre) - EDGE) / (1 - 2 * EDGE), 0, 1)


def _risen(update: jax.Array | int, steps: int) -> jax.Array:
    """Returns half a cosine that rises from 0 at update 0 to 1 at `steps`; 1 if `steps` is 0."""
    if not steps:
        return jnp.float32(1)
    return (1 - jnp.cos(jnp.pi * jnp.clip(jnp.asarray(update) / steps, 0, 1))) / 2


OBJECTIVE = DVAE
