"""Adam and SGD for ResNets: python -m vit_jax.experiment table7 --out=DIR.

Two small BiTs are trained on 100,000 images of scattered digits, with Adam and with SGD. For each
model and optimizer the better of two learning rates is chosen by shorter runs on held-out images.
The models are evaluated few-shot on an alphabet. The smaller model has two seeds, the larger model
has one. At the paper's scale SGD has the learning rate, weight decay and schedule of BiT's own
recipe, because the ViT paper does not print these values.
"""

from vit_jax.ledger.laptop import MODELS, config_name, fewshot, shorter
from vit_jax.ledger.paper_scale import TASKS
from vit_jax.ledger.stages import at_best, transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

STEPS, BITS = 250, MODELS["BiT"][:2]
FACTORS = {"model": BITS, "optimizer__name": ("adam", "sgd")}
RATES = {"adam": (1e-3, 3e-3), "sgd": (0.1, 0.3)}
CHOICES = {"optimizer__learning_rate": (*RATES["adam"], *RATES["sgd"])}
# Weight decay of each optimizer. Multiplied by the learning rate, both are about equally strong.
DECAY = {"adam": 0.05, "sgd": 1e-3}
FIGURE = "fewshot/cyrillic/10"
SGD = {
    "optimizer__name": "sgd",
    "optimizer__learning_rate": 0.03 * 4096 / 256,
    "optimizer__weight_decay": 1e-4,
    "optimizer__coupled_decay": True,
    "optimizer__warmup_steps": 5000,
    "optimizer__schedule": "stairs",
    "optimizer__stairs": (10 / 40, 23 / 40, 30 / 40, 37 / 40),
}
PAPER = {
    f"BiT-{name}, JFT-300M, {optimizer}": (f"bit_{name.lower()}_jft", values)
    for name in ("R50x1", "R152x2")
    for optimizer, values in (("Adam", {}), ("SGD", SGD))
}


def pretrained(study, model, optimizer__name, optimizer__learning_rate, seed):
    """Returns config and overrides of a training run.

    Returns None for further seeds of the larger model, and for learning rates of the other
    optimizer.
    """
    if optimizer__learning_rate not in RATES[optimizer__name] or (seed and model != BITS[0]):
        return None
    values = dict(
        optimizer__name=optimizer__name, optimizer__learning_rate=optimizer__learning_rate
    )
    values["optimizer__weight_decay"] = DECAY[optimizer__name]
    few_shot = fewshot(STEPS, "cyrillic", images=1000, source="scattered")
    return config_name(model, "digits", steps=STEPS, source="scattered"), few_shot | values


EXPERIMENT = Experiment(
    claim="ResNets pre-trained by Adam transfer better than those by SGD.",
    place="Table 7",
    stages=at_best("pretrained", FACTORS, pretrained, CHOICES, shorter(100), (0, 1)),
    read=lambda study: [
        point | {"few-shot": point[FIGURE]}
        for point in study.points("pretrained", "accuracy", FIGURE)
    ],
    table=lambda figures: listing(
        figures, (*FACTORS, "optimizer__learning_rate"), ("accuracy", "few-shot")
    ),
    finding=lambda figures: f"Few-shot: {ranking(means(figures, *FACTORS, figure='few-shot'))}.",
    paper=transfer(PAPER, TASKS, "table7"),
    minutes=8,
)
