"""The types of a config's values, for editors. Written by docs/write_config.py."""

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
    caption_key: str
    depth_scale: float
    classes: tuple[Any, ...] | None
    num_classes: int | None
    balance: str
    image_size: int
    crop: str
    crop_area: tuple[Any, ...]
    crop_aspect: tuple[Any, ...]
    crop_resize: int | None
    crop_scale: tuple[Any, ...]
    cat_max_ratio: float
    flip: bool
    test_crop: str
    test_resize: int
    interpolation: str | None
    test_interpolation: str | None
    background: str
    decode: str
    repeats: int
    workers: int | None
    threads: int | None
    max_unreadable: int
    changed: str


class AugmentConfig(Section):
    """Values of `config.augment`."""

    level: str
    randaugment: tuple[Any, ...] | None
    policy: str | None
    three_augment: float | None
    photometric: str | None
    color_jitter: tuple[Any, ...]
    mixup: float | None
    cutmix: float
    cutmix_share: float
    erasing: float


class ModelConfig(Section):
    """Values of `config.model`."""

    name: str | None
    mean: tuple[Any, ...] | None
    std: tuple[Any, ...] | None
    remat: str
    dtype: str
    head_bias: float | None
    head_std: float | None
    resnet_blocks: tuple[Any, ...] | None
    resnet_width: float | None
    resnet_stem: str | None
    resnet_epsilons: str | None
    patch_size: int | None
    dim: int | None
    depth: int | None
    mlp_dim: int | None
    heads: int | None
    pooling: str | None
    cls_token: bool | None
    pool_all: bool | None
    pool_heads: int | None
    fc_norm: bool | None
    final_norm: bool | None
    stem_norm: str | None
    distillation: str | None
    position: str | None
    position_at: str | None
    position_resize: str | None
    rope: str | None
    rope_grid: tuple[Any, ...] | None
    rope_rescale: float | None
    registers: int | None
    attention: str | None
    window: int | None
    global_layers: int | None
    mlp: str | None
    gelu: str | None
    norm: str | None
    norm_at: str | None
    sub_norm: str | None
    qk_norm: bool | None
    qkv_bias: str | None
    bias: bool | None
    layer_scale: float | None
    pre_logits: bool | None
    dropout: float | None
    attention_dropout: float | None
    stochastic_depth: float | None
    uniform_depth: bool | None
    depth_by: str | None
    initialization: str | None
    norm_epsilon: float | None
    scan: bool | None
    merge_tokens: int | None
    axial: bool | None
    blocks: tuple[Any, ...] | None
    widths: tuple[Any, ...] | None
    grn: bool | None
    stem: str | None
    norm_first: bool | None
    head_hidden: int | None
    centred_norm: bool | None
    head_epsilon: float | None
    stage_heads: tuple[Any, ...] | None
    version: int | None
    pretrained_windows: tuple[Any, ...] | None


class FinetuneConfig(Section):
    """Values of `config.finetune`."""

    checkpoint: str | None
    head: str
    objective: str
    frozen_steps: int
    warmup_steps: int
    train: str
    lora_rank: int


class ObjectiveConfig(Section):
    """Values of `config.objective`."""

    name: str
    teacher: str | None
    teacher_dtype: str | None
    teacher_size: int | None
    teacher_features: str


class Masked_patchConfig(Section):
    """Values of `config.masked_patch`."""

    mask_ratio: float
    target: str


class MaeConfig(Section):
    """Values of `config.mae`."""

    mask_ratio: float
    normalize_targets: bool
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int
    decoder_position: str


class FcmaeConfig(Section):
    """Values of `config.fcmae`."""

    mask_ratio: float
    normalize_targets: bool
    decoder_dim: int
    decoder_blocks: int


class DinoConfig(Section):
    """Values of `config.dino`."""

    global_crops: int
    jitter: tuple[Any, ...]
    jitter_probability: float
    grey: float
    blur: tuple[Any, ...]
    solarize: tuple[Any, ...]
    local_crops: int
    local_size: int
    local_area: tuple[Any, ...]
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


class DistillationConfig(Section):
    """Values of `config.distillation`."""

    kind: str
    teacher_weight: float
    temperature: float


class EvaConfig(Section):
    """Values of `config.eva`."""

    mask_ratio: float
    embedding_gradient: float


class DvaeConfig(Section):
    """Values of `config.dvae`."""

    codes: int
    temperature: float
    temperature_end: float
    temperature_steps: int
    kl_weight: float
    kl_steps: int


class BeitConfig(Section):
    """Values of `config.beit`."""

    mask_ratio: float


class VqkdConfig(Section):
    """Values of `config.vqkd`."""

    codes: int
    code_dim: int
    code_momentum: float
    commitment: float
    revive_below: float
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int


class Beitv2Config(Section):
    """Values of `config.beitv2`."""

    mask_ratio: float
    aggregate_from: int | None
    aggregate_layers: int


class ContrastiveConfig(Section):
    """Values of `config.contrastive`."""

    loss: str
    tokenizer: str
    text_tower: str
    text_cleaning: str | None
    text_length: int
    text_dim: int
    text_depth: int
    text_heads: int
    text_mlp_dim: int | None
    text_gelu: str | None
    vocabulary: int | None
    text_frozen: bool
    embedding_dim: int | None
    patch_dropout: float
    captioning: float
    decoder_depth: int | None
    parallel_captions: float
    self_distillation: float
    self_distillation_from: float
    initial_scale: float
    max_scale: float | None
    initial_bias: float


class DepthConfig(Section):
    """Values of `config.depth`."""

    head: str
    layers: int
    class_token: bool
    normalize: bool
    upsample: int
    dim: int
    bins: int
    min_depth: float
    max_depth: float
    gradient_weight: float
    scale_steps: int


class DetectionConfig(Section):
    """Values of `config.detection`."""

    dim: int
    depth: int
    queries: int
    most: int
    masks: bool
    points: int


class SegmentationConfig(Section):
    """Values of `config.segmentation`."""

    head: str
    dropout: float
    dim: int
    auxiliary_dim: int
    auxiliary_weight: float
    queries: int
    query_layers: int
    masked_until: tuple[Any, ...]
    unmasked_from: tuple[Any, ...]
    points: int
    mask_weight: float
    dice_weight: float
    class_weight: float
    no_object_weight: float


class LossConfig(Section):
    """Values of `config.loss`."""

    name: str
    label_smoothing: float
    class_weights: str


class OptimizerConfig(Section):
    """Values of `config.optimizer`."""

    name: str
    learning_rate: float
    schedule: str
    end_learning_rate: float
    power: float
    stairs: tuple[Any, ...]
    stair_factor: float
    count_from: int
    warmup_steps: int
    warmup_learning_rate: float
    weight_decay: float
    weight_decay_end: float | None
    decay: str
    coupled_decay: bool
    beta1: float
    beta2: float
    epsilon: float
    moment_dtype: str
    clip_update: float
    clip_update_of: str
    clip_norm: float
    clip: str
    layer_decay: float
    embedding_rate: float
    average: float
    average_from: str
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
    log_every: int
    profile: str
    hang_seconds: float
    max_skipped_steps: int
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    finetune: FinetuneConfig
    objective: ObjectiveConfig
    masked_patch: Masked_patchConfig
    mae: MaeConfig
    fcmae: FcmaeConfig
    dino: DinoConfig
    distillation: DistillationConfig
    eva: EvaConfig
    dvae: DvaeConfig
    beit: BeitConfig
    vqkd: VqkdConfig
    beitv2: Beitv2Config
    contrastive: ContrastiveConfig
    depth: DepthConfig
    detection: DetectionConfig
    segmentation: SegmentationConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    evaluate: EvaluateConfig
    fewshot: FewshotConfig
    knn: KnnConfig
    sweep: SweepConfig
