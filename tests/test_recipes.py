"""Configs of published recipes have the published values, and reject models without a recipe."""

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.test_config import load
from vit_jax.config import check, leaves
from vit_jax.errors import UserError
from vit_jax.models import parse_name
from vit_jax.recipes import TRANSFER, finetune

# Steps and learning rates are from table 4, the shares of the dev splits from appendix B.1.1, and
# the warm-ups from the authors' code.
RATES = (0.001, 0.003, 0.01, 0.03)
TABLE_4 = {
    # Steps, warm-up steps, learning rates, training and dev split for choosing the learning rate,
    # test split.
    "imagenet2012": (20_000, 500, (0.003, 0.01, 0.03), ("[:99%]", "[99%:]"), "validation"),
    "cifar100": (10_000, 500, RATES, ("[:98%]", "[98%:]"), "test"),
    "cifar10": (10_000, 500, RATES, ("[:98%]", "[98%:]"), "test"),
    "oxford_iiit_pet": (500, 100, RATES, ("[:90%]", "[90%:]"), "test"),
    "oxford_flowers102": (500, 100, RATES, ("[:90%]", "[90%:]"), "test"),
}
NATURAL = ("caltech101", "cifar-100", "dtd", "flowers102", "pets", "sun397", "svhn")
SPECIALIZED = ("camelyon", "eurosat", "resisc45", "retinopathy")
STRUCTURED = (
    "clevr-count",
    "clevr-dist",
    "dmlab",
    "dspr-loc",
    "dspr-ori",
    "kitti-dist",
    "snorb-azim",
)
VTAB = [f"vtab/{task}" for task in (*NATURAL, *SPECIALIZED, *STRUCTURED, "snorb-elev")]


def row(config) -> tuple:
    sweep = config.sweep
    splits = sweep.train_split, sweep.dev_split
    return config.steps, config.optimizer.warmup_steps, sweep.rates, splits, config.data.test_split


@pytest.mark.parametrize("dataset", TABLE_4)
def test_config_holds_the_row_of_its_data_set(dataset):
    config = load("finetune", f"dataset={dataset}")
    assert row(config) == TABLE_4[dataset]
    assert (config.data.source, config.data.path, config.data.train_split) == (
        "tfds",
        dataset,
        "train",
    )


@pytest.mark.parametrize("dataset", VTAB)
def test_config_holds_the_row_of_vtab(dataset):
    config = load("finetune", f"dataset={dataset}")
    assert row(config) == (2500, 200, (0.01,), ("train800", "val200"), "test")
    assert config.optimizer.learning_rate == 0.01
    data, task = config.data, dataset.removeprefix("vtab/")
    assert (data.source, data.path, data.train_split) == ("vtab", task, "train800val200")
    assert data.flip == (task not in ("dspr-ori", "snorb-azim", "dspr-loc"))
    whole = task in ("clevr-count", "clevr-dist", "dmlab", "kitti-dist", "dspr-loc")
    assert data.crop == ("none" if whole else "square")


@pytest.mark.parametrize("dataset", [*TABLE_4, "folder", "vtab/dtd", "vtab/dmlab"])
def test_config_has_the_values_that_all_rows_share(dataset):
    config = load("finetune", f"dataset={dataset},model=ViT-B/16")
    check(config)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.beta1, config.batch_size) == ("sgd", 0.9, 512)
    assert (optimizer.schedule, optimizer.end_learning_rate) == ("cosine", 0.0)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.average) == (0.0, 1.0, 0.0)
    assert (optimizer.layer_decay, config.finetune.head, config.finetune.train) == (
        1.0,
        "new",
        "all",
    )
    assert (config.loss.name, config.loss.label_smoothing) == ("softmax", 0.0)
    # None means the model's default, which is 0.
    assert (
        not config.model.dropout and not config.model.stochastic_depth and not config.augment.mixup
    )
    assert config.augment.level == "none"
    data = config.data
    assert (data.image_size, data.test_crop, data.test_resize) == (384, "square", 384)
    assert data.crop_resize == (448 if data.crop == "square" else None)


@pytest.mark.parametrize(("size", "squeezed"), [(384, 448), (512, 597), (518, 604), (224, 261)])
def test_images_of_other_sizes_are_cropped_in_the_same_ratio(size, squeezed):
    data = load("finetune", f"dataset=imagenet2012,size={size}").data
    assert (data.image_size, data.crop_resize, data.test_resize) == (size, squeezed, size)


@pytest.mark.parametrize("dataset", [*TABLE_4, "folder", "vtab/dtd"])
def test_highest_rate_is_only_tried_for_resnets_and_hybrids_on_imagenet(dataset):
    sweep = finetune(dataset).sweep
    assert 0.06 not in sweep.rates
    assert sweep.resnet_rates == ((0.06,) if dataset == "imagenet2012" else ())


def test_only_the_users_folder_has_a_recipe_that_the_paper_lacks():
    assert TRANSFER.keys() == {*TABLE_4, "folder"}
    assert row(finetune("folder")) == row(finetune("oxford_iiit_pet"))


def test_unknown_data_set_names_the_nearest():
    with pytest.raises(
        UserError, match="no recipe for the data set 'vtab/clever-count'.*'vtab/clevr-count'"
    ):
        load("finetune", "dataset=vtab/clever-count")


def test_masked_patch_config_holds_the_papers_values():
    config = load("masked_patch_b16")
    check(config)
    optimizer = config.optimizer
    assert (config.steps, config.batch_size, config.model.name) == (1_000_000, 4096, "ViT-B/16")
    objective = config.masked_patch
    assert config.objective.name == "masked_patch"
    assert (objective.mask_ratio, objective.target) == (0.5, "color")
    assert (optimizer.name, optimizer.learning_rate, optimizer.schedule) == ("adam", 2e-4, "cosine")
    assert (optimizer.warmup_steps, optimizer.weight_decay) == (10_000, 0.1)


@pytest.mark.parametrize("model", ["b16", "l16", "h14"])
def test_mae_config_holds_the_published_values(model):
    config = load(f"mae_{model}")
    check(config)
    objective, optimizer = config.mae, config.optimizer
    assert (config.epochs, config.batch_size, objective.mask_ratio) == (800, 4096, 0.75)
    assert objective.normalize_targets
    assert (objective.decoder_dim, objective.decoder_depth, objective.decoder_heads) == (512, 8, 16)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.05)
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.clip_norm) == (
        2.4e-3,
        "cosine",
        0.0,
    )
    assert optimizer.warmup_steps == 12_511  # 40 epochs.
    assert (config.model.position, config.data.crop_area) == ("sincos2d_mae", (0.2, 1.0))
    # As timm's add_weight_decay: parameters with one axis have no weight decay.
    assert (config.model.initialization, optimizer.decay) == ("mae", "matrices")
    assert config.model.mean == (0.485, 0.456, 0.406) and config.model.std == (
        0.229,
        0.224,
        0.225,
    )
    assert load("mae_finetune").model.mean is None  # It uses the checkpoint's mean.
    assert config.augment.level == "none" and config.augment.policy is None and config.data.flip
    assert (config.data.crop, config.data.interpolation) == ("random_resized", "bicubic")
    assert optimizer.count_from == 0


def test_fcmae_config_holds_the_published_values():
    config = load("fcmae")
    check(config)
    data, objective, optimizer = config.data, config.fcmae, config.optimizer
    assert (config.model.name, config.epochs, config.batch_size) == ("ConvNeXtV2-B", 1600, 4096)
    assert config.objective.name == "fcmae"
    assert (objective.mask_ratio, objective.normalize_targets) == (0.6, True)
    assert (objective.decoder_dim, objective.decoder_blocks) == (512, 1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.05)
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.clip_norm) == (
        2.4e-3,
        "cosine",
        0.0,
    )
    assert (optimizer.warmup_steps, optimizer.end_learning_rate) == (12_511, 0.0)  # 40 epochs.
    assert (optimizer.decay, optimizer.count_from) == ("matrices", 0)
    assert (data.crop, data.crop_area, data.interpolation) == (
        "random_resized",
        (0.2, 1.0),
        "bicubic",
    )
    assert config.augment.level == "none" and config.augment.policy is None and data.flip
    assert config.model.mean == (0.485, 0.456, 0.406) and config.model.std == (
        0.229,
        0.224,
        0.225,
    )
    assert not config.model.stochastic_depth


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("ViT-B/16", (100, 2e-3, 0.65, 0.1)),
        ("ViT-L/16", (50, 4e-3, 0.75, 0.2)),
        ("ViT-H/14", (50, 4e-3, 0.75, 0.3)),
    ],
)
def test_mae_finetune_config_holds_the_published_values(model, row):
    config = load("mae_finetune", f"model={model}")
    check(config)
    augment, optimizer = config.augment, config.optimizer
    found = (
        config.epochs,
        optimizer.learning_rate,
        optimizer.layer_decay,
        config.model.stochastic_depth,
    )
    assert found == row
    assert (config.batch_size, optimizer.warmup_steps, optimizer.weight_decay) == (1024, 6256, 0.05)
    assert (augment.policy, augment.randaugment) == ("rand-m9-mstd0.5-inc1", None)
    assert (augment.mixup, augment.cutmix, augment.cutmix_share, augment.erasing) == (
        0.8,
        1.0,
        0.5,
        0.25,
    )
    assert (config.loss.name, config.loss.label_smoothing) == ("softmax", 0.1)
    model = config.model
    assert (model.pooling, model.cls_token, model.fc_norm, model.position) == (
        "gap",
        True,
        True,
        "1d",
    )
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.999, 0.0)
    assert (optimizer.decay, optimizer.schedule, optimizer.end_learning_rate) == (
        "kernels",
        "cosine",
        1e-6,
    )
    data = config.data
    assert (data.crop_area, data.crop_aspect, data.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), True)
    assert (data.test_crop, data.test_resize, data.test_interpolation) == ("short_side", 256, None)
    assert (config.data.crop, config.data.interpolation) == ("random_resized", "bicubic")
    assert optimizer.count_from == 0


@pytest.mark.parametrize(
    ("argument", "row"),
    [
        ("model=ConvNeXt-T", (300, 4096, 4e-3, 0.05, 6256, 1.0, 0.1, 0.8, 0.9999, 224, 256)),
        ("model=ConvNeXt-L", (300, 4096, 4e-3, 0.05, 6256, 1.0, 0.5, 0.8, 0.9999, 224, 256)),
        (
            "model=ConvNeXt-XL,task=i21k",
            (90, 4096, 4e-3, 0.05, 17330, 1.0, 0.2, 0.8, 0.0, 224, 256),
        ),
        ("model=ConvNeXt-B,task=finetune", (30, 512, 5e-5, 1e-8, 0, 0.8, 0.2, 0.0, 0.0, 224, 256)),
        (
            "model=ConvNeXt-XL,task=finetune,size=384",
            (30, 512, 5e-5, 1e-8, 0, 0.8, 0.4, 0.0, 0.9999, 384, 384),
        ),
        (
            "model=ConvNeXt-L,task=finetune_i1k",
            (30, 512, 5e-5, 1e-8, 0, 0.7, 0.95, 0.0, 0.0, 384, 384),
        ),
        (
            "model=ConvNeXtV2-Atto,task=finetune_fcmae",
            (600, 1024, 8e-4, 0.3, 0, 0.9, 0.1, 0.0, 0.9999, 224, 256),
        ),
        (
            "model=ConvNeXtV2-T,task=finetune_fcmae",
            (300, 1024, 3.2e-3, 0.05, 50046, 0.9, 0.2, 0.8, 0.9999, 224, 256),
        ),
        (
            "model=ConvNeXtV2-B,task=finetune_fcmae",
            (100, 1024, 2.5e-3, 0.05, 25023, 0.6, 0.1, 0.8, 0.9999, 224, 256),
        ),
    ],
)
def test_convnext_config_holds_the_published_values(argument, row):
    config = load("convnext", argument)
    check(config)
    augment, data, optimizer = config.augment, config.data, config.optimizer
    found = (config.epochs, config.batch_size, optimizer.learning_rate, optimizer.weight_decay)
    found += (
        optimizer.warmup_steps,
        optimizer.layer_decay,
        config.model.stochastic_depth,
        augment.mixup,
    )
    assert (*found, optimizer.average, data.image_size, data.test_resize) == row
    assert augment.cutmix == (1.0 if augment.mixup else 0.0)
    assert (augment.policy, augment.erasing) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert (config.loss.name, config.loss.label_smoothing) == (
        "softmax",
        0.2 if "Atto" in argument else 0.1,
    )
    assert (optimizer.name, optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (
        "adam",
        0.9,
        0.999,
        0.0,
    )
    assert (optimizer.decay, optimizer.schedule, optimizer.end_learning_rate) == (
        "matrices",
        "cosine",
        1e-6,
    )
    assert (data.crop, data.crop_area, data.interpolation) == (
        "random_resized",
        (0.08, 1.0),
        "bicubic",
    )
    assert data.test_crop == ("square" if data.image_size == 384 else "short_side")
    # Fine-tuning uses the checkpoint's mean.
    assert (config.model.mean is None) == ("finetune" in argument)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model=ConvNeXt-XL", "no recipe for 'ConvNeXt-XL' and task=i1k"),
        ("task=i2k", "no recipe for task=i2k; did you mean"),
    ],
)
def test_convnext_without_a_recipe_is_named(argument, message):
    with pytest.raises(UserError, match=message):
        load("convnext", argument)


EVAS = [
    ("eva", "", (150, 4096, 1e-3, 6932, 0.1, "eva", 1.0)),
    ("eva02", "model=EVA02-Ti/14", (240, 4000, 3e-3, 3549, 0.0, "eva02", 0.1)),
    ("eva02", "", (150, 2048, 1.5e-3, 6932, 0.0, "eva02", 0.1)),
    ("eva02", "model=EVA02-L/14", (150, 2048, 1.5e-3, 6932, 0.1, "eva02", 0.1)),
]


@pytest.mark.parametrize(("file", "argument", "row"), EVAS)
def test_evas_pre_training_holds_the_published_values(file, argument, row):
    config = load(file, argument)
    check(config)
    data, model, objective, optimizer = (
        config.data,
        config.model,
        config.objective,
        config.optimizer,
    )
    found = config.epochs, config.batch_size, optimizer.learning_rate, optimizer.warmup_steps
    assert (
        *found,
        model.stochastic_depth,
        model.initialization,
        config.eva.embedding_gradient,
    ) == row
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-6)
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip_norm) == (0.05, "tables", 3.0)
    assert (optimizer.warmup_learning_rate, optimizer.end_learning_rate) == (0.0, 1e-5)
    assert (data.crop_area, data.image_size, data.interpolation) == ((0.2, 1.0), 224, "bicubic")
    assert (objective.name, objective.teacher_features) == ("eva", "head")
    assert round(config.eva.mask_ratio * 256) == 105
    assert (model.pooling, model.cls_token, model.fc_norm) == ("gap", True, False)
    assert model.mean == (0.48145466, 0.4578275, 0.40821073)
    assert config.augment.policy is None and config.augment.level == "none"


# Image size, epochs, batch size, learning rate, warm-up steps, layer-wise learning rate decay,
# stochastic depth, label smoothing, smallest crop area, decay of the parameter average, CutMix.
TUNED = [
    (
        "eva02:model=EVA02-Ti/14,task=finetune",
        (336, 100, 1024, 2e-4, 6256, 0.9, 0.1, 0.1, 0.08, 0.9999, 0),
    ),
    (
        "eva02:model=EVA02-S/14,task=finetune",
        (336, 100, 1024, 1e-4, 6256, 0.8, 0.1, 0.1, 0.08, 0.9999, 0),
    ),
    ("eva02:task=finetune", (448, 30, 1024, 1e-4, 3753, 0.7, 0.1, 0.1, 0.08, 0.9999, 0)),
    (
        "eva02:model=EVA02-L/14,task=finetune",
        (448, 30, 1024, 5e-5, 3753, 0.8, 0.15, 0.2, 0.08, 0.9999, 0),
    ),
    ("eva02:task=finetune_i21k", (448, 40, 2048, 3e-4, 6932, 0.7, 0.1, 0.1, 0.2, 0, 0)),
    (
        "eva02:model=EVA02-L/14,task=finetune_i21k",
        (448, 20, 1024, 2e-4, 13864, 0.75, 0.15, 0.1, 0.2, 0, 0),
    ),
    ("eva02:task=finetune_i1k", (448, 15, 512, 5e-5, 5005, 0.8, 0.15, 0.2, 0.08, 0.9999, 0)),
    (
        "eva02:model=EVA02-L/14,task=finetune_i1k",
        (448, 20, 512, 2e-5, 5005, 0.85, 0.15, 0.2, 0.08, 0.9999, 0),
    ),
    ("eva:task=finetune_i21k", (224, 60, 4096, 1e-4, 51991, 0.85, 0.4, 0.1, 0.5, 0, 1)),
    ("eva:task=finetune_i1k", (336, 10, 512, 3e-5, 5005, 0.95, 0.4, 0.3, 0.08, 0.9999, 0)),
    ("eva:task=finetune_i1k,size=560", (560, 15, 512, 3e-5, 5005, 0.95, 0.4, 0.3, 0.08, 0.9999, 0)),
]


@pytest.mark.parametrize(("name", "row"), TUNED, ids=[name for name, _ in TUNED])
def test_evas_fine_tuning_holds_the_published_values(name, row):
    file, _, argument = name.partition(":")
    config = load(file, argument)
    check(config)
    augment, data, optimizer = config.augment, config.data, config.optimizer
    found = (data.image_size, config.epochs, config.batch_size, optimizer.learning_rate)
    found += (optimizer.warmup_steps, optimizer.layer_decay, config.model.stochastic_depth)
    assert (
        *found,
        config.loss.label_smoothing,
        data.crop_area[0],
        optimizer.average,
        augment.cutmix,
    ) == row
    assert augment.policy == "rand-m9-mstd0.5-inc1" and not augment.mixup and not augment.erasing
    assert (data.test_crop, data.test_resize) == ("short_side", data.image_size)
    of_eva = name == "eva:task=finetune_i21k"
    last = optimizer.end_learning_rate
    assert (optimizer.weight_decay, last, optimizer.clip_norm) == (
        0.05,
        1e-6 if of_eva else 0.0,
        0.0,
    )
    assert optimizer.beta2 == (0.98 if of_eva else 0.999)
    # The mean is that of the checkpoint.
    assert (config.model.fc_norm, config.model.mean) == (True, None)


@pytest.mark.parametrize(
    ("file", "argument", "message"),
    [
        (
            "eva02",
            "model=EVA02-S/14,task=finetune_i21k",
            "no recipe for 'EVA02-S/14' and task=finetune_i21k",
        ),
        ("eva02", "task=tune", "no task=tune; did you mean|there are"),
        ("eva02", "task=finetune,teacher=x", "teacher=x is of task=pretrain"),
        ("eva", "size=336", "size=336 is of fine-tuning"),
        ("eva", "task=finetune_i1k,size=224", "has no size=224; there are: 336, 560"),
    ],
)
def test_eva_without_a_recipe_is_named(file, argument, message):
    with pytest.raises(UserError, match=message):
        load(file, argument)


def test_the_discrete_autoencoders_config_holds_the_papers_values():
    config = load("dvae")
    check(config)
    dvae, optimizer = config.dvae, config.optimizer
    assert (config.model.name, config.objective.name, dvae.codes) == ("DVAE", "dvae", 8192)
    assert (dvae.kl_weight, dvae.kl_steps) == (6.6, 5000)
    assert (dvae.temperature, dvae.temperature_end) == (1.0, 1 / 16)
    assert dvae.temperature_steps == 150_000
    assert (config.batch_size, config.steps, optimizer.schedule) == (512, 1_200_000, "cosine")
    assert (optimizer.learning_rate, optimizer.end_learning_rate) == (1e-4, 1.25e-6)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.999, 1e-4)
    # The square crops of the paper's listing 1, as shares of the area of a 4:3 photograph.
    shares = [3 / 4 * (8 / of) ** 2 for of in (12, 9)]
    assert config.data.crop_area == pytest.approx(shares, abs=0.005)
    assert (config.data.crop_aspect, config.data.interpolation) == ((1.0, 1.0), "area")


@pytest.mark.parametrize(
    ("argument", "row"),
    [
        ("teacher=x", (150, 10_000, "imagenet21k", None)),
        ("task=pretrain_i1k,model=BEiT-L/16", (800, 6256, "imagenet2012", (0.485, 0.456, 0.406))),
    ],
)
def test_beits_pre_training_holds_the_published_values(argument, row):
    config = load("beit", argument)
    data, model, objective, optimizer = (
        config.data,
        config.model,
        config.objective,
        config.optimizer,
    )
    assert (config.epochs, optimizer.warmup_steps, data.path, model.mean) == row
    assert (config.batch_size, optimizer.learning_rate, optimizer.end_learning_rate) == (
        2048,
        1.5e-3,
        1e-5,
    )
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_norm, model.stochastic_depth) == (0.05, 3.0, 0.1)
    assert (model.position_at, model.initialization, model.fc_norm) == ("shared", "beit", False)
    assert (objective.name, objective.teacher_size) == ("beit", 112)
    assert config.beit.mask_ratio == 75 / 196
    assert (data.image_size, config.augment.color_jitter, data.crop_area) == (
        224,
        (0.4,) * 3,
        (0.08, 1.0),
    )


@pytest.mark.parametrize(
    ("argument", "row"),
    [
        ("task=finetune", (224, 100, 1024, 4e-3, 25_023, 0.65, 0.1, 0.05, 0.0, 0.8)),
        (
            "task=finetune,model=BEiT-L/16,size=512",
            (512, 50, 1024, 1e-3, 6256, 0.75, 0.2, 0.05, 0.0, 0.8),
        ),
        ("task=finetune_i21k", (224, 90, 4096, 3e-3, 17_330, 0.65, 0.2, 0.05, 3.0, None)),
        (
            "task=finetune_i21k,model=BEiT-L/16",
            (224, 90, 2048, 2e-3, 34_661, 0.75, 0.2, 0.05, 1.0, None),
        ),
        ("task=finetune_i1k,size=384", (384, 30, 512, 2e-5, 12_511, 0.85, 0.1, 1e-8, 0.0, None)),
        (
            "task=finetune_i1k,model=BEiT-L/16",
            (224, 30, 512, 2e-5, 12_511, 0.9, 0.4, 1e-8, 0.0, None),
        ),
    ],
)
def test_beits_fine_tuning_holds_the_published_values(argument, row):
    config = load("beit", argument)
    check(config)
    augment, data, optimizer = config.augment, config.data, config.optimizer
    found = (data.image_size, config.epochs, config.batch_size, optimizer.learning_rate)
    found += (optimizer.warmup_steps, optimizer.layer_decay, config.model.stochastic_depth)
    assert (*found, optimizer.weight_decay, optimizer.clip_norm, augment.mixup) == row
    assert (augment.policy, augment.erasing) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert (config.loss.label_smoothing, optimizer.average, augment.cutmix) == (
        0.1,
        0.0,
        float(bool(row[-1])),
    )
    assert (config.model.position_at, config.model.fc_norm, config.model.mean) == (
        "stem",
        True,
        None,
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("task=tune", "no task=tune"),
        ("model=BEiT-H/16", "no recipe for 'BEiT-H/16'"),
        ("size=384", "size=384 is of fine-tuning"),
        ("task=finetune,teacher=x", "teacher=x is of task=pretrain"),
        ("task=finetune,size=512", "has no size=512; there are: 224, 384"),
        ("task=finetune_i21k,size=384", "has no size=384; there are: 224$"),
    ],
)
def test_beit_without_a_recipe_is_named(argument, message):
    with pytest.raises(UserError, match=message):
        load("beit", argument)


def test_the_tokeniser_of_beit_v2_holds_the_authors_values():
    config = load("vqkd", "decoder=1")
    check(config)
    data, model, objective, optimizer = (
        config.data,
        config.model,
        config.objective,
        config.optimizer,
    )
    assert (config.epochs, config.batch_size, optimizer.learning_rate) == (100, 512, 2e-4)
    assert (optimizer.warmup_steps, optimizer.end_learning_rate) == (25_023, 1e-5)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.99, 1e-8)
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip_norm) == (1e-4, "kernels", 0.0)
    assert (data.crop_area, data.image_size, data.interpolation) == ((0.08, 1.0), 224, "bicubic")
    vqkd = config.vqkd
    assert (vqkd.codes, vqkd.code_dim, vqkd.code_momentum) == (8192, 32, 0.99)
    assert (vqkd.commitment, vqkd.revive_below, objective.teacher_features) == (1.0, 0.0, "head")
    assert (vqkd.decoder_dim, vqkd.decoder_depth, vqkd.decoder_heads) == (768, 1, 12)
    assert (model.mean, model.position, model.initialization) == (
        None,
        None,
        "vqkd",
    )  # A mean of 0.5, and an absolute position embedding.


@pytest.mark.parametrize(
    ("argument", "row"),
    [
        ("", (1600, 0.1, 0.999, 0.1)),
        ("epochs=300", (300, 0.0, 0.98, 0.1)),
        ("model=BEiT-L/16", (1600, 0.1, 0.999, 1e-5)),
    ],
)
def test_beit_v2s_pre_training_holds_the_published_values(argument, row):
    config = load("beitv2", f"{argument},teacher=x" if argument else "teacher=x")
    data, model, objective, optimizer = (
        config.data,
        config.model,
        config.objective,
        config.optimizer,
    )
    scale = parse_name(model.name)[1]["layer_scale"]
    assert (config.epochs, model.stochastic_depth, optimizer.beta2, scale) == row
    assert (config.batch_size, optimizer.learning_rate, optimizer.end_learning_rate) == (
        2048,
        1.5e-3,
        1e-5,
    )
    assert (optimizer.warmup_steps, optimizer.warmup_learning_rate, optimizer.clip_norm) == (
        6256,
        0.0,
        3.0,
    )
    assert (optimizer.beta1, optimizer.epsilon, optimizer.weight_decay) == (0.9, 1e-8, 0.05)
    assert (data.path, data.crop_area, model.mean) == (
        "imagenet2012",
        (0.2, 1.0),
        (0.485, 0.456, 0.406),
    )
    assert (objective.name, objective.teacher_size) == ("beitv2", None)
    assert config.beitv2.mask_ratio == 75 / 196
    assert (config.beitv2.aggregate_from, config.beitv2.aggregate_layers) == (None, 2)
    assert (model.position_at, model.initialization, config.augment.color_jitter) == (
        "shared",
        "beit",
        (0.4,) * 3,
    )


@pytest.mark.parametrize(
    ("argument", "row"),
    [
        ("task=finetune", (100, 5e-4, 25_023, 0.6, 0.2, 0.8)),
        ("task=finetune,epochs=300", (100, 5e-4, 25_023, 0.65, 0.1, 0.8)),
        ("task=finetune,model=BEiT-L/16", (50, 2e-4, 6256, 0.8, 0.2, 0.8)),
        ("task=finetune,model=BEiT-L/16,epochs=300", (50, 5e-4, 6256, 0.8, 0.2, 0.8)),
        ("task=finetune_i1k", (30, 5e-5, 25_023, 0.75, 0.1, None)),
        ("task=finetune_i1k,model=BEiT-L/16", (20, 7e-5, 6256, 0.8, 0.25, None)),
    ],
)
def test_beit_v2s_fine_tuning_holds_the_published_values(argument, row):
    config = load("beitv2", argument)
    check(config)
    augment, optimizer = config.augment, config.optimizer
    found = (config.epochs, optimizer.learning_rate, optimizer.warmup_steps, optimizer.layer_decay)
    assert (*found, config.model.stochastic_depth, augment.mixup) == row
    assert (config.batch_size, optimizer.weight_decay, augment.erasing) == (1024, 0.05, 0.25)
    assert (config.loss.label_smoothing, optimizer.average, augment.cutmix) == (
        0.1,
        0.0,
        float(bool(row[-1])),
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("epochs=800", "no epochs=800; did you mean|there are"),
        ("model=BEiT-H/16", "no model=BEiT-H/16"),
        ("task=finetune,teacher=x", "teacher=x is of task=pretrain"),
        ("task=finetune_i1k,epochs=300", "task=finetune_i1k has no epochs=300; there is: 1600"),
    ],
)
def test_beit_v2_without_a_recipe_is_named(argument, message):
    with pytest.raises(UserError, match=message):
        load("beitv2", argument)


@pytest.mark.parametrize("name", ["vit_b16_i1k", "vit_l16_i21k", "vit_h14_jft", "bit_r50x1_jft"])
def test_pre_training_crops_and_resizes_as_tensorflow(name):
    data = load(name).data
    assert (data.crop, data.crop_area, data.interpolation) == ("inception", (0.05, 1.0), "bilinear")
    assert (data.crop_aspect, data.test_interpolation) == ((0.75, 1.33), "area")


@pytest.mark.parametrize("name", ["augreg_i1k", "augreg_i21k"])
def test_augreg_crops_and_resizes_as_tensorflow(name):
    data = load(name, "model=ViT-S/16").data
    assert (data.crop, data.crop_aspect, data.interpolation) == (
        "inception",
        (0.75, 1.33),
        "bilinear",
    )


def test_fine_tuning_resizes_as_its_checkpoint():
    assert load("finetune", "dataset=cifar10").data.interpolation is None


# Values of big_vision's configs/vit_s16_i1k.py, or its code's defaults. Comments contain
# big_vision's names.
BETTER_PLAIN_VIT = {
    "seed": 0,
    "batch_size": 1024,  # input.batch_size
    "epochs": None,
    "micro_batches": 1,
    "model.name": "ViT-S/16",  # model.variant
    "model.mean": None,  # value_range(-1, 1)
    "model.std": None,
    "model.pooling": "gap",  # model.pool_type
    "model.position": "sincos2d",  # model.posemb
    "model.pre_logits": True,  # model.rep_size
    "model.dropout": 0.0,
    "model.stochastic_depth": None,
    "model.head_bias": 0.0,
    "model.gelu": None,  # tanh
    "model.norm_epsilon": None,  # 1e-6
    "model.initialization": None,  # The default of Flax.
    "model.dtype": "float32",  # model.dtype_mm
    "data.path": "imagenet2012",  # input.data
    "data.train_split": "train[:99%]",
    "data.test_split": "validation",  # evals.val
    "data.image_size": 224,  # input.pp: decode_jpeg_and_inception_crop(224)
    "data.crop": "inception",
    "data.crop_area": (0.05, 1.0),
    "data.crop_aspect": (0.75, 1.33),  # Defaults of the crop's ratio_min and ratio_max.
    "data.interpolation": "bilinear",
    "data.flip": True,  # flip_lr
    "data.test_crop": "short_side",  # pp_eval: resize_small(256)|central_crop(224)
    "data.test_resize": 256,
    "data.test_interpolation": "area",
    "augment.level": "none",
    "augment.randaugment": (2, 10.0),  # randaug(2,10)
    "augment.policy": None,
    "augment.mixup": 0.2,  # mixup.p
    "augment.cutmix": 0.0,
    "augment.erasing": 0.0,
    "augment.color_jitter": (0.0, 0.0, 0.0),
    "loss.name": "softmax",  # softmax_xent
    "loss.label_smoothing": 0.0,
    "optimizer.name": "adam",  # optax_name
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.epsilon": 1e-8,
    "optimizer.moment_dtype": "bfloat16",  # optax.mu_dtype
    "optimizer.learning_rate": 1e-3,  # lr
    "optimizer.end_learning_rate": 0.0,
    "optimizer.schedule": "cosine",  # schedule.decay_type
    "optimizer.warmup_steps": 10_000,
    "optimizer.count_from": 0,
    "optimizer.coupled_decay": False,
    "optimizer.decay": "kernels",  # wd_mults
    "optimizer.clip_norm": 1.0,  # grad_clip_norm
    "optimizer.layer_decay": 1.0,
    "optimizer.average": 0.0,
    "log_every": 50,  # log_training_steps
    "evaluate_every": 2500,  # evals.val.log_steps
    "checkpoint.every": 1000,  # ckpt_steps
}


@pytest.mark.parametrize(("epochs", "steps"), [("90", 111_477), ("150", 185_794), ("300", 371_588)])
def test_better_plain_vit_has_the_values_of_big_vision(epochs, steps):
    config = load("vit_s16_i1k", f"epochs={epochs}")
    check(config)
    given = dict(leaves(config))
    assert {key: given[key] for key in BETTER_PLAIN_VIT} == BETTER_PLAIN_VIT
    assert config.steps == steps  # big_vision's train.py rounds epochs * images / batch size.
    # big_vision multiplies its weight decay by the schedule, but not by the learning rate.
    assert config.optimizer.weight_decay * config.optimizer.learning_rate == pytest.approx(
        1e-4, rel=1e-12
    )


def test_better_plain_vit_is_the_model_of_the_paper():
    model = load("vit_s16_i1k").model
    named = {key: model[key] for key in ("pooling", "position", "pre_logits")}
    card = vit_jax.model_card(model.name, num_classes=1000, image_size=224, **named)
    assert (card.parameters, card.tokens) == (22_122_472, 196)


@pytest.mark.parametrize(
    ("epochs", "message"),
    [("100", "90, 150 or 300"), ("", "90, 150 or 300"), ("ninety", "must be a whole number")],
)
def test_better_plain_vit_was_published_for_three_lengths(epochs, message):
    with pytest.raises(UserError, match=message):
        load("vit_s16_i1k", f"epochs={epochs}")


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        (19_999, (500, 100, (200, 300, 400), 0.0)),
        (20_000, (10_000, 500, (3000, 6000, 9000), 0.1)),
        (499_999, (10_000, 500, (3000, 6000, 9000), 0.1)),
        (500_000, (20_000, 500, (6000, 12_000, 18_000), 0.1)),
    ],
)
def test_hyperrule_is_the_authors(images, rule):
    # Expected values are from bit_hyperrule.py of google-research/big_transfer.
    config = load("bit_hyperrule", f"dataset=folder,images={images}")
    optimizer = config.optimizer
    steps = tuple(round(stair * config.steps) for stair in optimizer.stairs)
    assert (config.steps, optimizer.warmup_steps, steps, config.augment.mixup) == rule


@pytest.mark.parametrize(
    ("argument", "sizes"),
    [
        ("dataset=cifar10", (160, 128)),
        ("dataset=imagenet2012", (448, 384)),
        ("dataset=imagenet2012,model=BiT-R152x4", (512, 480)),
        ("dataset=imagenet2012,size=480", (512, 480)),
        ("dataset=folder,images=100,side=95", (160, 128)),
        ("dataset=folder,images=100,side=96", (448, 384)),
        ("dataset=vtab/svhn", (160, 128)),
        ("dataset=vtab/camelyon", (448, 384)),  # Its images have 96 pixels per side.
    ],
)
def test_hyperrule_resizes_images_by_their_original_size(argument, sizes):
    data = load("bit_hyperrule", argument).data
    assert (data.crop_resize, data.image_size) == sizes
    assert (data.test_crop, data.test_resize) == ("square", data.image_size)


@pytest.mark.parametrize("dataset", [*TABLE_4, *VTAB])
def test_hyperrule_has_the_values_that_all_its_runs_share(dataset):
    config = load("bit_hyperrule", f"dataset={dataset},model=BiT-R50x1")
    plain = load("finetune", f"dataset={dataset}")
    check(config)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.beta1, optimizer.learning_rate, config.batch_size) == (
        "sgd",
        0.9,
        0.003,
        512,
    )
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.count_from) == (0.0, 0.0, 0)
    assert (optimizer.schedule, optimizer.stair_factor, config.sweep.rates) == (
        "stairs",
        0.1,
        (0.003,),
    )
    assert (config.data.flip, config.data.crop) == (plain.data.flip, plain.data.crop)


def test_hyperrule_requires_the_number_of_a_folders_images():
    with pytest.raises(UserError, match="number of training images: dataset=folder,images=4000"):
        load("bit_hyperrule", "dataset=folder")


# Epochs, batch size, weight decay; learning rate and its final value; image size in training, size
# to which test images are resized.
DEIT = {
    "model=ViT-Ti/16": (300, 1024, 0.05, 1e-3, 1e-5, 224, 256),
    "model=ViT-B/16,teacher=hf://timm/teacher": (300, 1024, 0.05, 1e-3, 1e-5, 224, 256),
    "model=ViT-B/16,task=finetune_i1k": (30, 512, 1e-8, 5e-6, 5e-6, 384, 438),
}


@pytest.mark.parametrize("argument", DEIT)
def test_deit_config_holds_the_published_values(argument):
    config = load("deit", argument)
    config.finetune.checkpoint = "/runs/pretrained" if config.finetune.head == "kept" else None
    check(config)
    augment, optimizer, data, model = config.augment, config.optimizer, config.data, config.model
    found = (
        *(config.epochs, config.batch_size, optimizer.weight_decay, optimizer.learning_rate),
        *(optimizer.end_learning_rate, data.image_size, data.test_resize),
    )
    assert found == pytest.approx(DEIT[argument])
    assert optimizer.warmup_steps == round(5 * 1_281_167 / config.batch_size)
    assert (optimizer.warmup_learning_rate, optimizer.clip_norm, optimizer.schedule) == (
        1e-6,
        0.0,
        "cosine",
    )
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert (augment.policy, augment.mixup, augment.cutmix) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
    assert (augment.erasing, augment.cutmix_share, config.loss.label_smoothing) == (0.25, 0.5, 0.1)
    assert (data.crop, data.crop_area, data.repeats, data.test_crop) == (
        *("random_resized", (0.08, 1.0)),
        *(3, "short_side"),
    )
    assert (model.stochastic_depth, model.dropout, optimizer.average) == (0.1, None, 0.0)
    tuned, taught = "finetune" in argument, "teacher" in argument
    assert (model.initialization, model.gelu) == ((None, None) if tuned else ("deit", "erf"))
    assert model.distillation == ("heads" if taught else None)
    if taught:
        wanted = ("distillation", "hard", 0.5, "hf://timm/teacher", "bfloat16")
        values = config.objective
        assert wanted == (
            *(values.name, config.distillation.kind, config.distillation.teacher_weight),
            *(values.teacher, values.teacher_dtype),
        )


def test_deit_config_rejects_models_without_a_recipe():
    with pytest.raises(UserError, match="no recipe for 'ViT-L/16' and task=i1k"):
        load("deit", "model=ViT-L/16")
    with pytest.raises(UserError, match="no recipe for 'ViT-S/16' and task=finetune_i1k"):
        load("deit", "recipe=deit3,task=finetune_i1k")
    with pytest.raises(UserError, match="no recipe=deit4"):
        load("deit", "recipe=deit4")
    with pytest.raises(UserError, match="teacher=x is of recipe=deit"):
        load("deit", "recipe=deit3,teacher=x")


# Epochs, batch size, weight decay; learning rate, warm-up steps; stochastic depth, image size.
DEIT3 = {
    "model=ViT-S/16": (800, 2048, 0.05, 4e-3, 3128, 0.05, 224),
    "model=ViT-B/16": (800, 2048, 0.05, 3e-3, 3128, 0.2, 192),
    "model=ViT-L/16": (800, 2048, 0.05, 3e-3, 3128, 0.45, 192),
    "model=ViT-H/14": (800, 2048, 0.05, 3e-3, 3128, 0.6, 154),
    "model=ViT-H/14,task=finetune_i1k": (20, 512, 0.1, 1e-5, 12_511, 0.55, 224),
    "model=ViT-S/16,task=finetune_i1k_384": (20, 512, 0.1, 1e-5, 12_511, 0.0, 384),
    "model=ViT-L/16,task=finetune_i1k_384": (20, 512, 0.1, 1e-5, 12_511, 0.4, 384),
    "model=ViT-B/16,task=i21k": (240, 2048, 0.02, 1e-3, 34_661, 0.1, 224),
    "model=ViT-H/14,task=i21k": (90, 2048, 0.02, 1e-3, 34_661, 0.5, 126),
    "model=ViT-B/16,task=finetune": (50, 2048, 0.02, 3e-4, 3128, 0.15, 224),
}


@pytest.mark.parametrize("argument", DEIT3)
def test_deit3_config_holds_the_published_values(argument):
    config = load("deit", f"recipe=deit3,{argument}")
    config.finetune.checkpoint = "/runs/pretrained" if config.finetune.head == "kept" else None
    check(config)
    augment, optimizer, data, model = config.augment, config.optimizer, config.data, config.model
    found = (
        *(config.epochs, config.batch_size, optimizer.weight_decay, optimizer.learning_rate),
        *(optimizer.warmup_steps, model.stochastic_depth, data.image_size),
    )
    assert found == pytest.approx(DEIT3[argument])
    task = argument.partition("task=")[2] or "i1k"
    tuned = task.startswith("finetune_i1k")
    assert (optimizer.name, optimizer.clip_norm) == (("adam", 0.0) if tuned else ("lamb", 1.0))
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert (optimizer.warmup_learning_rate, optimizer.end_learning_rate) == (1e-6, 1e-5)
    assert (optimizer.schedule, optimizer.average, optimizer.decay) == ("cosine", 0.0, "kernels")
    cropped = "simple_random" if task in ("i21k", "finetune") else "random_resized"
    assert (data.crop, data.interpolation) == (cropped, "bicubic")
    assert cropped == "simple_random" or data.crop_area == (0.08, 1.0)
    assert (data.test_crop, data.test_resize, data.repeats) == (
        *("short_side", data.image_size),
        3 if task == "i1k" else 1,
    )
    assert (augment.mixup, augment.cutmix) == (0.0 if cropped == "simple_random" else 0.8, 1.0)
    assert (augment.policy, augment.three_augment, augment.erasing) == (
        *(("rand-m9-mstd0.5-inc1", None) if tuned else (None, 0.3)),
        0.0,
    )
    loss = ("binary", 0.0) if task == "i1k" else ("softmax", 0.1)
    assert (config.loss.name, config.loss.label_smoothing) == loss
    assert (model.uniform_depth, config.finetune.head) == (True, "kept" if tuned else "new")
    assert model.layer_scale == (None if task.startswith("finetune") else 1e-4)
    assert model.head_std == (None if tuned else 0.02)


# Epochs, batch size, weight decay; learning rate, its final value, its value at the start of the
# warm-up, warm-up steps; stochastic depth, image size in training, size to which test images are
# resized.
SWIN = {
    "model=Swin-T": (300, 1024, 0.05, 1e-3, 1e-5, 1e-6, 25_023, 0.2, 224, 256),
    "model=Swin-B": (300, 1024, 0.05, 1e-3, 1e-5, 1e-6, 25_023, 0.5, 224, 256),
    "model=SwinV2-S/w16": (300, 1024, 0.05, 1e-3, 1e-5, 1e-6, 25_023, 0.3, 256, 292),
    "model=Swin-L,task=i21k": (90, 4096, 0.05, 1e-3, 1e-5, 1e-6, 17_330, 0.2, 224, 256),
    "model=SwinV2-B/w12,task=i21k": (90, 4096, 0.1, 1e-3, 1e-5, 1e-6, 17_330, 0.2, 192, 219),
    "model=Swin-T,task=finetune": (30, 1024, 1e-8, 4e-5, 4e-7, 4e-8, 6256, 0.1, 224, 256),
    "model=Swin-B/w12,task=finetune_i1k": (30, 1024, 1e-8, 4e-5, 4e-7, 4e-8, 6256, 0.5, 384, 384),
    "model=SwinV2-L/w12to24,task=finetune": (30, 1024, 1e-8, 4e-5, 4e-7, 4e-8, 6256, 0.2, 384, 384),
}


@pytest.mark.parametrize("argument", SWIN)
def test_swin_config_holds_the_published_values(argument):
    config = load("swin", argument)
    check(config)
    augment, optimizer, data = config.augment, config.optimizer, config.data
    found = (
        *(config.epochs, config.batch_size, optimizer.weight_decay, optimizer.learning_rate),
        *(optimizer.end_learning_rate, optimizer.warmup_learning_rate, optimizer.warmup_steps),
        *(config.model.stochastic_depth, data.image_size, data.test_resize),
    )
    assert found == pytest.approx(SWIN[argument])
    assert (optimizer.clip_norm, optimizer.decay, optimizer.count_from) == (5.0, "kernels", 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert (augment.policy, augment.mixup, augment.cutmix) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
    assert (augment.erasing, config.loss.label_smoothing, data.crop_area) == (
        0.25,
        0.1,
        (0.08, 1.0),
    )
    assert data.test_crop == ("square" if data.image_size == 384 else "short_side")
    assert (config.model.mean is None) == ("finetune" in argument)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("task=i22k", "no recipe for task=i22k; .*i21k"),
        ("model=Swin-L", "no recipe for 'Swin-L' and task=i1k"),
    ],
)
def test_swin_config_rejects_models_without_a_recipe(argument, words):
    with pytest.raises(UserError, match=words):
        load("swin", argument)


def test_dinov2s_last_phase_goes_through_the_large_runs_schedules_in_10_000_steps():
    last, whole = load("dinov2", "run=high_resolution,from=DIR"), load("dinov2", "run=large")
    assert (last.steps, last.data.image_size, last.finetune.checkpoint) == (10_000, 518, "DIR")
    share = last.steps / whole.steps
    assert last.optimizer.warmup_steps == share * whole.optimizer.warmup_steps
    same = ("temperature_steps", "temperature", "temperature_end", "momentum", "momentum_end")
    for name in (f"teacher_{name}" for name in same):
        scaled = share if name.endswith("steps") else 1
        assert last.dino[name] == scaled * whole.dino[name], name
    made = (
        "head_hidden",
        "prototypes",
        "bottleneck",
        "patch_prototypes",
        "patch_bottleneck",
        "centring",
    )
    assert all(last.dino[name] == whole.dino[name] for name in made)
    assert 0 < last.optimizer.learning_rate < whole.optimizer.learning_rate
    last.data.path = "/none"
    check(last)
    with pytest.raises(UserError, match="goes on from a run: run=high_resolution,from=WORKDIR"):
        load("dinov2", "run=high_resolution")


def test_dinov2s_student_of_a_frozen_teacher_is_of_any_size_and_drops_nothing():
    config = load("dinov2", "run=large,teacher=DIR,model=DINOv2-S/14")
    assert (config.objective.teacher, config.model.stochastic_depth, config.model.mlp) == (
        "DIR",
        0.0,
        None,
    )
    check(config)


@pytest.mark.parametrize(
    ("argument", "unread"),
    [
        (
            "from=/x,run=large,teacher=/y,model=ViT-B/16",
            "no model=ViT-B/16, no run=large, no teacher=/y",
        ),
        ("from=/x,run=short", "no run=short"),
        (
            "run=high_resolution,from=/x,model=ViT-B/16,teacher=/y",
            "no model=ViT-B/16, no teacher=/y",
        ),
    ],
)
def test_dinov2_refuses_an_argument_that_its_run_does_not_read(argument, unread):
    with pytest.raises(UserError, match=f"reads {unread}: leave it out$"):
        load("dinov2", argument)


# Batch size; epochs of training, of the learning rate's warm-up and of the teacher temperature's
# warm-up; learning rate; teacher momentum at the start; first and last weight decay; first and last
# teacher temperature. An epoch is 1,250 steps; for DINO it is ImageNet.
SELF_DISTILLED = {
    "dino": (512, (100, 10, 0), 1e-3, 0.996, (0.04, 0.4), (0.04, 0.04)),
    "dino:run=boosted": (1024, (300, 10, 30), 2e-3, 0.996, (0.04, 0.4), (0.04, 0.07)),
    "dinov2": (2048, (100, 10, 30), 4e-3 * 2**0.5, 0.992, (0.04, 0.4), (0.04, 0.07)),
    "dinov2:run=large": (3072, (500, 80, 30), 2e-4 * 3**0.5, 0.994, (0.04, 0.2), (0.04, 0.07)),
    "dinov3": (2048, (100, 10, 30), 4e-3 * 2**0.5, 0.992, (0.04, 0.4), (0.04, 0.07)),
}


@pytest.mark.parametrize("name", SELF_DISTILLED)
def test_self_distillation_holds_the_published_schedules(name):
    file, _, argument = name.partition(":")
    config = load(file, argument)
    check(config)
    batch, epochs, rate, momentum, decay, temperature = SELF_DISTILLED[name]
    dino, optimizer = config.dino, config.optimizer
    epoch = 1_281_167 // batch if file == "dino" else 1250
    steps = config.steps, optimizer.warmup_steps, dino.teacher_temperature_steps
    assert (config.batch_size, steps) == (batch, tuple(epoch * count for count in epochs))
    assert dino.frozen_prototype_steps == epoch
    assert optimizer.learning_rate == pytest.approx(rate) and optimizer.end_learning_rate == 1e-6
    assert (dino.teacher_momentum, dino.teacher_momentum_end) == (momentum, 1.0)
    assert (optimizer.weight_decay, optimizer.weight_decay_end) == decay
    assert (dino.teacher_temperature, dino.teacher_temperature_end) == temperature
    assert (optimizer.name, optimizer.beta1, optimizer.beta2, optimizer.schedule) == (
        *("adam", 0.9, 0.999),
        "cosine",
    )
    assert (optimizer.clip_norm, optimizer.decay) == (3.0, "matrices")


# Model; areas of large and of small crops; blur probabilities; gradient clipping, layer-wise
# learning rate decay, learning rate factor of the patch embedding; prototypes for images and for
# patches; centring, prototype lengths; stochastic depth; weights of KoLeo and of the patch loss.
OF_MODELS = {
    "dino": (
        *("ViT-S/16", (0.4, 1.0), (0.05, 0.4), (1.0, 0.1, 0.5), ("tensor", 1.0, 1.0)),
        *((65_536, None), ("mean", "one"), 0.1, (0.0, 0.0)),
    ),
    "dinov2": (
        *("ViT-L/16", (0.32, 1.0), (0.05, 0.32), (0.0, 0.9, 0.5), ("module", 0.9, 0.2)),
        *((65_536, None), ("mean", "learned"), 0.3, (0.1, 1.0)),
    ),
    "dinov3": (
        *("ViT-L/16", (0.32, 1.0), (0.05, 0.32), (0.0, 0.9, 0.5), ("module", 0.9, 0.2)),
        *((65_536, 65_536), ("sinkhorn", "free"), 0.3, (0.1, 1.0)),
    ),
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_self_distillation_holds_the_published_views_and_losses(name):
    config = load(name)
    data, model, dino, optimizer = (
        config.data,
        config.model,
        config.dino,
        config.optimizer,
    )
    assert OF_MODELS[name] == (
        *(model.name, data.crop_area, dino.local_area, dino.blur),
        (optimizer.clip, optimizer.layer_decay, optimizer.embedding_rate),
        (dino.prototypes, dino.patch_prototypes),
        (dino.centring, dino.prototype_lengths),
        *(model.stochastic_depth, (dino.koleo, dino.patch_weight)),
    )
    assert (data.image_size, dino.local_crops, dino.local_size) == (224, 8, 96)
    assert (dino.head_hidden, dino.bottleneck) == (2048, 256)
    assert (dino.jitter, dino.jitter_probability) == ((0.4, 0.4, 0.2, 0.1), 0.8)
    assert (dino.grey, dino.solarize, data.flip) == (0.2, (0.0, 0.2, 0.0), True)
    assert (data.crop, data.interpolation) == ("random_resized", "bicubic")
    assert bool(model.uniform_depth) == (name != "dino")
    assert (model.position, model.rope) == (
        ("none", "dinov3") if name == "dinov3" else (None, None)
    )


@pytest.mark.slow
def test_dinov2_goes_on_from_a_folder_with_photographs_without_labels(tmp_path, capsys):
    made = vit_jax.create_model(
        "ViT-Ti/4", num_classes=0, image_size=16, dim=16, depth=1, mlp_dim=16, heads=2
    )
    vit_jax.save_model(made, tmp_path / "model", library="timm", log=str)
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(24, 20, 20, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.png")
    config = load("dinov2", f"from={tmp_path / 'model'}")
    config.data.path, config.data.test_split = str(tmp_path / "photos"), "all[75%:]"
    config.update(dict(batch_size=4, steps=2, evaluate_every=2))
    config.data.update(dict(image_size=16, test_resize=16, train_split="all[:75%]"))
    config.dino.update(dict(prototypes=16, head_hidden=16, local_size=8, local_crops=1))
    config.optimizer.warmup_steps = 1
    vit_jax.train(config, tmp_path / "run")
    assert "test views matched" in capsys.readouterr().out
    first, trained = (vit_jax.load_model(tmp_path / name, log=str) for name in ("model", "run"))
    assert trained.dim == 16 and not np.array_equal(trained.cls[...], first.cls[...])
