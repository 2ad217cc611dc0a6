"""Heads for dense prediction: a value for each position of the feature map.

A head runs the image model itself, because some heads change the model's last layers.
`head(model, images, rngs, state)` returns the outputs that the loss needs. `head.scores(outputs)`
converts these outputs to the score of each class at each position. The head's parameters belong to
the training objective. `images` are uint8, or floats in [-1, 1]. `rngs` are the random keys in
training; None: evaluation. `state` contains the running statistics of the head's batch norms. It is
read in evaluation, and is part of the objective's state. If the model is `frozen`, it runs without
dropout.
"""

from functools import partial

from flax import nnx

from vit_jax.models.dense.eomt import EoMT
from vit_jax.models.dense.linear import LinearHead
from vit_jax.models.dense.upernet import UPerNet
from vit_jax.models.image_model import ImageModel
from vit_jax.options.objective import SegmentationOptions

Head = LinearHead | UPerNet | EoMT
_KINDS = {"linear": LinearHead, "upernet": UPerNet, "eomt": EoMT}


def make_head(
    options: SegmentationOptions,
    model: ImageModel,
    num_classes: int,
    *,
    frozen: bool = False,
    rngs: nnx.Rngs,
) -> Head:
    """Returns the segmentation head that a config selects.

    Args:
      model: the image model; it may contain shapes in place of arrays.
      frozen: True if the model is not trained. The model then runs without dropout.

    Raises:
      UserError: the head does not support the model.
    """
    make = partial(_KINDS[options.head], model, num_classes, frozen=frozen, rngs=rngs)
    if options.head == "eomt":
        return make(queries=options.queries, layers=options.query_layers)
    if options.head == "upernet":
        make = partial(make, dim=options.dim, auxiliary_dim=options.auxiliary_dim)
    return make(dropout=options.dropout)
