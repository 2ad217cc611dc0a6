"""The values of pre-training (table 3) in our configs: vit-jax experiment table3 --out=DIR.

The table has a line for each model and data set, with the paper's values. If a value of our config
differs, it is added in bold. Nothing is trained.
"""

from vit_jax import published
from vit_jax.command import read_config
from vit_jax.ledger.paper_scale import SETS
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import agreeing, agreement, differences
from vit_jax.shipped import CONFIGS

# Values that section 4.1 of the paper gives for all rows.
SHARED = {"Optimizer": "adam", "Batch": 4096, "Warm-up": 10_000, "Pixels": 224}


def config_name(model: str, pretraining: str) -> str:
    """Returns the name of a config by model and data set, such as r50_vit_b16_jft."""
    return "_".join(
        model.lower().replace("/", "").replace("+", "-").split("-") + [SETS[pretraining]]
    )


def values_of(name: str) -> dict:
    """Returns the values of a config, by their names in the paper's table."""
    config = read_config(str(CONFIGS / f"{name}.py"))
    return {
        "Epochs": config.epochs,
        "Base learning rate": config.optimizer.learning_rate,
        "Decay": config.optimizer.schedule,
        "Weight decay": config.optimizer.weight_decay,
        "Dropout": config.model.dropout or 0.0,  # None means the default of the model, which is 0.
        "Optimizer": config.optimizer.name,
        "Batch": config.batch_size,
        "Warm-up": config.optimizer.warmup_steps,
        "Pixels": config.data.image_size,
    }


def read(study) -> dict:
    """Returns for each config the paper's values and ours.

    If the paper has several values for a config, ours must be one of them.
    """
    table, found = published.table("table3"), {}
    for place, head in enumerate(table.columns):
        printed = {row: [cells[place]] for row, cells in table.rows.items()} | {
            "Decay": [head["decay"]]
        }
        printed |= {key: [value] for key, value in SHARED.items()}
        name = config_name(head["model"], head["pretraining"])
        entry = found.setdefault(name, {"paper": {"Epochs": []} | printed, "ours": values_of(name)})
        # The paper has runs of 7 and 14 epochs (or 30 and 90) with the same other values.
        entry["paper"]["Epochs"].append(head["epochs"])
    return found


EXPERIMENT = Experiment(
    claim="The configs of pre-training hold the values of table 3.",
    place="Table 3",
    read=read,
    table=agreement,
    finding=differences,
    compared=agreeing,
    minutes=0.2,
)
