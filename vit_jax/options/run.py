"""All options of a run: `RunOptions` and its remaining sections."""

import re
from typing import Any

from vit_jax.options.data import AugmentOptions, DataOptions
from vit_jax.options.model import ModelOptions
from vit_jax.options.objective import (
    BEiTOptions,
    BEiTv2Options,
    ContrastiveOptions,
    DepthOptions,
    DetectionOptions,
    DINOOptions,
    DistillationOptions,
    DVAEOptions,
    EVAOptions,
    FCMAEOptions,
    MAEOptions,
    MaskedPatchOptions,
    ObjectiveOptions,
    SegmentationOptions,
    VQKDOptions,
    only_with_objective,
)
from vit_jax.options.optimizer import LossOptions, OptimizerOptions
from vit_jax.options.option import only_with, option, options, section, unless
from vit_jax.options.rules import SPLIT, Rule, number, one_of, several, text, whole

TRACKERS = ("tensorboard", "wandb", "mlflow")


def parse_profile(profile: str) -> range | None:
    """Parses `steps:10-15` to a range of steps; None: the text has another form."""
    match = re.fullmatch(r"steps:(\d+)-(\d+)", profile)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        return None
    return range(int(match[1]), int(match[2]) + 1)


def _every(help: str) -> Any:
    """Returns the field for the number of steps between two evaluations of a suite."""
    return option(
        0,
        whole(0),
        help,
        validate=lambda value, config: unless(
            value % config.evaluate_every == 0,
            f"a multiple of evaluate_every = {config.evaluate_every}, or 0",
        ),
    )


def _data_sets(suite: str) -> Any:
    """Returns the field for the data sets of a suite with its own section."""
    return option(
        (),
        several(text()),
        "Data sets: ('tfds:cifar100', 'folder:/data/pets@train,val').",
        validate=lambda value, config: unless(
            bool(value) or not getattr(config, suite).every, "such as ('tfds:cifar100',)"
        ),
    )


def _of_objective(kind: type, name: str) -> Any:
    """Returns the field for the options of one objective."""
    return section(kind, requires=only_with_objective(name))


def _only_with_self_distillation(config: Any) -> str:
    """Returns the condition under which the section `dino` would be used; empty: it is used."""
    if config.contrastive.self_distillation:
        return ""
    return only_with_objective("dino")(config)


_WARM = only_with("finetune.checkpoint")


@options
class FinetuneOptions:
    """Warm start and fine-tuning"""

    checkpoint: str | None = option(
        None,
        text(),
        "Checkpoint with the initial parameters: anything `load_model` accepts; None: random.",
    )
    head: str = option(
        "new",
        one_of("new", "kept", "probe"),
        "Initial head: zeros (new), the checkpoint's with classes matched by name (kept), or a "
        "linear probe (LP-FT).",
        requires=_WARM,
        validate=lambda value, config: unless(
            value != "probe"
            or (config.objective.name == "classification" and config.loss.name == "softmax"),
            "new or kept, unless objective.name='classification' and loss.name='softmax'",
        ),
    )
    objective: str = option(
        "kept",
        one_of("kept", "new"),
        "Initial parameters of the objective, such as MAE's decoder and DINO's heads: the "
        "checkpoint's or random.",
        requires=_WARM,
    )
    frozen_steps: int = option(
        0,
        whole(0),
        "First steps in which only the head and the objective's own parameters are trained "
        "(two-phase training).",
        smoke=0,
        requires=_WARM,
        validate=lambda value, config: unless(
            value == 0 or config.finetune.train == "all",
            f"0 with finetune.train={config.finetune.train!r}, which never trains the backbone",
        ),
    )
    warmup_steps: int = option(
        0,
        whole(0),
        "Steps after frozen_steps in which the backbone's learning rate rises from 0; it then "
        "decays over the rest of the run. 0: it is that of the head.",
        smoke=0,
        requires=only_with("finetune.frozen_steps"),
    )
    train: str = option(
        "all",
        one_of("all", "head", "lora", "objective"),
        "Trained parameters: all, the head, the head and low-rank updates (LoRA), or the text "
        "tower and the similarity alone (objective), without the projection of a CLIP's images.",
        validate=lambda value, config: unless(
            value != "objective" or config.objective.name == "contrastive",
            f"'head' with objective.name={config.objective.name!r}; 'objective' is for contrastive",
        ),
    )
    lora_rank: int = option(
        8,
        whole(1, 2**16),
        "Rank of the low-rank updates.",
        requires=only_with("finetune.train", "lora"),
    )


@options
class MeshOptions:
    """Device mesh: numbers of devices along its axes; None for one axis: all remaining devices"""

    data: int | None = option(
        None,
        whole(1, 2**20),
        "Devices for data parallelism; None: all remaining devices.",
        operational=True,
    )
    fsdp: int | None = option(
        1,
        whole(1, 2**20),
        "Devices over which parameters, optimizer moments and the batch are sharded.",
        operational=True,
        optional=True,
    )
    tensor: int | None = option(
        1,
        whole(1, 2**20),
        "Devices for tensor parallelism: attention heads and MLP units are split.",
        operational=True,
        optional=True,
    )


@options
class CheckpointOptions:
    """Checkpoints"""

    every: int = option(1000, whole(1), "Steps between checkpoints.", operational=True)
    keep_last: int = option(2, whole(1), "Number of newest checkpoints to keep.", operational=True)
    keep_every: int | None = option(
        None,
        whole(1),
        "Also keeps checkpoints at multiples of this step; None: no others.",
        operational=True,
        validate=lambda value, config: unless(
            value is None or value % config.checkpoint.every == 0,
            f"a multiple of checkpoint.every = {config.checkpoint.every}",
        ),
    )
    keep_best: int = option(
        0,
        whole(0),
        "Also keeps this number of best checkpoints: by k-NN's accuracy, without it by accuracy "
        "and then loss, without both by loss; on data.dev_split, without it on the test split.",
        operational=True,
    )
    final: str = option(
        "last",
        one_of("last", "best"),
        "Final parameters of a run: from the last step, or the best evaluation on data.dev_split.",
        validate=lambda value, config: unless(
            value == "last"
            or (config.data.dev_split is not None and config.checkpoint.keep_best > 0),
            "'last' without a data.dev_split and a checkpoint.keep_best above 0 to select by",
        ),
    )


@options
class LogOptions:
    """Experiment trackers"""

    to: tuple[str, ...] = option(
        ("tensorboard",),
        several(one_of(*TRACKERS), different=True),
        "Trackers of metrics, images and the config, in addition to the workdir's files.",
        operational=True,
    )


@options
class EvaluateOptions:
    """Suites of `python -m vit_jax.evaluate` during training"""

    suites: tuple[str, ...] = option((), several(text()), "Names of suites, such as 'probe'.")
    options: tuple[str, ...] = option(
        (),
        several(text()),
        "Options of the suites, as flags of the command: 'set=folder:/data/pets@train,val'.",
        requires=only_with("evaluate.suites"),
    )
    suites_every: int = _every(
        "Steps between evaluations of the suites, a multiple of evaluate_every; 0: at the end only."
    )


@options
class FewshotOptions:
    """Few-shot linear evaluation of the frozen network during training"""

    every: int = _every(
        "Steps between evaluations, a multiple of evaluate_every, and at the end; 0: never."
    )
    sets: tuple[str, ...] = _data_sets("fewshot")
    shots: tuple[int, ...] = option(
        (1, 5, 10, 25),
        several(whole(1), least=1, different=True, words="different whole numbers, 1 or above"),
        "Training images per class.",
        requires=only_with("fewshot.sets"),
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2),
        several(whole(0), least=1, different=True, words="different whole numbers, 0 or above"),
        "Random seeds of the image selection; accuracies are averaged over them.",
        requires=only_with("fewshot.sets"),
    )
    penalty: float = option(
        1024.0, number(least=0), "L2 penalty of least squares.", requires=only_with("fewshot.sets")
    )


@options
class KnnOptions:
    """k-NN evaluation of the frozen network during training"""

    every: int = _every(
        "Steps between evaluations, a multiple of evaluate_every, and at the end; 0: never."
    )
    sets: tuple[str, ...] = _data_sets("knn")
    neighbours: tuple[int, ...] = option(
        (10, 20),
        several(whole(1), least=1, different=True, words="different whole numbers, 1 or above"),
        "Values of k; at most the number of training images.",
        requires=only_with("knn.sets"),
    )


@options
class SweepOptions:
    """Learning rate search by `python -m vit_jax.sweep`; its runs do not use these values"""

    rates: tuple[float, ...] = option(
        (1e-3, 3e-3, 1e-2, 3e-2),
        several(number(above=0), different=True),
        "Learning rates to compare.",
        operational=True,
    )
    resnet_rates: tuple[float, ...] = option(
        (),
        several(number(above=0), different=True),
        "Additional learning rates for BiT and hybrids.",
        operational=True,
    )
    train_split: str = option(
        "[:90%]",
        SPLIT,
        "Training images of the search: a split, or a slice of data.train_split.",
        operational=True,
    )
    dev_split: str = option(
        "[90%:]",
        SPLIT,
        "Images that select the learning rate: a split, or a slice of data.train_split.",
        operational=True,
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2),
        several(whole(0), different=True),
        "Random seeds of the runs at the best learning rate, on all training images.",
        operational=True,
    )


@options
class RunOptions:
    """The run"""

    seed: int = option(0, whole(0), "Random seed.")
    batch_size: int = option(4096, whole(1, 2**24), "Global batch size.")
    micro_batches: int = option(
        1, whole(1, 2**20), "Gradient accumulation: number of parts that a batch is split into."
    )
    epochs: float | None = option(
        None,
        number(above=0, most=1e9),
        "Length of the run in passes over the training images.",
        validate=lambda value, config: unless(
            value is not None or config.steps is not None or config.auto != "none",
            "given unless config.steps is",
        ),
    )
    steps: int | None = option(None, whole(1), "Length of the run in steps; overrides epochs.")
    auto: str = option(
        "none",
        one_of("none", "finetune", "pretrain"),
        "Chooses values for this task, unless the config file or the user sets them.",
        smoke="none",
    )
    minutes: float | None = option(
        None,
        number(above=0),
        "Target duration of the run, from which auto chooses its length; None: 10 on CPUs.",
        requires=only_with("auto", "finetune", "pretrain"),
    )
    evaluate_every: int = option(
        1000,
        whole(1),
        "Steps between evaluations.",
        validate=lambda value, config: unless(
            config.checkpoint.keep_best == 0 or value % config.checkpoint.every == 0,
            f"a multiple of checkpoint.every = {config.checkpoint.every} for checkpoint.keep_best",
        ),
    )
    early_stopping: int | None = option(
        None,
        whole(1),
        "Patience: evaluations without improvement before the run stops; None: off.",
        requires=only_with("checkpoint.final", "best"),
    )
    log_every: int = option(
        50,
        whole(1),
        "Steps between rows of metrics.jsonl; lines of the log are written by time.",
        operational=True,
    )
    profile: str = option(
        "",
        Rule(
            str,
            "as steps:10-15",
            lambda x: x == "" or (isinstance(x, str) and parse_profile(x) is not None),
        ),
        "`steps:10-15` writes a profiler trace of these steps to the workdir.",
        operational=True,
    )
    hang_seconds: float = option(
        1200.0,
        number(least=0.1, most=1e7),
        "Seconds without progress after which the stack traces of all threads are written; see "
        "watchdog.py.",
        operational=True,
    )
    max_skipped_steps: int = option(
        10,
        whole(0),
        "Consecutive steps with a non-finite loss or gradient before the run fails.",
        operational=True,
    )
    data: DataOptions = section(DataOptions)
    augment: AugmentOptions = section(AugmentOptions)
    model: ModelOptions = section(ModelOptions)
    finetune: FinetuneOptions = section(FinetuneOptions)
    objective: ObjectiveOptions = section(ObjectiveOptions)
    masked_patch: MaskedPatchOptions = _of_objective(MaskedPatchOptions, "masked_patch")
    mae: MAEOptions = _of_objective(MAEOptions, "mae")
    fcmae: FCMAEOptions = _of_objective(FCMAEOptions, "fcmae")
    dino: DINOOptions = section(DINOOptions, requires=_only_with_self_distillation)
    distillation: DistillationOptions = _of_objective(DistillationOptions, "distillation")
    eva: EVAOptions = _of_objective(EVAOptions, "eva")
    dvae: DVAEOptions = _of_objective(DVAEOptions, "dvae")
    beit: BEiTOptions = _of_objective(BEiTOptions, "beit")
    vqkd: VQKDOptions = _of_objective(VQKDOptions, "vqkd")
    beitv2: BEiTv2Options = _of_objective(BEiTv2Options, "beitv2")
    contrastive: ContrastiveOptions = _of_objective(ContrastiveOptions, "contrastive")
    depth: DepthOptions = _of_objective(DepthOptions, "depth")
    detection: DetectionOptions = _of_objective(DetectionOptions, "detection")
    segmentation: SegmentationOptions = _of_objective(SegmentationOptions, "segmentation")
    loss: LossOptions = section(LossOptions)
    optimizer: OptimizerOptions = section(OptimizerOptions)
    mesh: MeshOptions = section(MeshOptions)
    checkpoint: CheckpointOptions = section(CheckpointOptions)
    log: LogOptions = section(LogOptions)
    evaluate: EvaluateOptions = section(EvaluateOptions)
    fewshot: FewshotOptions = section(FewshotOptions)
    knn: KnnOptions = section(KnnOptions)
    sweep: SweepOptions = section(SweepOptions)
