"""The values of table 1 in our models: python -m vit_jax.experiment table1 --out=DIR.

The paper does not state for which patch sizes it counts parameters. We count those of B/16, L/32
and H/14, with 1,000 classes and without the hidden layer of pre-training. L/16 would have 304
million parameters instead of the paper's 307.
"""

from vit_jax import published
from vit_jax.ledger.study import Experiment
from vit_jax.models import abstract, count_parameters, model_factory

MODELS = {"ViT-B": "ViT-B/16", "ViT-L": "ViT-L/32", "ViT-H": "ViT-H/14"}
VALUES = {"Layers": "depth", "Hidden size D": "dim", "MLP size": "mlp_dim", "Heads": "heads"}


def read(study) -> dict:
    """Returns layers, widths, heads and parameter counts of our models, by rows of the table."""
    rows = {row: {} for row in (*VALUES, "Params, million")}
    for column, name in MODELS.items():
        model = abstract(model_factory(name, num_classes=1000, image_size=224))
        for row, value in VALUES.items():
            rows[row][column] = getattr(model.options, value)
        rows["Params, million"][column] = count_parameters(model) / 1e6
    return rows


def finding(figures: dict) -> str:
    """Returns a sentence with our values that differ from the paper's."""
    printed = published.table("table1").by_model()
    other = [
        f"{row} of {column}: {ours:.4g}, not {printed[column][row]}"
        for row, cells in figures.items()
        for column, ours in cells.items()
        if round(ours) != printed[column][row]
    ]
    return (
        "; ".join(other) + "."
        if other
        else "All values are the paper's, parameters to the million."
    )


EXPERIMENT = Experiment(
    claim=(
        "The three sizes of the Vision Transformer have the layers, widths and parameters of "
        "table 1."
    ),
    place="Table 1",
    read=read,
    published="table1",
    finding=finding,
    minutes=0.2,
)
