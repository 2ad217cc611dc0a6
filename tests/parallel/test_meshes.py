"""Training on a mesh of devices gives the same losses as training on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from tests.conftest import FAST_COMPILE
from tests.parallel.meshes import MESHES, MODELS
from vit_jax.errors import UserError
from vit_jax.models import abstract, model_factory
from vit_jax.options.optimizer import OPTIMIZERS
from vit_jax.options.run import MeshOptions
from vit_jax.parallel.mesh import check_batch, make_mesh
from vit_jax.parallel.sharding import parameter_shardings, path_name

EIGHT = {
    "XLA_FLAGS": f"{FAST_COMPILE} --xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
}


def losses(*cases: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.meshes", *cases],
        cwd=Path(__file__).parents[2],
        env=os.environ | EIGHT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Earlier lines are messages from the code that writes a teacher.
    return json.loads(done.stdout.splitlines()[-1])


TEACHERS = "DINO", "DINOv2", "distillation", "EVA", "BEiT", "VQ-KD", "BEiT v2"
MASKED = [("masked patches", "data"), ("MAE", "all"), ("FCMAE", "data"), ("FCMAE", "all")]
ONCE = 'ViT: data: {"sum_gradients": "float32_once"}'


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    objectives = "masked patches: one", "masked patches: data", "MAE: one", "MAE: all"
    objectives += "FCMAE: one", "FCMAE: data", "FCMAE: all"
    vits = "ViT: one", "ViT: data", "ViT, dots: fsdp", "ViT scanned, full: all", ONCE
    return losses(*vits, *objectives)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ViT: data", "ViT, dots: fsdp", "ViT scanned, full: all", ONCE])
def test_no_mesh_scan_or_remat_changes_the_losses(results, case):
    np.testing.assert_allclose(results[case]["losses"], results["ViT: one"]["losses"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "mesh"), MASKED)
def test_images_are_masked_alike_on_one_device_and_on_eight(results, objective, mesh):
    several, one = (results[f"{objective}: {where}"]["losses"] for where in (mesh, "one"))
    np.testing.assert_allclose(several, one, rtol=1e-5)


@pytest.mark.slow
def test_losses_with_teachers_and_crops_of_two_sizes_are_the_same_on_one_device_and_on_eight():
    found = losses(*(f"{name}: {mesh}" for name in TEACHERS for mesh in ("one", "all")))
    for name in TEACHERS:
        every, one = found[f"{name}: all"], found[f"{name}: one"]
        np.testing.assert_allclose(every["losses"], one["losses"], rtol=1e-5)
        assert every["share"] < 0.5  # A frozen teacher is sharded like the model.


@pytest.mark.slow
def test_dense_heads_are_alike_on_one_device_and_on_eight():
    """Batch norms, numbers of masks and boxes, and sampled points depend on the whole batch."""
    names = ("linear segmentation", "UPerNet", "EoMT", "detection", "depth")
    found = losses(*(f"{name}: {mesh}" for name in names for mesh in ("one", "all")))
    for name in names:
        one, every = (found[f"{name}: {mesh}"]["losses"] for mesh in ("one", "all"))
        np.testing.assert_allclose(every, one, rtol=1e-5)


@pytest.mark.slow
def test_pairs_are_compared_alike_on_one_device_and_on_eight():
    names = ("CLIP", "SigLIP", "SigLIP 2")
    found = losses(*(f"{name}: {mesh}" for name in names for mesh in ("one", "all")))
    for name in names:
        every, one = found[f"{name}: all"]["losses"], found[f"{name}: one"]["losses"]
        np.testing.assert_allclose(every, one, rtol=1e-5)


@pytest.mark.slow
def test_relaxed_codes_are_the_same_on_one_device_and_on_eight():
    one, everything = losses("DVAE: one", "DVAE: all").values()
    np.testing.assert_allclose(everything["losses"], one["losses"], rtol=1e-4)
    assert everything["share"] < 0.6  # Small arrays are not sharded.


@pytest.mark.slow
def test_branches_of_a_subset_are_the_same_on_any_mesh_without_communication():
    values = (
        json.dumps(dict(batch_size=256)),
        json.dumps(dict(batch_size=256, sum_gradients="float32_once")),
    )
    one, data, everything, once = losses(
        *(f"ViT, subset: {mesh}: {values[0]}" for mesh in ("one", "data", "all")),
        f"ViT, subset: data: {values[1]}",
    ).values()
    for several in (data, everything, once):
        np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-5)
    assert data["asked"] == once["asked"] == 0  # Each device has a group of 32 images.


@pytest.mark.slow
def test_groups_across_several_devices_exclude_the_same_images():
    one, data = losses(*(f"ViT, subset: {mesh}" for mesh in ("one", "data"))).values()
    np.testing.assert_allclose(data["losses"], one["losses"], rtol=1e-5)
    assert data["asked"] > 0


@pytest.mark.slow
def test_convnexts_losses_are_the_same_on_one_device_and_on_eight():
    versions = "ConvNeXt", "ConvNeXt V2"
    found = losses(*(f"{name}: {mesh}" for name in versions for mesh in ("one", "all")))
    for name in versions:
        every, one = found[f"{name}: all"], found[f"{name}: one"]
        np.testing.assert_allclose(every["losses"], one["losses"], rtol=1e-5)
        assert every["share"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Swin", "Swin V2"])
def test_a_swin_on_a_mesh_of_all_axes_has_the_losses_of_one_device(name):
    one, several = losses(f"{name}: one", f"{name}: all").values()
    np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-5)
    assert several["share"] < 0.6


@pytest.mark.slow
def test_fsdp_and_tensor_divide_parameters_and_moments(results):
    assert results["ViT: data"]["share"] == 1
    assert (
        results["ViT, dots: fsdp"]["share"] < 0.5
    )  # Arrays of fewer than 16,384 elements are replicated.
    assert results["ViT scanned, full: all"]["share"] < 0.4


@pytest.mark.study
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_mesh(model):
    found = losses(*(f"{model}: {mesh}" for mesh in MESHES))
    for mesh in MESHES:
        np.testing.assert_allclose(
            found[f"{model}: {mesh}"]["losses"], found[f"{model}: one"]["losses"], rtol=1e-4
        )


@pytest.mark.slow
def test_every_optimizer_on_a_mesh_of_all_axes():
    values = {name: json.dumps(dict(name=name, moment_dtype="bfloat16")) for name in OPTIMIZERS}
    found = losses(
        *(f"shallow ViT: {mesh}: {each}" for each in values.values() for mesh in ("one", "all"))
    )
    for name, each in values.items():
        every, one = found[f"shallow ViT: all: {each}"], found[f"shallow ViT: one: {each}"]
        np.testing.assert_allclose(every["losses"], one["losses"], rtol=1e-3, err_msg=name)


def places(
    name: str, data: int = 1, fsdp: int = 1, tensor: int = 1, num_classes: int = 21_843
) -> dict:
    """Returns the sharding of a model's parameters by their path."""
    mesh = AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))
    model = abstract(model_factory(name, num_classes=num_classes, image_size=224))
    params = nnx.to_pure_dict(nnx.state(model))
    placed = jax.tree.leaves_with_path(parameter_shardings(mesh, params))
    return {path_name(path): x.spec for path, x in placed}


@pytest.mark.parametrize("name", ["ViT-B/16", "ViT-H/14", "R50+ViT-L/16", "BiT-R152x2"])
def test_large_arrays_of_the_papers_models_are_divided(name):
    for path, spec in places(name, fsdp=16, tensor=4).items():
        if (
            path.endswith(("fc1/kernel", "qkv/kernel", "conv1/kernel", "conv3/kernel"))
            and "stages/1/" not in path
        ):
            assert {"fsdp", "tensor"} <= set(spec), path


def test_heads_that_tensor_does_not_divide_are_named():
    with pytest.raises(
        UserError,
        match=r"mesh.tensor = 2 .* axis 0 .* blocks/00/attention/out/kernel \[3, 64, 192\]",
    ):
        places("ViT-Ti/16", tensor=2)


def test_large_array_that_fsdp_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"mesh.fsdp = 7 .*(kernel|table) \[.*mesh.fsdp=1,"):
        places("ViT-B/16", fsdp=7)


@pytest.mark.parametrize(
    "sizes",
    [
        MeshOptions(data=3),
        MeshOptions(fsdp=3),
        MeshOptions(fsdp=None),
    ],
)
def test_mesh_that_does_not_make_up_the_devices_is_refused(sizes):
    with pytest.raises(UserError, match="does not make up 1 device"):
        make_mesh(sizes)


def test_tensor_neighbours_share_images():
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    check_batch(mesh, 4)
    with pytest.raises(UserError, match="batch size 6 does not divide by 4 groups of 2 devices"):
        check_batch(mesh, 6)
