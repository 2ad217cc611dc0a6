"""The values of fine-tuning (table 4) in our recipes: vit-jax experiment table4 --out=DIR.

The table has a line for each data set, with the paper's values. If a value of `configs/finetune.py`
differs, it is added in bold. Nothing is trained. The paper's table lists a learning rate of 0.06
for ImageNet, but the paper's text uses this learning rate only for ResNets and hybrids. The command
`python -m vit_jax.sweep` follows the text (`sweep.resnet_rates`).
"""

from vit_jax import published
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import agreeing, agreement, differences
from vit_jax.recipes import finetune

DATA_SETS = {
    "ImageNet": "imagenet2012",
    "CIFAR-100": "cifar100",
    "CIFAR-10": "cifar10",
    "Oxford-IIIT Pets": "oxford_iiit_pet",
    "Oxford Flowers-102": "oxford_flowers102",
    "VTAB (19 tasks)": "vtab/clevr-count",
}
# Values that the paper gives for all rows, some of them in section 4.1.
SHARED = {"Optimizer": "sgd", "Momentum": 0.9, "Batch": 512, "Weight decay": 0.0, "Clipping": 1.0}
SHARED |= {"Decay": "cosine", "Pixels": 384}


def values_of(data_set: str) -> dict:
    """Returns the values of configs/finetune.py, by their names in the paper's table."""
    config = finetune(data_set)
    optimizer = config.optimizer
    values = (
        optimizer.name,
        optimizer.beta1,
        config.batch_size,
        optimizer.weight_decay,
        optimizer.clip_norm,
    )
    values += (optimizer.schedule, config.data.image_size)
    rates = sorted((*config.sweep.rates, *(config.sweep.resnet_rates or ())))
    return {"Steps": config.steps, "Rates": rates} | dict(zip(SHARED, values, strict=True))


def read(study) -> dict:
    """Returns the paper's values and ours, by data set."""
    table, found = published.table("table4"), {}
    for place, head in enumerate(table.columns):
        printed = {"Steps": table.rows["Steps"][place], "Rates": head["rates"]} | SHARED
        paper = {key: [value] for key, value in printed.items()}
        found[head["data"]] = {"paper": paper, "ours": values_of(DATA_SETS[head["data"]])}
    return found


EXPERIMENT = Experiment(
    claim="The recipes of fine-tuning hold the values of table 4.",
    place="Table 4",
    read=read,
    table=agreement,
    finding=differences,
    compared=agreeing,
    minutes=0.2,
)
