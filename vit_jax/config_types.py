"""The types of a config's values, for editors. Written by `python docs/write_config.py`."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


class Section(ConfigDict):
    """A config, or a section of one."""

    def update(self, *other: Mapping[str, Any], **values: Any) -> None:
        """Sets several values."""
        super().update(*other, **values)


class DataConfig(Section):
    """Values of `config.data`."""

    balance: str
    decode: str
    interpolation: str | None
    test_interpolation: str | None
    background: str
    repeats: int
    workers: int | None
    threads: int | None
    max_unreadable: int
    image_size: int
    crop: str
    crop_area: tuple[Any, ...]
    crop_aspect: tuple[Any, ...]
    crop_resize: int | None
    flip: bool
    test_crop: str
    test_resize: int
    num_classes: int | None
    changed: str
    source: str
    path: str
    parts: tuple[Any, ...] | None
    weights: tuple[Any, ...] | None
    train_split: str
    dev_split: str | None
    test_split: str
    slices: str
    groups: str | None
    label_key: str
    classes: tuple[Any, ...] | None


class AugmentConfig(Section):
    """Values of `config.augment`."""

    level: str
    randaugment: tuple[Any, ...] | None
    color_jitter: tuple[Any, ...]
    three_augment: float | None
    policy: str | None
    mixup: float | None
    cutmix: float
    cutmix_share: float
    erasing: float


class ModelConfig(Section):
    """Values of `config.model`."""

    name: str | None
    mean: tuple[Any, ...] | None
    deviation: tuple[Any, ...] | None
    blocks: tuple[Any, ...] | None
    gelu: str | None
    layer_scale: float | None
    norm_epsilon: float | None
    stochastic_depth: float | None
    head_bias: float | None
    head_deviation: float | None
    remat: str
    dtype: str
    widths: tuple[Any, ...] | None
    grn: bool | None
    stem: str | None
    centred_norm: bool | None
    norm_first: bool | None
    head_epsilon: float | None
    head_hidden: int | None
    resnet_blocks: tuple[Any, ...] | None
    resnet_width: float | None
    resnet_stem: str | None
    resnet_epsilons: str | None
    axial: bool | None
    stage_heads: tuple[Any, ...] | None
    window: int | None
    version: int | None
    pretrained_windows: tuple[Any, ...] | None
    patch_size: int | None
    dim: int | None
    depth: int | None
    hidden: int | None
    heads: int | None
    registers: int | None
    cls_token: bool | None
    fc_norm: bool | None
    final_norm: bool | None
    stem_norm: str | None
    pooling: str | None
    pool_all: bool | None
    pool_heads: int | None
    distillation: str | None
    position: str | None
    position_at: str | None
    position_resize: str | None
    rope: str | None
    rope_grid: tuple[Any, ...] | None
    rope_rescale: float | None
    attention: str | None
    mlp: str | None
    norm: str | None
    norm_at: str | None
    sub_norm: str | None
    qk_norm: bool | None
    qkv_bias: str | None
    bias: bool | None
    pre_logits: bool | None
    dropout: float | None
    attention_dropout: float | None
    uniform_depth: bool | None
    depth_by: str | None
    initialization: str | None
    scan: bool | None


class FinetuneConfig(Section):
    """Values of `config.finetune`."""

    checkpoint: str | None
    head: str
    objective: str
    frozen_steps: int
    train: str
    lora_rank: int


class ObjectiveConfig(Section):
    """Values of `config.objective`."""

    jitter: tuple[Any, ...]
    jitter_probability: float
    grey: float
    blur: tuple[Any, ...]
    solarize: tuple[Any, ...]
    name: str
    aggregate_from: int | None
    aggregate_layers: int
    teacher_size: int | None
    codes: int
    head_hidden: int
    bottleneck: int
    prototypes: int
    prototype_lengths: str
    frozen_prototype_steps: int
    teacher_momentum: float
    teacher_momentum_end: float
    teacher_temperature: float
    teacher_temperature_end: float | None
    teacher_temperature_steps: int
    centring: str
    local_crops: int
    local_size: int
    local_area: tuple[Any, ...]
    patch_weight: float
    patch_prototypes: int | None
    patch_bottleneck: int | None
    patch_mask_ratios: tuple[Any, ...]
    koleo: float
    koleo_group: int | None
    gram: float
    gram_from: int
    gram_every: int
    gram_times: int
    gram_size: int | None
    distillation: str
    distillation_share: float
    distillation_temperature: float
    code_temperature: float
    code_temperature_end: float
    code_temperature_steps: int
    divergence_weight: float
    divergence_steps: int
    embedding_gradient: float
    decoder_blocks: int
    teacher: str | None
    teacher_dtype: str | None
    decoder_dim: int
    normalize_targets: bool
    decoder_depth: int
    decoder_heads: int
    decoder_position: str
    target: str
    mask_ratio: float | None
    teacher_features: str
    code_dim: int
    code_momentum: float
    commitment: float
    revive_below: float


class LossConfig(Section):
    """Values of `config.loss`."""

    class_weights: str
    name: str
    label_smoothing: float


class OptimizerConfig(Section):
    """Values of `config.optimizer`."""

    name: str
    beta1: float
    beta2: float
    epsilon: float
    moment_dtype: str
    clip_update: float
    clip_update_of: str
    average: float
    average_from: str
    coupled_decay: bool
    decay: str
    clip_norm: float
    clip: str
    layer_decay: float
    embedding_rate: float
    learning_rate: float
    end_learning_rate: float
    schedule: str
    stairs: tuple[Any, ...]
    stair_factor: float
    count_from: int
    warmup_steps: int
    warmup_learning_rate: float
    weight_decay: float
    weight_decay_end: float | None
    sum_gradients: str


class MeshConfig(Section):
    """Values of `config.mesh`."""

    data: int | None
    fsdp: int | None
    tensor: int | None


class CheckpointConfig(Section):
    """Values of `config.checkpoint`."""

    every: int
    keep_last: int
    keep_every: int | None
    keep_best: int
    final: str


class LogConfig(Section):
    """Values of `config.log`."""

    to: tuple[Any, ...]


class EvaluateConfig(Section):
    """Values of `config.evaluate`."""

    suites: tuple[Any, ...]
    options: tuple[Any, ...]
    suites_every: int


class FewshotConfig(Section):
    """Values of `config.fewshot`."""

    every: int
    sets: tuple[Any, ...]
    shots: tuple[Any, ...]
    seeds: tuple[Any, ...]
    penalty: float


class KnnConfig(Section):
    """Values of `config.knn`."""

    every: int
    sets: tuple[Any, ...]
    neighbours: tuple[Any, ...]


class SweepConfig(Section):
    """Values of `config.sweep`."""

    rates: tuple[Any, ...]
    resnet_rates: tuple[Any, ...]
    train_split: str
    dev_split: str
    seeds: tuple[Any, ...]


class TypedConfig(Section):
    """All values of a config."""

    seed: int
    batch_size: int
    micro_batches: int
    epochs: float | None
    steps: int | None
    auto: str
    minutes: float | None
    evaluate_every: int
    early_stopping: int | None
    profile: str
    log_every: int
    hang_seconds: float
    max_skipped_steps: int
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    finetune: FinetuneConfig
    objective: ObjectiveConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    evaluate: EvaluateConfig
    fewshot: FewshotConfig
    knn: KnnConfig
    sweep: SweepConfig
