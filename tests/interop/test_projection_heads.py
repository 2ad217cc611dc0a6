"""Projection heads of DINO, iBOT and DINOv2 are read from authors' checkpoints and our own runs."""

import argparse
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from test_mae_decoder import convert

import vit_jax
from tests.system.test_interface import small
from tests.training.objectives.small import dotted
from vit_jax.config import base_config, check
from vit_jax.errors import UserError
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.torch_files import unpack
from vit_jax.runs.assemble import assemble

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")]

DIM, HIDDEN, NECK, COUNT, PATCH_COUNT = 64, 24, 12, 20, 10
SIZES = {"head_hidden": HIDDEN, "bottleneck": NECK, "prototypes": COUNT}


@pytest.fixture
def make_head(torch):
    """Returns a function that creates the authors' head with random parameters.

    The lengths of its prototypes are 1, or random.
    """

    def make(count, ones=True, hidden=HIDDEN, neck=NECK):
        layers = [torch.nn.Linear(DIM, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)]
        mlp = torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(hidden, neck))
        with torch.no_grad():
            for p in mlp.parameters():
                p.normal_(0, 0.3)
        last = torch.nn.utils.weight_norm(torch.nn.Linear(neck, count, bias=False))
        last.weight_g.data = torch.ones(count, 1) if ones else torch.rand(count, 1) + 0.5
        return torch.nn.ModuleDict({"mlp": mlp, "last_layer": last})

    return make


def head_outputs(torch, head, x: np.ndarray, last="last_layer") -> np.ndarray:
    """Returns the outputs of the authors' head, in float64."""
    with torch.no_grad():
        inner = torch.nn.functional.normalize(head.double()["mlp"](torch.from_numpy(x)), dim=-1)
        return head[last](inner).numpy()


def tensors_of(module, start: str) -> dict:
    return {start + name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture
def backbone(timm):
    import torch

    torch.manual_seed(0)
    sizes = dict(img_size=32, embed_dim=DIM, depth=2, num_heads=1, num_classes=0)
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def started(checkpoint, **values):
    """Returns the parts of a DINO run that starts from a checkpoint."""
    config = base_config()
    config.update(dict(steps=1, batch_size=2))
    config.update_from_flattened_dict(
        {
            "data.source": "synthetic",
            "data.image_size": 32,
            "data.test_resize": 32,
            "model.name": "",
            "optimizer.warmup_steps": 0,
            "finetune.checkpoint": str(checkpoint),
        }
        | dotted("dino", **SIZES)
        | values
    )
    return assemble(check(config))


def first_state(parts):
    program, origin = parts.program, parts.origin
    read = origin.read(), {}, origin.read_objective(), origin.read_objective_state()
    return program.initial_state(0, *read)


def objective_of(parts, own):
    return nnx.merge(parts.program.objective, own)


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, DIM))


def assert_outputs(head, wanted: np.ndarray) -> None:
    found = jax.jit(lambda head, x: head(x))(head, np.float32(features()))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("ones", [True, False], ids=["lengths of 1", "lengths that were learned"])
@pytest.mark.parametrize("which", ["student", "teacher"])
def test_run_starts_with_the_heads_and_the_centre_of_dinos_full_checkpoint(
    which, ones, torch, backbone, make_head, tmp_path
):
    heads = {name: make_head(COUNT, ones) for name in ("student", "teacher")}
    content = {
        name: tensors_of(backbone, f"{start}backbone.") | tensors_of(heads[name], f"{start}head.")
        for name, start in (("student", "module."), ("teacher", ""))
    }
    centre = torch.randn(1, COUNT)
    moments = {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    content |= {"dino_loss": {"center": centre}, "optimizer": moments, "epoch": 100}
    content["args"] = argparse.Namespace(
        arch="vit_small", out_dim=COUNT, global_crops_scale=(0.4, 1.0)
    )
    torch.save(content, tmp_path / "full.pth")
    printed = convert(f"{tmp_path / 'full.pth'}@{which}", tmp_path / "ours")
    parameters = sum(x.numel() for x in heads[which].parameters()) - ones * COUNT
    assert "kept, of pre-training: head, centre" in printed and "skipped" not in printed
    assert f"kept: dino's own parameters, {parameters:,}, with centre" in printed
    lengths = "one" if ones else "learned"
    parts = started(tmp_path / "ours", **{"dino.prototype_lengths": lengths})
    assert parts.origin.notes[-1] == f"kept: dino's own parameters, {parameters:,}, with centre"
    state = first_state(parts)
    wanted = head_outputs(torch, heads[which], features())
    for own in (state["extra"]["objective"], state["objective_state"]["teacher_head"]):
        assert_outputs(objective_of(parts, own).head, wanted)
    np.testing.assert_array_equal(state["objective_state"]["centre"], centre[0].numpy())
    cls = backbone.state_dict()["cls_token"].numpy()
    np.testing.assert_array_equal(state["objective_state"]["teacher"]["cls"], cls)


PATCHES = {"dino.patch_weight": 1.0}
TWO = PATCHES | {"dino.patch_prototypes": PATCH_COUNT, "dino.patch_bottleneck": 8}


def in_chunks(tensors: dict) -> dict:
    """Renames blocks as DINOv2's training does, with two blocks in each chunk."""
    return {
        re.sub(r"blocks\.(\d)", r"blocks.0.\1", name): tensor for name, tensor in tensors.items()
    }


def test_run_starts_with_both_heads_and_the_mask_of_dinov2s_teacher(
    torch, backbone, make_head, tmp_path
):
    heads = {"dino_head": make_head(COUNT), "ibot_head": make_head(PATCH_COUNT, neck=8)}
    teacher = in_chunks(tensors_of(backbone, "backbone.")) | {
        "backbone.mask_token": torch.randn(1, DIM)
    }
    for name, head in heads.items():
        teacher |= tensors_of(head, f"{name}.")
    torch.save({"teacher": teacher}, tmp_path / "teacher_checkpoint.pth")
    printed = convert(tmp_path / "teacher_checkpoint.pth", tmp_path / "ours")
    assert "kept, of pre-training: head, patch_head, mask" in printed and "skipped" not in printed
    parts = started(tmp_path / "ours", **TWO)
    state = first_state(parts)
    objective = objective_of(parts, state["objective_state"]["teacher_head"])
    assert_outputs(objective.head, head_outputs(torch, heads["dino_head"], features()))
    assert_outputs(objective.patch_head, head_outputs(torch, heads["ibot_head"], features()))
    np.testing.assert_array_equal(objective.mask[...][0], teacher["backbone.mask_token"].numpy())
    assert np.abs(state["objective_state"]["centre"]).max() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_run_starts_with_ibots_head_of_one_mlp(shared, torch, backbone, make_head, tmp_path):
    head = make_head(COUNT)
    head["last_layer2"] = head["last_layer"] if shared else make_head(PATCH_COUNT)["last_layer"]
    student = tensors_of(backbone, "module.backbone.") | tensors_of(head, "module.head.")
    student["module.backbone.masked_embed"] = torch.randn(1, DIM)
    second = COUNT if shared else PATCH_COUNT
    centres = {"center": torch.randn(1, COUNT), "center2": torch.randn(1, 1, second)}
    teacher = {"backbone.cls_token": torch.zeros(1)}
    torch.save(
        {"student": student, "teacher": teacher, "ibot_loss": centres}, tmp_path / "ibot.pth"
    )
    convert(f"{tmp_path / 'ibot.pth'}@student", tmp_path / "ours")
    parts = started(
        tmp_path / "ours",
        **PATCHES,
        **({} if shared else {"dino.patch_prototypes": PATCH_COUNT}),
    )
    state = first_state(parts)
    objective = objective_of(parts, state["extra"]["objective"])
    assert_outputs(objective.head, head_outputs(torch, head, features()))
    assert_outputs(
        objective.patch_head or objective.head, head_outputs(torch, head, features(), "last_layer2")
    )
    np.testing.assert_array_equal(
        state["objective_state"]["patch_centre"], centres["center2"][0, 0].numpy()
    )


def test_unsupported_heads_are_logged_and_the_backbone_is_read(
    torch, backbone, make_head, tmp_path
):
    teacher = tensors_of(backbone, "backbone.") | tensors_of(make_head(COUNT), "head.")
    teacher["head.mlp.1.running_mean"] = torch.ones(HIDDEN)
    torch.save({"teacher": teacher}, tmp_path / "normed.pth")
    _, notes = unpack(str(tmp_path / "normed.pth"), tmp_path)
    words = "the heads are skipped: head is not an MLP of three layers with prototypes behind it"
    assert notes[0].startswith(words) and "head.mlp.1.running_mean" in notes[0]
    assert "skipped, used in pre-training only: head" in notes
    assert open_checkpoint(tmp_path).objective is None


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Trains a run with two heads and returns its workdir."""
    values = {
        "name": "dino",
        "patch_weight": 1.0,
        "patch_prototypes": PATCH_COUNT,
        "patch_bottleneck": 8,
    }
    config = small(**dotted(**SIZES, **values))
    config.update_from_flattened_dict({"steps": 2, "evaluate_every": 2})
    vit_jax.train(config, tmp_path_factory.mktemp("dino") / "run")
    return tmp_path_factory.getbasetemp() / "dino0" / "run"


OF_RUN = TWO | {"data.image_size": 16, "data.test_resize": 16}


def contents(source) -> tuple[dict, dict]:
    """Returns the objective's own parameters and state that a DINO run reads from a checkpoint."""
    origin = started(source, **OF_RUN).origin
    return origin.read_objective(), origin.read_objective_state()


def assert_same(one, other) -> None:
    assert len(jax.tree.leaves(one)) > 14
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_conversion_of_a_runs_heads_is_bit_exact(library, workdir, tmp_path):
    lines = []
    vit_jax.save_model(
        workdir, tmp_path / "first", library=library, position="1d", gelu="erf", log=lines.append
    )
    vit_jax.save_model(tmp_path / "first", tmp_path / "second", library=library)
    first = contents(workdir)
    assert {"centre", "patch_centre"} == first[1].keys() and np.abs(first[1]["centre"]).max() > 0
    for folder in ("first", "second"):
        assert_same(first, contents(tmp_path / folder))
    assert not any("skipped" in line for line in lines)


def test_new_run_starts_with_the_teachers_heads_and_logs_what_it_drops(
    workdir,
):
    parts = started(workdir, **OF_RUN)
    state, held = first_state(parts), open_checkpoint(workdir).objective
    jax.tree.map(
        np.testing.assert_array_equal,
        state["objective_state"]["teacher_head"],
        state["extra"]["objective"],
    )
    path = "head/layers/0/kernel"
    np.testing.assert_array_equal(
        held.sources({path: (16, HIDDEN)})[path](),
        state["objective_state"]["teacher_head"]["head"]["layers"]["0"]["kernel"],
    )
    of_patches = (
        "dino.patch_weight",
        "dino.patch_prototypes",
        "dino.patch_bottleneck",
    )
    without = {key: value for key, value in OF_RUN.items() if key not in of_patches}
    found = started(workdir, **without).origin.notes
    assert [line for line in found if line.startswith("dropped")] == [
        "dropped: dino's mask, which the run lacks",
        "dropped: dino's patch_head, which the run lacks",
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dino.prototypes": 30}, "for config.dino.prototypes=20: set that, or"),
        ({"dino.bottleneck": 6}, "for config.dino.bottleneck=12: set that, or"),
        (
            {"dino.prototype_lengths": "free"},
            "for config.dino.prototype_lengths='one': set that, or",
        ),
        ({"dino.patch_prototypes": None}, "has dino's patch_head, and the run has none;"),
    ],
)
def test_other_heads_are_refused_unless_they_are_initialized_again(values, words, workdir):
    with pytest.raises(UserError, match=re.escape(words) + ".*config.finetune.objective='new'"):
        started(workdir, **OF_RUN | values)
    parts = started(workdir, **OF_RUN | values | {"finetune.objective": "new"})
    assert parts.origin.notes[-1] == "new: dino's own parameters, random"
    assert parts.origin.read_objective_state() == {}


def test_formats_that_cannot_store_heads_log_that(workdir, tmp_path):
    lines = []
    vit_jax.save_model(workdir, tmp_path / "ours.npz", position="1d", log=lines.append)
    assert "not saved, as the format cannot store them: dino's own parameters" in lines
    assert open_checkpoint(tmp_path / "ours.npz").objective is None


def test_damaged_heads_are_refused(workdir, tmp_path):
    vit_jax.save_model(workdir, tmp_path / "ours", library="timm", position="1d")
    (tmp_path / "ours" / "objective.json").write_text('{"name": "dino"}')
    with pytest.raises(UserError, match="objective.json does not describe an objective"):
        vit_jax.load_model(tmp_path / "ours", log=str)
    shutil.rmtree(tmp_path / "ours")


def test_other_libraries_ignore_the_heads(timm, transformers, workdir, tmp_path):
    for library in ("timm", "transformers"):
        vit_jax.save_model(workdir, tmp_path / library, library=library, position="1d", gelu="erf")
    assert timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).num_features == 16
    _, info = transformers.AutoModel.from_pretrained(
        tmp_path / "transformers", output_loading_info=True
    )
    assert not info["unexpected_keys"]
