"""Prototype heads of DINO and its successors, Sinkhorn-Knopp, KoLeo and metrics of collapse.

DINO (Caron et al., 2021; 2104.14294) has one prototype head. iBOT (2111.07832), DINOv2 (2304.07193)
and DINOv3 (2508.10104) have two: one for images and one for patches.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import initializers

ITERATIONS = 3  # Sinkhorn-Knopp iterations, as in the code of all these papers.


class PrototypeHead(nnx.Module):
    """Three-layer MLP, followed by dot products of its output with prototypes.

    The output of the MLP is scaled to unit L2 norm first.

    Args:
      bottleneck: width of the MLP's output, and of a prototype.
      lengths: L2 norm of the prototypes. `one`: the norm is 1. `learned`: the norm of each
        prototype is a parameter, initially 1. `free`: prototypes are not normalized.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        bottleneck: int,
        prototypes: int,
        lengths: str,
        *,
        rngs: nnx.Rngs,
    ):
        self.lengths = lengths
        normal = initializers.normal(0.02)
        widths = (features, hidden, hidden, bottleneck)
        self.layers = nnx.Dict(
            {
                str(number): nnx.Linear(before, after, kernel_init=normal, rngs=rngs)
                for number, (before, after) in enumerate(zip(widths, widths[1:], strict=False))
            }
        )
        # The prototypes of DINO and DINOv2 have weight normalization and PyTorch's default
        # initialization. DINOv3 initializes the prototypes like all other layers.
        drawn = normal if lengths == "free" else initializers.torch_convolution()
        self.prototypes = nnx.Param(drawn(rngs.params(), (bottleneck, prototypes)))
        self.gains = nnx.Param(jnp.ones(prototypes)) if lengths == "learned" else None

    @classmethod
    def of_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], lengths: str, *, rngs: nnx.Rngs
    ) -> "PrototypeHead":
        """Returns a head whose parameters have the given shapes, by path."""
        (features, hidden), (bottleneck, count) = shapes["layers/0/kernel"], shapes["prototypes"]
        return cls(features, hidden, bottleneck, count, lengths, rngs=rngs)

    @property
    def features(self) -> int:
        """Width of the head's input."""
        return self.layers["0"].in_features

    @property
    def count(self) -> int:
        """Number of prototypes."""
        return self.prototypes.shape[1]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits of all prototypes, `[..., prototypes]`.

        The logits are dot products of the MLP's output, scaled to unit L2 norm, with the
        prototypes. If the prototypes have unit norm, too, the logits are cosine similarities. `x`
        is `[..., features]` and need not be normalized.
        """
        x = x.astype(jnp.float32)
        for index, layer in self.layers.items():
            x = layer(x if index == "0" else jax.nn.gelu(x, approximate=False))
        prototypes = self.prototypes[...]
        logits = unit(x) @ (prototypes if self.lengths == "free" else unit(prototypes, axis=0))
        return logits if self.gains is None else logits * self.gains[...]


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """Scales vectors to unit L2 norm."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), 1e-12))


def sinkhorn(logits: jax.Array, weights: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """Returns distributions `[samples, prototypes]` that use all prototypes equally.

    Each Sinkhorn-Knopp iteration has two steps. First exp(logits) is scaled to equal sums for all
    prototypes, then to the sum 1 for each sample (SwAV, 2006.09882, section 3.1). The samples must
    be the global batch, from all devices.

    Args:
      logits: logits, already divided by the temperature, `[samples, prototypes]`.
      weights: 1 for a sample, 0 for padding, `[samples]`. Padding does not influence the samples,
        and the distribution of padding is zero.
    """
    real = weights > 0
    plan = jnp.where(real[:, None], logits, -jnp.inf)
    for _ in range(iterations):
        plan = plan - jax.nn.logsumexp(plan, axis=0)
        each = jax.nn.logsumexp(plan, axis=1, keepdims=True)
        plan = plan - jnp.where(real[:, None], each, 0)
    return jnp.exp(plan)


def koleo(x: jax.Array, group: int | None = None, real: jax.Array | None = None) -> jax.Array:
    """Returns the KoLeo loss of each image, `[batch]`.

    The loss is -log(distance). Features are scaled to unit norm, and the distance is the L2
    distance from the image's features to the nearest features of another image. This is Kozachenko
    and Leonenko's entropy estimator, negated (1806.03198, section 3.1). If an image has no other
    image to compare with, the loss of the image is 0.

    Args:
      x: features, `[batch, features]`.
      group: number of successive images that are compared with each other; None: all images are.
      real: bool `[batch]`, False for padding, which cannot be the nearest image; None: there is no
        padding.
    """
    x = unit(x.astype(jnp.float32)).reshape(-1, group or len(x), x.shape[-1])
    near = jnp.einsum("gid,gjd->gij", x, x, precision="highest")
    others = ~jnp.eye(x.shape[1], dtype=bool)
    others = others if real is None else others & real.reshape(len(x), 1, -1)
    near = jnp.where(others, near, -2)
    nearest = jnp.take_along_axis(x, near.argmax(-1)[..., None], axis=1)
    distance = jnp.sqrt(jnp.square(x - nearest + 1e-8).sum(-1))
    return jnp.where(others.any(-1), -jnp.log(distance + 1e-8), 0).reshape(-1)


def views_matched(x: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """Returns 1 for an image if its own second view is nearest to its first view, else 0.

    The first view is compared with the second views of all images of the batch or micro-batch.
    Therefore the accuracy by chance is 1 / (number of images).

    Args:
      x: features of two views, scaled to unit L2 norm, `[batch, 2, features]`.
      real: bool `[batch]`, False for padding, which cannot be the nearest image; None: there is no
        padding.
    """
    near = jnp.einsum("id,jd->ij", x[:, 0], x[:, 1], precision="highest")
    near = near if real is None else jnp.where(real, near, -2)
    return (near.argmax(-1) == jnp.arange(len(x))).astype(jnp.float32)


def entropy(distributions: jax.Array) -> jax.Array:
    """Returns the entropy of distributions over the last axis, in nats."""
    return -(distributions * jnp.log(jnp.maximum(distributions, 1e-30))).sum(-1)
