"""Fine-tuning holds the paper's table 4, its crops, and how it chooses the learning rate."""

import pytest

from tests.test_config import load
from vit_jax.config import check
from vit_jax.errors import UserError
from vit_jax.recipes import TRANSFER, finetune

# Steps and rates are table 4's, the shares held out appendix B.1.1's, the warm-ups the authors' code's.
RATES = (0.001, 0.003, 0.01, 0.03)
TABLE_4 = {
    # steps, warm-up, rates, splits to choose the rate with, test split
    "imagenet2012": (20_000, 500, (0.003, 0.01, 0.03), ("[:99%]", "[99%:]"), "validation"),
    "cifar100": (10_000, 500, RATES, ("[:98%]", "[98%:]"), "test"),
    "cifar10": (10_000, 500, RATES, ("[:98%]", "[98%:]"), "test"),
    "oxford_iiit_pet": (500, 100, RATES, ("[:90%]", "[90%:]"), "test"),
    "oxford_flowers102": (500, 100, RATES, ("[:90%]", "[90%:]"), "test"),
}
NATURAL = ("caltech101", "cifar-100", "dtd", "flowers102", "pets", "sun397", "svhn")
SPECIALIZED = ("camelyon", "eurosat", "resisc45", "retinopathy")
STRUCTURED = ("clevr-count", "clevr-dist", "dmlab", "dspr-loc", "dspr-ori", "kitti-dist", "snorb-azim")
VTAB = [f"vtab/{task}" for task in (*NATURAL, *SPECIALIZED, *STRUCTURED, "snorb-elev")]


def row(config) -> tuple:
    sweep = config.sweep
    splits = sweep.train_split, sweep.dev_split
    return config.steps, config.optimizer.warmup_steps, sweep.rates, splits, config.data.test_split


@pytest.mark.parametrize("dataset", TABLE_4)
def test_config_holds_the_row_of_its_data_set(dataset):
    config = load("finetune", f"dataset={dataset}")
    assert row(config) == TABLE_4[dataset]
    assert (config.data.source, config.data.path, config.data.train_split) == ("tfds", dataset, "train")


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
def test_config_holds_what_all_rows_share(dataset):
    config = load("finetune", f"dataset={dataset},model=ViT-B/16")
    check(config)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.beta1, config.batch_size) == ("sgd", 0.9, 512)
    assert (optimizer.schedule, optimizer.end_learning_rate) == ("cosine", 0.0)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.average) == (0.0, 1.0, 0.0)
    assert (optimizer.layer_decay, config.finetune.head, config.finetune.train) == (1.0, "new", "all")
    assert (config.loss.name, config.loss.label_smoothing) == ("softmax", 0.0)
    # None is left to the model, which has none.
    assert not config.model.dropout and not config.model.stochastic_depth and not config.augment.mixup
    assert config.augment.level == "none"
    data = config.data
    assert (data.image_size, data.crop_resize, data.test_crop, data.test_resize) == (384, 448, "square", 384)


@pytest.mark.parametrize(("size", "squeezed"), [(384, 448), (512, 597), (518, 604), (224, 261)])
def test_images_of_other_sizes_are_cropped_in_the_same_ratio(size, squeezed):
    data = load("finetune", f"dataset=imagenet2012,size={size}").data
    assert (data.image_size, data.crop_resize, data.test_resize) == (size, squeezed, size)


@pytest.mark.parametrize(
    ("dataset", "model", "tried"),
    [
        ("imagenet2012", "ViT-L/16", False),
        ("imagenet2012", "", False),
        ("imagenet2012", "R50+ViT-B/16", True),
        ("imagenet2012", "BiT-R152x2", True),
        ("cifar10", "R50+ViT-B/16", False),
        ("vtab/dtd", "BiT-R152x2", False),
    ],
)
def test_highest_rate_is_tried_for_resnets_and_hybrids_on_imagenet_alone(dataset, model, tried):
    assert (0.06 in finetune(dataset, model).sweep.rates) == tried


def test_no_data_set_has_a_recipe_that_the_paper_lacks_but_the_users_folder():
    assert TRANSFER.keys() == {*TABLE_4, "folder"}
    assert row(finetune("folder")) == row(finetune("oxford_iiit_pet"))


def test_unknown_data_set_names_the_nearest():
    with pytest.raises(UserError, match="no recipe for the data set 'vtab/clever-count'.*'vtab/clevr-count'"):
        load("finetune", "dataset=vtab/clever-count")


def test_masked_patch_config_holds_the_papers_values():
    config = load("masked_patch_b16")
    check(config)
    optimizer = config.optimizer
    assert (config.steps, config.batch_size, config.model.name) == (1_000_000, 4096, "ViT-B/16")
    objective = config.objective
    assert (objective.name, objective.mask_ratio, objective.target) == ("masked_patch", None, "color")
    assert (optimizer.name, optimizer.learning_rate, optimizer.schedule) == ("adam", 2e-4, "cosine")
    assert (optimizer.warmup_steps, optimizer.weight_decay) == (10_000, 0.1)


@pytest.mark.parametrize("model", ["b16", "l16", "h14"])
def test_mae_config_holds_the_published_values(model):
    config = load(f"mae_{model}")
    check(config)
    objective, optimizer = config.objective, config.optimizer
    assert (config.epochs, config.batch_size, objective.mask_ratio) == (800, 4096, None)
    assert objective.normalize_targets
    assert (objective.decoder_dim, objective.decoder_depth, objective.decoder_heads) == (512, 8, 16)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.05)
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.clip_norm) == (2.4e-3, "cosine", 0.0)
    assert optimizer.warmup_steps == 12_511  # 40 epochs.
    assert (config.model.position, config.data.crop_area) == ("sincos2d", (0.2, 1.0))
    assert (config.data.crop, config.data.interpolation) == ("random_resized", "bicubic")


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
    found = config.epochs, optimizer.learning_rate, optimizer.layer_decay, config.model.stochastic_depth
    assert found == row
    assert (config.batch_size, optimizer.warmup_steps, optimizer.weight_decay) == (1024, 6256, 0.05)
    assert (augment.randaugment, augment.mixup, augment.cutmix, augment.erasing) == ((2, 9.0), 0.8, 1.0, 0.25)
    assert (config.loss.label_smoothing, config.model.pooling) == (0.1, "gap")
    assert (config.data.crop, config.data.interpolation) == ("random_resized", "bicubic")


@pytest.mark.parametrize("name", ["vit_b16_i1k", "vit_l16_i21k", "vit_h14_jft", "bit_r50x1_jft"])
def test_pre_training_crops_and_resizes_as_tensorflow(name):
    data = load(name).data
    assert (data.crop, data.crop_area, data.interpolation) == ("inception", (0.05, 1.0), "bilinear")


@pytest.mark.parametrize("name", ["augreg_i1k", "augreg_i21k"])
def test_augreg_crops_and_resizes_as_tensorflow(name):
    data = load(name, "model=ViT-S/16").data
    assert (data.crop, data.interpolation) == ("inception", "bilinear")


def test_fine_tuning_resizes_as_its_checkpoint():
    assert load("finetune", "dataset=cifar10").data.interpolation is None
