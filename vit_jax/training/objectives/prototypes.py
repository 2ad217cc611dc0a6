"""Heads that compare features with prototypes, and how a teacher's cosines become what a student
learns.

They are those of DINO (Caron et al., 2021; 2104.14294), of which iBOT (2111.07832), DINOv2
(2304.07193) and DINOv3 (2508.10104) have two.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import initializers

ITERATIONS = 3  # Of Sinkhorn and Knopp, as all authors take.


class PrototypeHead(nnx.Module):
    """An MLP of three layers, whose directions are compared with those of prototypes.

    Args:
      features: width of what enters.
      hidden: width of the MLP.
      bottleneck: width of what is compared.
      prototypes: how many.
      lengths: of the prototypes: `one`; `learned`, each its own, at first 1; or `free`, as their
        parameters are.
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
        # PyTorch's own first values below a length apart, as DINO's and DINOv2's; DINOv3's as the
        # layers'.
        drawn = normal if lengths == "free" else initializers.torch_convolution()
        self.prototypes = nnx.Param(drawn(rngs.params(), (bottleneck, prototypes)))
        self.gains = nnx.Param(jnp.ones(prototypes)) if lengths == "learned" else None

    @classmethod
    def of_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], lengths: str, *, rngs: nnx.Rngs
    ) -> "PrototypeHead":
        """The head whose parameters have these shapes, by path."""
        (features, hidden), (bottleneck, count) = shapes["layers/0/kernel"], shapes["prototypes"]
        return cls(features, hidden, bottleneck, count, lengths, rngs=rngs)

    @property
    def features(self) -> int:
        """Width of what enters."""
        return self.layers["0"].in_features

    @property
    def count(self) -> int:
        """Number of prototypes."""
        return self.prototypes.shape[1]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Turns features `[..., features]` into logits, cosines at lengths of 1, `[...,
        prototypes]`.
        """
        x = x.astype(jnp.float32)
        for index, layer in self.layers.items():
            x = layer(x if index == "0" else jax.nn.gelu(x, approximate=False))
        prototypes = self.prototypes[...]
        logits = unit(x) @ (prototypes if self.lengths == "free" else unit(prototypes, axis=0))
        return logits if self.gains is None else logits * self.gains[...]


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """The same directions, of length 1."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), 1e-12))


def sinkhorn(logits: jax.Array, weights: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """Distributions over prototypes, `[samples, prototypes]`, that use all prototypes alike.

    Sinkhorn's and Knopp's iterations scale exp(logits) so that each prototype is given as much,
    then so that each sample gives 1 (SwAV, 2006.09882, section 3.1). Samples are those of the whole
    batch, on all devices.

    Args:
      logits: over the temperature, `[samples, prototypes]`.
      weights: 1 for a sample, 0 for one that counts for nothing and whose distribution is zero.
    """
    real = weights > 0
    plan = jnp.where(real[:, None], logits, -jnp.inf)
    for _ in range(iterations):
        plan = plan - jax.nn.logsumexp(plan, axis=0)
        each = jax.nn.logsumexp(plan, axis=1, keepdims=True)
        plan = plan - jnp.where(real[:, None], each, 0)
    return jnp.exp(plan)


def koleo(x: jax.Array, group: int | None = None, real: jax.Array | None = None) -> jax.Array:
    """The loss of each image that its features lie near another's, `[batch]`: minus the log of how
    far.

    It is the estimator of entropy by Kozachenko and Leonenko (1806.03198, section 3.1).

    Args:
      x: features `[batch, features]`.
      group: images among which the nearest is looked for, that many in the batch's order; None:
        all.
      real: bool `[batch]`, which of them may be another's nearest; None: all. An image without any
        has 0.
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
    """1 for an image whose first view has its own second view nearest, among those of the batch,
    else 0.

    It is what k-NN measures where there are no labels; chance is one in the batch's images, or in
    those of a micro-batch.

    Args:
      x: features of length 1 of two views, `[batch, 2, features]`.
      real: bool `[batch]`, images whose second views count; None: all.
    """
    near = jnp.einsum("id,jd->ij", x[:, 0], x[:, 1], precision="highest")
    near = near if real is None else jnp.where(real, near, -2)
    return (near.argmax(-1) == jnp.arange(len(x))).astype(jnp.float32)


def entropy(distributions: jax.Array) -> jax.Array:
    """Entropy over the last axis, in nats."""
    return -(distributions * jnp.log(jnp.maximum(distributions, 1e-30))).sum(-1)
