"""The model's parts with their shapes: python -m vit_jax.experiment figure1 --out=DIR.

Figure 1 is a drawing of the architecture without measurements. This experiment lists the parts in
the drawing, from the input to the output, with the shapes of their parameters in our ViT-B/16 with
the head of pre-training.
"""

import math

from flax import nnx

from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table
from vit_jax.models import abstract, model_factory

NAME, PIXELS = "ViT-B/16", 224
# For each label in the drawing, the start of the paths of its parameters. All layers are the same.
PARTS = {
    "Linear projection of flattened patches": "patch",
    "Extra learnable [class] embedding": "cls",
    "Position embedding": "position",
    "Encoder layer: norm": "blocks/00/norm1",
    "Encoder layer: multi-head attention": "blocks/00/attention",
    "Encoder layer: norm before the MLP": "blocks/00/norm2",
    "Encoder layer: MLP": "blocks/00/mlp",
    "Norm after the encoder": "norm",
    "MLP head": ("pre_logits", "head"),
}


def read(study) -> dict:
    """Returns the parameter shapes of each part, the number of tokens and the number of layers."""
    model = abstract(model_factory(NAME, num_classes=1000, image_size=PIXELS, pre_logits=True))
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {"/".join(map(str, path)): list(value.get_value().shape) for path, value in state}
    parts = {part: {p: shapes[p] for p in shapes if p.startswith(of)} for part, of in PARTS.items()}
    return {"parts": parts, "tokens": model.tokens, "layers": model.depth}


def table(figures: dict) -> str:
    """Returns a table with a line for each part."""
    lines = []
    for part, shapes in figures["parts"].items():
        words = "; ".join(
            f"`{path}` {' x '.join(map(str, shape))}" for path, shape in shapes.items()
        )
        lines.append([part, words, f"{sum(map(math.prod, shapes.values())):,}"])
    return markdown_table(["", "parameters and their shapes", "number"], lines)


EXPERIMENT = Experiment(
    claim="A drawing: the model's parts, which are those of the model here.",
    place="Figure 1",
    read=read,
    table=table,
    finding=lambda figures: (
        f"{NAME} makes {figures['tokens']} tokens of {PIXELS} x {PIXELS} pixels, with the class "
        f"token, which pass {figures['layers']} layers as the one shown."
    ),
    minutes=0.2,
)
