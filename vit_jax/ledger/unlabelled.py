"""Stages that pre-train a small ViT without labels, and fine-tune it on 10 % of the images."""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import Stage, at_best, grid

MODEL, COLLECTION, IMAGES, LABELLED = "ViT-32x4/4", "digits", 20_000, 2000
RATES = (1e-3, 3e-3)
# Overrides for models of other families. They have the same number of patches and the same width as
# the ViT, and similar compute: 0.87 and 0.86 million multiply-adds per image (the ViT has 0.93
# million). They have 2.7 times the ViT's 53,000 parameters, because half of their blocks are twice
# as wide.
OTHERS = {
    "ConvNeXt": {"model__name": "ConvNeXt-T", "model__blocks": (3, 3), "model__widths": (32, 64)},
    "Swin": {
        "model__name": "Swin-T",
        "model__dim": 32,
        "model__blocks": (2, 2),
        "model__stage_heads": (2, 4),
        "model__window": 2,
    },
}
# A ConvNeXt V2 with a single stage, and with the ViT's number of patches and width. It has 0.86
# million multiply-adds and 64,000 parameters.
CONVNEXT_V2 = {"model__name": "ConvNeXtV2-T", "model__blocks": (6,), "model__widths": (32,)}
# Overrides for training tokenizers with 64 codes: a dVAE, and VQ-KD, which needs a teacher.
TOKENISERS = {
    "dVAE": {
        "model__name": "DVAE",
        "model__blocks": (1, 1, 1),
        "model__widths": (16, 32, 64),
        "objective__name": "dvae",
        "dvae__codes": 64,
        "dvae__kl_weight": 1.0,
        "dvae__kl_steps": 300,
        "dvae__temperature_steps": 1500,
        "steps": 1500,
    },
    "VQ-KD": {
        "objective__name": "vqkd",
        "objective__teacher": "DINO",
        "vqkd__codes": 64,
        "vqkd__code_dim": 8,
        "vqkd__decoder_dim": 32,
        "vqkd__decoder_depth": 1,
        "vqkd__decoder_heads": 4,
        "steps": 1500,
    },
}
# DINO options that disable colour distortions, which are not useful for drawings.
PLAIN_VIEWS = {"jitter": (0.0,) * 4, "grey": 0.0, "blur": (0.0,) * 3, "solarize": (0.0,) * 3}
DINO = PLAIN_VIEWS | {
    "head_hidden": 256,
    "bottleneck": 64,
    "prototypes": 1024,
    "teacher_momentum": 0.99,
}
DINO |= {"local_crops": 4, "local_size": 32, "local_area": (0.1, 0.4)}
PATCHES = {"patch_weight": 1.0, "patch_prototypes": 1024, "centring": "sinkhorn", "koleo": 0.1}


def objective_values(name: str, teacher: str | None = None, **options: Any) -> dict[str, Any]:
    """Returns the overrides for an objective, with its teacher and options."""
    values = {"objective__name": name} | {f"{name}__{key}": x for key, x in options.items()}
    return values | ({"objective__teacher": teacher} if teacher else {})


# Overrides for objectives without labels, for small models on images of 64 pixels.
OBJECTIVES = {
    "masked patches": objective_values("masked_patch"),
    "MAE": objective_values("mae", decoder_dim=64, decoder_depth=2, decoder_heads=4),
    "DINO": objective_values("dino", **DINO),
    "DINOv2": objective_values("dino", **(DINO | PATCHES)),
}


def few_labels(
    starts: Mapping[str, Mapping[str, Any] | None],
    steps: int,
    tuning_steps: int,
    seeds: Sequence[int] = (0, 1, 2),
    only_teach: Sequence[str] = (),
) -> list[Stage]:
    """Returns stages that compare pre-training methods: `pretrained`, then `finetuned`.

    A start is a way to obtain the initial parameters of fine-tuning, such as `MAE` or `random`. For
    each start the learning rate of fine-tuning is chosen on held-out images.

    Args:
      starts: config overrides of the pre-training run, by the name of the start. `{}` pre-trains on
        the labels of all images. With None, or with overrides that set 0 steps, fine-tuning starts
        from random parameters. Overrides with the prefix `model__` also apply to fine-tuning.
        `objective__teacher` is the name of another start, whose run is the teacher.
      steps: number of steps of pre-training runs, unless the overrides define it.
      tuning_steps: number of steps of fine-tuning runs.
      seeds: random seeds. A fine-tuning run has the seed of its pre-training run, and a student has
        the seed of its teacher.
      only_teach: names of starts that are not fine-tuned, such as tokenizers.
    """

    def teacher_of(start):
        return (starts[start] or {}).get("objective__teacher")

    def teachers_before(start):
        return 0 if teacher_of(start) is None else 1 + teachers_before(teacher_of(start))

    def is_trained(start):
        return starts[start] is not None and starts[start].get("steps") != 0

    def pretrained(study, start, seed):
        values = {**starts[start]}
        if teacher_of(start) is not None:
            teacher = study.workdir("pretrained", start=teacher_of(start), seed=seed)
            if teacher is None:
                return None
            values["objective__teacher"] = teacher
        return config_name(MODEL, COLLECTION, IMAGES, values.pop("steps", steps)), values

    def finetuned(study, start, optimizer__learning_rate, seed):
        given = (starts[start] or {}).items()
        values: dict[str, Any] = {key: value for key, value in given if key.startswith("model__")}
        values["optimizer__learning_rate"] = optimizer__learning_rate
        if is_trained(start):
            values["finetune__checkpoint"] = study.workdir("pretrained", start=start, seed=seed)
        missing = values.get("finetune__checkpoint", "") is None
        return None if missing else (config_name(MODEL, COLLECTION, LABELLED, tuning_steps), values)

    kept = LABELLED * 4 // 5
    held_out = {
        "data__train_split": f"train[:{kept}]",
        "data__test_split": f"train[{kept}:{LABELLED}]",
    }
    made = [start for start in starts if is_trained(start)]
    tuned = tuple(start for start in starts if start not in only_teach)
    order = sorted({teachers_before(start) for start in made})
    rates = {"optimizer__learning_rate": RATES}
    return [
        *(
            grid(
                "pretrained",
                {"start": [start for start in made if teachers_before(start) == turn]},
                pretrained,
                seeds,
            )
            for turn in order
        ),
        *at_best("finetuned", {"start": tuned}, finetuned, rates, held_out, seeds),
    ]
