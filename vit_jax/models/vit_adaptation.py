"""Rules that adapt a ViT's parameters to other arguments, such as another image size."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.family import Adaptation, Change, Resize
from vit_jax.models.position import FIXED, PositionEmbedding
from vit_jax.models.resize import PATCHES, POSITIONS, grid_of


def _resize_offsets(table: np.ndarray, change: Change) -> np.ndarray:
    """Resizes a table of relative positions to the new grid."""
    layout = change.after.layout
    table = np.asarray(change.before.layout.resized(jnp.asarray(table), change.after.grid))
    if len(table) != layout.rows:
        raise UserError(
            f"{change.path} has {len(table)} rows, but the tokens of the requested model need "
            f"{layout.rows}"
        )
    return table


def _computed(model) -> dict[str, np.ndarray]:
    """Implements `Adaptation.computed`: returns the fixed position embeddings of a model."""
    embedding = model.position_embedding
    if not isinstance(embedding, PositionEmbedding) or embedding.kind not in FIXED:
        return {}
    return {"position_embedding/table": np.asarray(embedding())}


def _implied(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns `distillation="token"` if the changes remove the two heads of a distilled model.

    The heads are removed by `num_classes=0`. With `distillation="token"` the adapted model keeps
    the checkpoint's distillation token.
    """
    if not changes.get("num_classes", known["num_classes"]) and known["distillation"] == "heads":
        return {"distillation": "token"}
    return {}


ADAPTATION = Adaptation(
    resizes=(
        *POSITIONS,
        PATCHES,
        Resize("(.*/)?(bias_table|relative_embedding)", grid_of, _resize_offsets),
    ),
    heads=("head/", "distillation_head/"),
    # MAE's and BEiT's fine-tuned models have a norm of the averaged patches, which the pre-trained
    # models lack.
    new_norms=("fc_norm/",),
    # A pre-trained BEiT has one table of attention biases for all layers. A fine-tuned BEiT has one
    # table in each layer. Each of these tables is initialized with the pre-trained table.
    copied={".*/attention/bias_table": "bias_table"},
    computed=_computed,
    implied=_implied,
)
