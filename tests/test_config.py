"""Shipped configs contain the published values, run, and set only options that their run reads."""

import contextlib
import importlib.util
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from vit_jax import config as configs
from vit_jax import config_page
from vit_jax.command import as_in_file, read_config
from vit_jax.data.sources import SOURCES
from vit_jax.errors import UserError
from vit_jax.models import (
    abstract,
    count_parameters,
    create_model,
    initializers,
    model_factory,
    position,
)
from vit_jax.options import model, objective, optimizer, run
from vit_jax.options.data import SOURCES_WITHOUT_PATH
from vit_jax.options.objective import only_with_objective
from vit_jax.options.option import only_with, options_of, sections_of
from vit_jax.parallel.mesh import make_mesh
from vit_jax.runs import rate_search
from vit_jax.runs.assemble import with_images_of
from vit_jax.runs.frozen_model import frozen_shapes
from vit_jax.runs.loop import train
from vit_jax.save import save_model
from vit_jax.training.objectives import OBJECTIVES
from vit_jax.training.program import make_program, model_arguments

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str, *arguments: str) -> ConfigDict:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments)


# Table 3 of the paper: epochs, learning rate, schedule, weight decay, dropout. The table lacks H/14
# on ImageNet-21k and on ImageNet; their configs use the values of L/16 and of "ViT".
I1K, I21K = (300, 3e-3, "cosine", 0.3, 0.1), (90, 1e-3, "linear", 0.03, 0.1)
TABLE_3 = {f"vit_{model}_i1k": I1K for model in ("b32", "b16", "l32", "l16", "h14")}
TABLE_3 |= {f"vit_{model}_i21k": I21K for model in ("b32", "b16", "l32", "l16", "h14")}
TABLE_3 |= {
    "vit_b32_jft": (7, 8e-4, "linear", 0.1, 0.0),
    "vit_b16_jft": (7, 8e-4, "linear", 0.1, 0.0),
    "vit_l32_jft": (7, 6e-4, "linear", 0.1, 0.0),
    "vit_l16_jft": (14, 4e-4, "linear", 0.1, 0.0),
    "vit_h14_jft": (14, 3e-4, "linear", 0.1, 0.0),
    "r50_vit_b32_jft": (7, 8e-4, "linear", 0.1, 0.0),
    "r50_vit_b16_jft": (7, 8e-4, "linear", 0.1, 0.0),
    "r50_vit_l32_jft": (7, 2e-4, "linear", 0.1, 0.0),
    "r50_vit_l16_jft": (14, 4e-4, "linear", 0.1, 0.0),
    # ResNets have no dropout.
    "bit_r50x1_jft": (7, 1e-3, "linear", 0.1, None),
    "bit_r50x2_jft": (7, 1e-3, "linear", 0.1, None),
    "bit_r101x1_jft": (7, 8e-4, "linear", 0.1, None),
    "bit_r152x1_jft": (7, 6e-4, "linear", 0.1, None),
    "bit_r152x2_jft": (7, 6e-4, "linear", 0.1, None),
    "bit_r200x3_jft": (14, 6e-4, "linear", 0.1, None),  # Its learning rate is not published.
}
OTHER_JOBS = (
    "augreg_i1k",
    "augreg_i21k",
    "finetune",
    "finetune_elpv",
    "my_images",
    "my_images_unlabelled",
    "quickstart",
)
OTHER_JOBS += (
    "clip",
    "depth",
    "detect",
    "segment",
    "siglip",
    "siglip2",
    "my_images_unlabelled",
    "dino",
    "dino_digits",
    "dinov2",
    "dinov3",
    "composed",
    "dvae",
    "beit",
    "masked_patch_b16",
    "mae_b16",
    "mae_l16",
    "mae_h14",
    "mae_finetune",
    "fcmae",
    "vqkd",
    "beitv2",
    "vit_s16_i1k",
    "bit_i1k",
    "bit_i21k",
    "bit_r152x4_jft",
    "bit_hyperrule",
    "convnext",
    "swin",
    "deit",
    "eva",
    "eva02",
)


def test_every_pre_training_config_has_a_row_of_the_table():
    assert sorted(TABLE_3) == [name for name in FILES if name not in OTHER_JOBS]


@pytest.mark.parametrize("name", TABLE_3)
def test_config_holds_the_paper_row(name):
    config = load(name)
    optimizer = config.optimizer
    row = (
        config.epochs,
        optimizer.learning_rate,
        optimizer.schedule,
        optimizer.weight_decay,
        config.model.dropout,
    )
    assert row == TABLE_3[name]
    *hybrid, _, size, _ = name.upper().split("_")
    if name.startswith("bit"):
        assert config.model.name == f"BiT-{size.replace('X', 'x')}"
    else:
        assert config.model.name == "+".join([*hybrid, f"ViT-{size[0]}/{size[1:]}"])


@pytest.mark.parametrize("name", TABLE_3)
def test_config_has_the_values_that_all_rows_share(name):
    config = load(name)
    optimizer = config.optimizer
    assert (config.batch_size, config.data.image_size, config.steps) == (4096, 224, None)
    assert (optimizer.name, optimizer.beta1, optimizer.beta2) == ("adam", 0.9, 0.999)
    assert (optimizer.warmup_steps, optimizer.clip_norm, optimizer.decay) == (
        10_000,
        1.0,
        "kernels",
    )
    pre_logits = None if name.startswith("bit") else True
    assert (config.loss.name, config.model.pre_logits) == ("sigmoid", pre_logits)
    assert config.model.head_bias == (0.0 if name.endswith("i1k") else -10.0)
    assert optimizer.end_learning_rate == (0.0 if name.endswith("i1k") else 1e-5)


# BiT's own recipe (arXiv 1912.11370, section 3.2): the number of epochs, the epochs after which the
# learning rate is divided by 10, and the loss.
BIT = {
    "bit_i1k": (90, (30, 60, 80), "softmax"),
    "bit_i21k": (90, (30, 60, 80), "sigmoid"),
    "bit_r152x4_jft": (40, (10, 23, 30, 37), "sigmoid"),
}


@pytest.mark.parametrize("name", BIT)
def test_bit_config_holds_the_values_of_its_own_paper(name):
    config = load(name)
    configs.check(config)
    epochs, tenths, loss = BIT[name]
    optimizer = config.optimizer
    assert (config.epochs, config.batch_size, config.data.image_size, config.loss.name) == (
        epochs,
        4096,
        224,
        loss,
    )
    assert optimizer.stairs == pytest.approx([epoch / epochs for epoch in tenths])
    assert (optimizer.name, optimizer.beta1, optimizer.schedule, optimizer.stair_factor) == (
        "sgd",
        0.9,
        "stairs",
        0.1,
    )
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (pytest.approx(0.48), 5000)
    assert (optimizer.weight_decay, optimizer.coupled_decay, optimizer.clip_norm) == (
        1e-4,
        True,
        0.0,
    )


# The augmentation level that AugReg's authors recommend for each model.
AUGREG = {
    "augreg_i1k": {"ViT-Ti/16": "light1", "ViT-S/32": "medium1"}
    | dict.fromkeys(["ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/16", "R26+ViT-S/32"], "medium2"),
    "augreg_i21k": {"ViT-Ti/16": "none", "ViT-S/32": "none", "ViT-S/16": "light1"}
    | {"ViT-B/32": "light2", "ViT-B/16": "light2", "ViT-L/16": "medium2"},
}


@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for name in AUGREG for model in AUGREG[name]]
)
def test_augreg_config_holds_the_level_of_its_model(name, model):
    config = load(name, f"model={model}")
    assert (config.model.name, config.augment.level) == (model, AUGREG[name][model])


@pytest.mark.parametrize("name", AUGREG)
def test_augreg_config_has_the_values_that_its_runs_share(name):
    config = load(name)
    optimizer, model = config.optimizer, config.model
    assert (model.name, config.batch_size, config.epochs, config.data.image_size) == (
        "ViT-B/16",
        4096,
        300,
        224,
    )
    assert (optimizer.name, optimizer.beta1, optimizer.beta2) == ("adam", 0.9, 0.999)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.decay) == (
        1e-3,
        0.1,
        "kernels",
    )
    assert (optimizer.schedule, optimizer.end_learning_rate) == ("cosine", 0.0)
    assert (optimizer.warmup_steps, optimizer.clip_norm) == (10_000, 1.0)
    assert (model.pre_logits, model.dropout, model.stochastic_depth) == (False, 0.0, 0.0)
    assert (config.loss.name, config.loss.label_smoothing) == ("sigmoid", 0.0)
    assert model.head_bias == {"augreg_i1k": -6.9, "augreg_i21k": -10.0}[name]


def test_model_that_augreg_names_no_level_for_is_refused():
    with pytest.raises(UserError, match="no level for .ViT-L/32."):
        load("augreg_i21k", "model=ViT-L/32")


def test_argument_sets_the_model_and_the_smoke_test():
    config = load("augreg_i1k", "model=ViT-S/16,smoke")
    assert (config.model.name, config.steps, config.data.source) == ("ViT-S/16", 2, "synthetic")


def test_unknown_name_in_the_argument_is_named():
    with pytest.raises(UserError, match="modle.*model"):
        load("augreg_i1k", "modle=ViT-S/16")


# Configs that need a model name if no checkpoint is given, with an argument for it.
OF_MODEL = {
    "finetune": "model=ViT-B/16",
    "bit_hyperrule": "model=ViT-B/16",
    "segment": "backbone=ViT-B/16",
    "depth": "backbone=ViT-B/16",
    "detect": "backbone=ViT-B/16",
}


@pytest.mark.one_variant
@pytest.mark.parametrize("name", FILES)
def test_config_describes_a_model(name):
    config = load(name, OF_MODEL.get(name))
    configs.check(config)
    if not config.model.name:  # The config uses the checkpoint's model.
        config.model.name = "ViT-S/16"
    factory = model_factory(num_classes=10, **model_arguments(config))
    assert count_parameters(abstract(factory)) > 1000


@pytest.mark.parametrize("head", ["linear", "eomt"])
def test_a_dense_head_is_trained_on_a_model_without_weights(head):
    config = load("segment", f"backbone=ViT-64x4/8,head={head}")
    configs.check(config)
    assert (config.model.name, config.finetune.frozen_steps) == ("ViT-64x4/8", 0)


def finished_runs(output: str) -> int:
    """Returns the number of runs that logged the path of their report.

    Progress lines such as "writing the report: 5 s so far" are not counted.
    """
    return len(re.findall("^report: ", output, re.MULTILINE))


def without_network(*_, **__):
    raise AssertionError("a smoke test asks the network")


# Configs that differ from another one only in sizes and other numbers, or that continue from a
# checkpoint.
SAME = re.compile(r"(vit_.*_(i1k|i21k|jft)|r50_vit_.*|bit_r\d+.*|mae_[lh]1.)$")
# Configs that are tested elsewhere. Tests below run some with an argument, or together with the run
# that continues from theirs. The quickstart is run by .ci/run. `my_images` and
# `my_images_unlabelled` are run by tests/system/test_finetune_command.py and
# test_pretrain_command.py.
WITH_OTHERS = ("finetune", "bit_hyperrule", "eva02", "fcmae", "vqkd", "beitv2")
WITH_OTHERS += ("quickstart", "my_images", "my_images_unlabelled")
ALONE = [name for name in FILES if not SAME.match(name) and name not in WITH_OTHERS]
SMOKE = (
    *("vit_s16_i1k", "r50_vit_b16_jft", *ALONE),
    *("deit:recipe=deit3", "deit:teacher=random", "dinov2:run=high_resolution"),
    *("finetune:model=ViT-B/16", "bit_hyperrule:model=BiT-R50x1", "beit:task=finetune"),
)
# Only one of them is run by `pytest` without `--rest`.
SMOKE = [
    name if name == "vit_s16_i1k" else pytest.param(name, marks=pytest.mark.slow) for name in SMOKE
]


@pytest.mark.parametrize("name", SMOKE)
def test_smoke_runs_without_network(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", without_network)
    file, _, argument = name.partition(":")
    config = load(file, f"{argument},smoke" if argument else "smoke")
    configs.check(config)
    train(configs.run_options(config), tmp_path / "run")
    assert "step 2/2" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eva", "eva02"])
def test_smoke_of_evas_fine_tuning_goes_on_from_its_pre_training(
    name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(socket.socket, "connect", without_network)
    small = dict(num_classes=10, image_size=56, dim=16, depth=1, mlp_dim=16, heads=2)
    save_model(create_model("ViT-Ti/14", **small), tmp_path / "teacher", library="timm")
    train(
        configs.run_options(load(name, f"teacher={tmp_path / 'teacher'},smoke")),
        tmp_path / "pretrained",
    )
    config = load(name, "task=finetune_i1k,smoke")
    config.finetune.checkpoint = str(tmp_path / "pretrained")
    train(configs.run_options(config), tmp_path / "run")
    said = capsys.readouterr().out
    assert finished_runs(said) == 2 and "fc_norm" in said


@pytest.mark.slow
def test_smoke_of_fcmaes_fine_tuning_goes_on_from_its_pre_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", without_network)
    train(configs.run_options(load("fcmae", "smoke")), tmp_path / "pretrained")
    config = load("convnext", "model=ConvNeXtV2-B,task=finetune_fcmae,smoke")
    config.finetune.checkpoint = str(tmp_path / "pretrained")
    train(configs.run_options(config), tmp_path / "run")
    said = capsys.readouterr().out
    assert finished_runs(said) == 2 and "with fcmae's own parameters" in said


@pytest.mark.slow
def test_smoke_of_beit_v2_reads_a_tokeniser_from_the_workdir_of_its_run(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(socket.socket, "connect", without_network)
    small = dict(num_classes=10, image_size=64, dim=16, depth=1, mlp_dim=16, heads=2)
    save_model(create_model("ViT-Ti/16", **small), tmp_path / "teacher", library="timm")
    train(
        configs.run_options(load("vqkd", f"teacher={tmp_path / 'teacher'},smoke")),
        tmp_path / "tokeniser",
    )
    train(
        configs.run_options(load("beitv2", f"teacher={tmp_path / 'tokeniser'},smoke")),
        tmp_path / "pretrained",
    )
    config = load("beitv2", "task=finetune,smoke")
    config.finetune.checkpoint = str(tmp_path / "pretrained")
    train(configs.run_options(config), tmp_path / "run")
    said = capsys.readouterr().out
    assert finished_runs(said) == 3 and "aggregated loss" in said and "codes used" in said


def files_in(folder: str) -> set[str]:
    package = FOLDER.parent / "vit_jax" / folder
    return {path.stem for path in package.glob("*.py")} - {"__init__", "tracker", "delivery"}


def test_names_that_options_allow_are_those_of_the_code():
    assert tuple(OBJECTIVES) == objective.OBJECTIVE_NAMES
    assert set(optimizer.OPTIMIZERS) == files_in("training/update_rules")
    assert set(model.ROPES) == set(position.ROPES)
    assert set(model.INITIALIZATIONS) == set(initializers.SCHEMES)
    assert set(run.TRACKERS) == files_in("runs/trackers")


def test_unknown_argument_is_named():
    with pytest.raises(UserError, match="smok.*smoke"):
        load("quickstart", "smok")


@pytest.mark.parametrize("name", FILES)
def test_config_survives_being_written(name):
    options = configs.run_options(load(name))
    assert configs.from_json(configs.to_json(options)) == options
    assert configs.differences(configs.to_json(options), options) == []


def test_difference_is_named_with_both_values():
    config = load("quickstart")
    saved = configs.to_json(configs.run_options(config))
    config.optimizer.learning_rate = 0.5
    assert configs.differences(saved, configs.run_options(config)) == [
        "optimizer.learning_rate: 0.002 -> 0.5"
    ]


def test_options_that_a_saved_config_lacks_have_their_defaults():
    config = load("quickstart")
    saved = json.loads(configs.to_json(configs.run_options(config)))
    del saved["objective"], saved["fewshot"]["seeds"]
    assert configs.differences(json.dumps(saved), configs.run_options(config)) == []
    config.objective.name = "mae"
    (difference,) = configs.differences(json.dumps(saved), configs.run_options(config))
    assert difference == "objective.name: classification -> mae"


@pytest.mark.parametrize("key", sorted(configs.OPERATIONAL))
def test_options_that_do_not_affect_training_may_change(key):
    config = load("quickstart")
    saved = configs.to_json(configs.run_options(config))
    others = {str: "steps:1-2" if key == "profile" else "full", bool: True, tuple: (7,)}
    config.update_from_flattened_dict({key: others.get(configs.VALUES[key].rule.kind, 7)})
    assert configs.differences(saved, configs.run_options(config)) == []


def test_key_that_nothing_reads_is_refused():
    config = load("quickstart").unlock()
    config.optimizer.momentum = 0.9
    with pytest.raises(UserError, match="optimizer.momentum"):
        configs.check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0),
        ("steps", -1),
        ("epochs", 0.0),
        ("model.dropout", 1.0),
        ("model.dtype", "float16"),
        ("loss.name", "hinge"),
        ("optimizer.schedule", "exponential"),
        ("data.test_resize", 4),
        ("augment.level", "medium3"),
        ("augment.randaugment", (2,)),
        ("augment.randaugment", (2, -1)),
        ("augment.policy", "original-mstd0.5"),
        ("augment.policy", "rand-m9-tweights"),
        ("augment.policy", "rand-m9-m5"),
        ("augment.policy", "rand-m9.5"),
        ("augment.policy", "rand-m11"),
        ("augment.policy", "rand-n0"),
        ("augment.policy", "rand-p1.5"),
        ("augment.policy", "rand-p.5"),
        ("augment.policy", "rand-mstd101"),
        ("augment.policy", "rand-mmax30"),
        ("augment.policy", "rand-inc2"),
        ("augment.policy", "rand-"),
        ("augment.policy", ""),
        ("augment.mixup", -0.1),
        ("augment.cutmix", -1.0),
        ("augment.cutmix_share", 1.5),
        ("augment.erasing", 2.0),
        ("augment.color_jitter", (0.1, 0.1)),
        ("objective.name", "byol"),
        ("masked_patch.target", "colour"),
        ("mae.mask_ratio", 1.0),
        ("mae.decoder_depth", 0),
        ("fewshot.every", 401),
        ("fewshot.shots", ()),
        ("fewshot.shots", (0, 1)),
        ("fewshot.seeds", (1, 1)),
        ("fewshot.seeds", (-1,)),
        ("fewshot.penalty", -1.0),
        ("knn.every", 401),
        ("knn.neighbours", (10, 10)),
        ("knn.neighbours", (0,)),
    ],
)
def test_impossible_value_is_named(key, value):
    config = load("quickstart")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=key):
        configs.check(config)


@pytest.mark.parametrize("other", [("augment.level", "light2"), ("augment.randaugment", (2, 9))])
def test_two_kinds_of_randaugment_are_rejected(other):
    config = load("quickstart")
    config.update_from_flattened_dict({"augment.policy": "rand-m9", other[0]: other[1]})
    with pytest.raises(
        UserError, match="augment.policy is 'rand-m9' and must be None with AugReg's"
    ):
        configs.check(config)


def test_options_import_no_library_that_takes_long():
    code = (
        "import sys, vit_jax.options.run; print({*sys.modules} & {'jax', 'flax', 'orbax', 'PIL', "
        "'cv2'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sources_that_take_no_path_are_listed():
    assert {*SOURCES_WITHOUT_PATH} == {name for name, kind in SOURCES.items() if not kind.path}


def test_page_of_all_values_is_up_to_date():
    page = (FOLDER.parent / "docs" / "config.md").read_text()
    assert page == config_page.page(), "run python docs/write_config.py"


@pytest.mark.parametrize("key", configs.VALUES)
def test_every_option_has_a_help_text(key):
    assert len(configs.VALUES[key].help.split()) > 1 and configs.VALUES[key].rule.words


# Values that a mistyped text may have: negative, zero or huge numbers, nan, infinity, texts, empty
# or wrong tuples, a boolean.
HOSTILE = (
    -1,
    0,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    10**30,
    "x",
    "",
    (),
    (math.nan,),
    (-1,),
    ("",),
    True,
)
ANY_SIGN = ("model.layer_scale", "model.head_bias", "contrastive.initial_bias")
BOUNDED_BELOW = [
    key
    for key, value in configs.VALUES.items()
    if value.rule.kind in (int, float) and key not in ANY_SIGN
]


@pytest.mark.parametrize("key", configs.VALUES)
def test_invalid_values_raise_an_error_with_the_key(key):
    defaults = dict(configs.leaves(configs.base_config()))
    for value in HOSTILE:
        kept = configs.VALUES[key].rule.holds(value)
        with (
            contextlib.nullcontext()
            if kept
            else pytest.raises(UserError, match=f"config.{key} is ")
        ):
            configs.check_values(defaults | {key: value})


@pytest.mark.parametrize("key", BOUNDED_BELOW)
def test_number_is_finite_and_not_negative(key):
    rule = configs.VALUES[key].rule
    assert not any(map(rule.holds, (-1, -1e-9, math.nan, math.inf, -math.inf, "1", True, 10**400)))


def test_every_default_keeps_its_rule():
    for key, value in configs.VALUES.items():
        assert value.default is None or value.rule.holds(value.default), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.learning_rate", -1e-3),
        ("seed", -1),
        ("loss.label_smoothing", 5.0),
        ("data.crop_area", (2, 1)),
        ("data.crop_area", (1.0, 0.5)),
        ("optimizer.beta2", 2.0),
        ("optimizer.clip_norm", -1.0),
        ("epochs", math.inf),
        ("data.workers", -1),
        ("sweep.rates", (math.nan,)),
    ],
)
def test_values_that_once_passed_validation_are_rejected(key, value):
    config = load("quickstart")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=f"config.{key} is .* and must be "):
        configs.check(config)


@pytest.mark.parametrize("suite", ["fewshot", "knn"])
def test_periodic_suite_without_data_sets_is_rejected(suite):
    config = load("quickstart")
    config[suite].every = config.evaluate_every
    with pytest.raises(
        UserError, match=rf"{suite}.sets is \(\) and must be such as \('tfds:cifar100',\)"
    ):
        configs.check(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            dict(keep_every=1500),
            "checkpoint.keep_every is 1500 and must be a multiple of .* = 1000",
        ),
        (dict(keep_best=1, every=300), "evaluate_every is 1000 and must be a multiple of .* = 300"),
        (dict(keep_last=0), "checkpoint.keep_last is 0 and must be a whole number, 1 or above"),
    ],
)
def test_retention_options_that_keep_no_checkpoint_are_rejected(values, words):
    config = configs.base_config()
    config.steps = 1
    config.checkpoint.update(values)
    with pytest.raises(UserError, match=words):
        configs.check(config)


# Models of the objectives that do not train a ViT.
CONVOLUTIONS = {
    "fcmae": dict(name="ConvNeXtV2-T", blocks=(1,), widths=(8,)),
    "dvae": dict(name="DVAE", blocks=(1, 1, 1), widths=(8, 16, 32)),
}


class Reads:
    """Records which options are read."""

    def __init__(self, monkeypatch):
        self.keys, self._noting, self._patch = set(), True, monkeypatch
        self._note_options(run.RunOptions, "")

    def _note(self, key):
        if self._noting:
            self.keys.add(key)

    def _note_options(self, kind, prefix):
        plain, names = kind.__getattribute__, options_of(kind)

        def noted(options, name):
            if name in names:
                self._note(prefix + name)
            return plain(options, name)

        self._patch.setattr(kind, "__getattribute__", noted, raising=False)
        for name, part in sections_of(kind).items():
            self._note_options(part, f"{name}.")

    def unnoted(self, function):
        """Returns the function without recording the options that it reads."""

        def called(*args, **kwargs):
            self._noting = False
            try:
                return function(*args, **kwargs)
            finally:
                self._noting = True

        return called


@pytest.mark.slow
def test_every_value_is_read(tmp_path, monkeypatch):
    config = load("quickstart", "smoke").unlock()
    config.finetune.train, config.optimizer.average = "lora", 0.9
    config.fewshot.update(dict(every=2, sets=("digits:",), shots=(1,), seeds=(0,)))
    config.knn.update(dict(every=2, sets=("digits:",)))
    options = ("set=digits:", "shots=1", "seeds=0")
    config.evaluate.update(dict(suites=("fewshot",), options=options))
    reads = Reads(monkeypatch)
    # These functions read the whole config to write, send or copy it, without using its values.
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("vit_jax.runs.loop.claim", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("vit_jax.runs.loop.deliveries", lambda *_: ())
    monkeypatch.setattr("vit_jax.runs.assemble.with_images_of", reads.unnoted(with_images_of))
    train(configs.run_options(config), tmp_path / "run")
    config.finetune.train, config.optimizer.average = "all", 0.0
    config.optimizer.name = "adafactor"  # Only Adafactor clips its updates.
    smaller = {
        key: value.smoke
        for key, value in configs.VALUES.items()
        if key.split(".")[0] in ("objective", *OBJECTIVES)
    }
    config.update_from_flattened_dict(
        {key: value for key, value in smaller.items() if value is not None}
    )
    # Options of local crops are read only if there are local crops, and options of masks only if
    # masked patches have a loss.
    config.dino.local_crops, config.dino.patch_weight = 1, 1.0
    for name in OBJECTIVES.keys() - {"classification"}:
        taught = name in ("distillation", "eva", "vqkd", "beit", "beitv2")
        config.objective.update(dict(name=name, teacher="random" if taught else None))
        frozen = frozen_shapes(configs.run_options(config))
        assert (frozen is not None) == taught
        trained = config
        if name in CONVOLUTIONS:  # They have no options of a ViT.
            trained = config.copy_and_resolve_references()
            trained.model = configs.base_config().model
            trained.model.update(CONVOLUTIONS[name])
        typed = configs.run_options(trained)
        classes = 10 if OBJECTIVES[name].labels else OBJECTIVES[name].outputs(typed)
        mesh = make_mesh(typed.mesh)
        make_program(typed, num_classes=classes, steps=2, mesh=mesh, frozen=frozen)
    # Some options are read only if other options of their section have certain values.
    for name, argument in (
        ("siglip2", "smoke"),
        ("segment", "head=eomt,smoke"),
        ("segment", "head=upernet,smoke"),
        ("depth", "head=dpt,smoke"),
    ):
        typed = configs.run_options(load(name, argument))
        classes = OBJECTIVES[typed.objective.name].outputs(typed)
        make_program(typed, num_classes=classes, steps=2, mesh=make_mesh(typed.mesh))
    config = configs.run_options(config)
    rate_search.rate_jobs(config, tmp_path / "sweep", flags=())
    rate_search.seed_jobs(config, tmp_path / "sweep", flags=(), rate=0.1)
    monkeypatch.undo()
    # Not read: `epochs`, because the length is given in steps; `finetune.objective`, because no
    # checkpoint has parameters of an objective; `minutes`, because no option is chosen by a time
    # limit; `early_stopping`, because the run keeps its last checkpoint instead of the best.
    assert configs.VALUES.keys() - reads.keys == {
        "epochs",
        "finetune.objective",
        "minutes",
        "early_stopping",
    }


UNREAD = {
    "data.path with digits": {"data.path": "/data/pets"},
    "parts of no mixture": {"data.parts": ("digits:",)},
    "shares of no mixture": {"data.weights": (1.0,)},
    "label key of a folder": {"data.source": "folder", "data.path": "/d", "data.label_key": "y"},
    "area of the whole image": {"data.crop": "none", "data.crop_area": (0.5, 1.0)},
    "resize of inception": {"data.crop_resize": 448},
    "share of no CutMix": {"augment.cutmix_share": 0.2},
    "mask ratio of a classification": {"mae.mask_ratio": 0.6},
    "mae's decoder with dino": {"objective.name": "dino", "mae.decoder_dim": 256},
    "small crops where there are none": {
        "objective.name": "dino",
        "dino.local_crops": 0,
        "dino.local_size": 64,
    },
    "loss of mae": {"objective.name": "mae", "loss.name": "sigmoid"},
    "second moment of SGD": {"optimizer.name": "sgd", "optimizer.beta2": 0.99},
    "end of stairs": {"optimizer.schedule": "stairs", "optimizer.end_learning_rate": 1e-5},
    "stairs of a cosine": {"optimizer.stairs": (0.5,)},
    "average from without an average": {"optimizer.average_from": "weights"},
    "rank without LoRA": {"finetune.lora_rank": 4},
    "kept head of no checkpoint": {"finetune.head": "kept"},
    "shots of no data set": {"fewshot.shots": (5,)},
    "options of no suite": {"evaluate.options": ("set=digits:",)},
}


@pytest.mark.parametrize("name", UNREAD)
def test_values_that_the_run_does_not_read_are_refused(name):
    config = configs.base_config()
    config.steps = 10
    config.update_from_flattened_dict(UNREAD[name])
    *_, key = UNREAD[name]
    with pytest.raises(
        UserError, match=rf"^config.{key} is .*, which has no effect in this run: it needs "
    ):
        configs.check(config)
    config.update_from_flattened_dict({key: default(key)})
    configs.check(config)


def default(key):
    return configs.VALUES[key].default


@pytest.mark.parametrize("argument", [(), ("smoke",)])
def test_no_shipped_config_has_a_value_that_its_run_does_not_read(argument):
    for name in FILES:
        assert configs.unread(configs.run_options(load(name, *argument))) == {}, name


def test_a_run_that_began_with_an_unread_value_goes_on_without_it():
    config = configs.base_config()
    config.steps = 10
    config.mae.mask_ratio = 0.6
    saved = configs.to_json(configs.run_options(config))
    config.mae.mask_ratio = 0.75
    assert configs.differences(saved, configs.run_options(config)) == []
    config.objective.name = "mae"
    assert configs.differences(saved, configs.run_options(config)) == [
        "objective.name: classification -> mae"
    ]


def test_only_with_objective_supports_every_objective():
    for name in OBJECTIVES:
        config = configs.base_config()
        config.objective.name = name
        assert only_with("objective.name", name)(config) == ""
        assert (only_with_objective("classification")(config) == "") == (name == "classification")


def test_options_of_a_config_file_may_become_unread_by_overrides():
    config = read_config("quickstart")
    file = as_in_file(config)
    config.data.crop = "none"
    configs.check(config, file=file)
    config.data.crop_area = (0.1, 1.0)
    with pytest.raises(
        UserError, match="^config.data.crop_area is .0.1, 1.0., which has no effect in this run"
    ):
        configs.check(config, file=file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.optimizer.learning_rat, "in config.optimizer: did you mean 'learning_rate'?"),
        (lambda c: setattr(c.optimizer, "learning_rat", 1), "did you mean 'learning_rate'?"),
        (
            lambda c: setattr(c.copy_and_resolve_references().knn, "evry", 1),
            "did you mean 'every'?",
        ),
        (lambda c: c["data.pth"], "'data.pth'; in config.data: did you mean 'path'?"),
        (lambda c: c["model.hidden"], "'model.hidden': it is now 'model.mlp_dim'"),
        (lambda c: c.optimzer, "'optimzer'; did you mean 'optimizer'?"),
        (lambda c: c.update({"optimizer": {"learning_rat": 1}}), "did you mean 'learning_rate'?"),
        (
            lambda c: c.update_from_flattened_dict({"optimzer.name": "sgd"}),
            "did you mean 'optimizer.name'?",
        ),
        (
            lambda c: setattr(c, "batch_size", "x"),
            "config.batch_size is 'x' and must be a whole number",
        ),
        (
            lambda c: setattr(c, "batch_size", 1.5),
            "config.batch_size is 1.5 and must be a whole number",
        ),
        (
            lambda c: setattr(c.model, "dim", "a"),
            "config.model.dim is 'a' and must be None or a whole",
        ),
        (lambda c: setattr(c, "optimizer", "sgd"), "config.optimizer is a section, not a value"),
    ],
)
def test_unknown_key_in_python_raises_a_one_line_error_with_the_nearest_key(change, words):
    with pytest.raises(UserError) as raised:
        change(configs.base_config())
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_config_supports_hasattr_getattr_and_get_for_missing_keys():
    config = configs.base_config()
    assert (
        not hasattr(config, "lr")
        and getattr(config.optimizer, "lr", 3) == 3
        and config.get("lr") is None
    )
    with pytest.raises(KeyError):
        config["lr"]
    with pytest.raises(TypeError):
        config.batch_size = "many"
