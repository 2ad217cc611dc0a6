"""Options of the sections `loss` and `optimizer`."""

from vit_jax.options.objective import only_with_objective
from vit_jax.options.option import only_with, option, options, unless
from vit_jax.options.rules import RATE, SHARE, flag, number, one_of, several, whole

# Names of optimizers. Each is a module of vit_jax/training/update_rules.
OPTIMIZERS = ("adam", "adafactor", "sgd", "muon", "lamb")
LOSSES = ("softmax", "sigmoid", "binary")
_LABELLED = only_with_objective("classification", "distillation")


@options
class LossOptions:
    """Classification loss"""

    name: str = option(
        "softmax",
        one_of(*LOSSES),
        "Cross-entropy by softmax; sigmoid: binary cross-entropy summed over classes; binary: "
        "its mean (DeiT III).",
        requires=_LABELLED,
    )
    label_smoothing: float = option(
        0.0,
        SHARE,
        "Share of the target distribution that is uniform over classes.",
        validate=lambda value, config: unless(
            value == 0 or config.loss.name != "binary",
            "0 with loss.name='binary', whose targets are 0 or 1",
        ),
        requires=_LABELLED,
    )
    class_weights: str = option(
        "none",
        one_of("none", "sqrt", "full"),
        "Weights of images in the loss: inverse class count (full) or its square root; their "
        "mean is 1.",
        validate=lambda value, config: unless(
            value == "none" or config.data.balance == "none",
            f"'none' with data.balance={config.data.balance!r}: use one correction for unequal "
            "classes",
        ),
        requires=_LABELLED,
    )


@options
class OptimizerOptions:
    """Optimizer and learning rate"""

    name: str = option("adam", one_of(*OPTIMIZERS), "Kind of optimizer.")
    learning_rate: float = option(1e-3, number(least=0), "Peak learning rate, after the warm-up.")
    schedule: str = option(
        "cosine",
        one_of("linear", "cosine", "polynomial", "constant", "stairs"),
        "Decay of the learning rate.",
    )
    end_learning_rate: float = option(
        0.0,
        number(least=0),
        "Learning rate of the last update.",
        requires=only_with("optimizer.schedule", "linear", "cosine", "polynomial"),
    )
    power: float = option(
        0.9,
        number(above=0, most=100),
        "Exponent of the remaining share of the run in the schedule polynomial.",
        requires=only_with("optimizer.schedule", "polynomial"),
    )
    stairs: tuple[float, ...] = option(
        (0.3, 0.6, 0.9),
        several(number(above=0, below=1), least=1, ascending=True),
        "Shares of the run after which the schedule stairs lowers the learning rate; BiT's by "
        "default.",
        requires=only_with("optimizer.schedule", "stairs"),
    )
    stair_factor: float = option(
        0.1,
        number(above=0, most=1),
        "Factor on the learning rate at each stair.",
        requires=only_with("optimizer.schedule", "stairs"),
    )
    count_from: int = option(
        1,
        whole(0, 1),
        "Number of the first update in the schedule; 0 in big_vision, Optax and others.",
    )
    warmup_steps: int = option(10_000, whole(0), "Steps of the linear learning rate warm-up.")
    warmup_learning_rate: float = option(
        0.0,
        number(least=0),
        "Learning rate at the start of the warm-up.",
        requires=only_with("optimizer.warmup_steps"),
    )
    weight_decay: float = option(
        0.1, number(least=0), "Decoupled weight decay; it is multiplied by the learning rate."
    )
    weight_decay_end: float | None = option(
        None,
        number(least=0),
        "Weight decay of the last update, reached by a cosine schedule (DINO); None: constant.",
    )
    decay: str = option(
        "kernels",
        one_of("kernels", "tables", "matrices", "all"),
        "Decayed parameters: kernels; also tables of position biases and mask tokens (tables: "
        "BEiT, EVA); all but biases and scales (matrices); or all.",
    )
    coupled_decay: bool = option(
        False,
        flag(),
        "Adds weight decay to the gradient (L2), as BiT does: ten times as strong with momentum "
        "0.9.",
    )
    beta1: float = option(0.9, RATE, "Decay rate of the first moment; momentum of sgd and muon.")
    beta2: float = option(
        0.999,
        RATE,
        "Decay rate of the second moment.",
        requires=only_with("optimizer.name", "adam", "adafactor", "muon", "lamb"),
    )
    epsilon: float = option(
        1e-8,
        number(least=0, most=1),
        "Constant added to the square root of the second moment.",
        requires=only_with("optimizer.name", "adam", "lamb", "muon"),
    )
    moment_dtype: str = option(
        "float32", one_of("float32", "bfloat16"), "Dtype of the first moment or momentum."
    )
    clip_update: float = option(
        0.0, number(least=0), "Adafactor: largest RMS of a kernel's update before momentum; 0: off."
    )
    clip_update_of: str = option(
        "projection",
        one_of("projection", "array"),
        "Adafactor: RMS of query, key and value kernels separately, or of the array that "
        "contains them.",
        requires=only_with("optimizer.clip_update"),
    )
    clip_norm: float = option(
        1.0, number(least=0), "Largest gradient norm, of the parts given by optimizer.clip; 0: off."
    )
    clip: str = option(
        "global",
        one_of("global", "tensor", "module"),
        "Gradients that share one norm: all; each array (DINO); the model and each part of the "
        "objective (DINOv2).",
        validate=lambda value, config: unless(
            value == "global" or config.optimizer.clip_norm > 0,
            "'global' with optimizer.clip_norm=0, which clips nothing",
        ),
    )
    layer_decay: float = option(
        1.0,
        number(above=0, most=1),
        "Layer-wise learning rate decay: factor for each layer below the head.",
    )
    embedding_rate: float = option(
        1.0,
        number(least=0),
        "Factor on the learning rate of the patch embedding; 0.2 in DINOv2.",
        validate=lambda value, config: unless(
            value == 1 or config.finetune.train == "all",
            f"1 with finetune.train={config.finetune.train!r}, which does not train the patch "
            "embedding",
        ),
    )
    average: float = option(
        0.0,
        RATE,
        "Decay rate of the exponential moving average of parameters for evaluation; 0: off.",
    )
    average_from: str = option(
        "zero",
        one_of("zero", "weights"),
        "Start of the average: zero with bias correction, or the first parameters.",
        requires=only_with("optimizer.average"),
    )
    sum_gradients: str = option(
        "as_computed",
        one_of("as_computed", "float32_once"),
        "Gradient sum over devices: as computed, in model.dtype, or once at the end of a step, "
        "in float32.",
        operational=True,
    )
