"""Programs compiled for TPUs without TPUs."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.test_config import load
from vit_jax.config import base_config, run_options, with_values
from vit_jax.errors import UserError
from vit_jax.options.run import MeshOptions, RunOptions
from vit_jax.parallel import sharding
from vit_jax.parallel.mesh import BATCH, make_mesh
from vit_jax.planning import choices
from vit_jax.planning.compile import compile_lowered, compile_step, find_slice, topology_devices
from vit_jax.planning.estimate import estimate, make_workload, table
from vit_jax.planning.hlo import by, read_operations, total
from vit_jax.planning.schedule import dumped_schedules
from vit_jax.training.objectives.pair_losses import Pairs, sigmoid_losses
from vit_jax.training.program import abstract_batch, make_program

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[plan]"'
)
WHERE = find_slice("v5e", "2x2")
PRICES = {"v5e": {"dollars": 1.2, "of": "here"}}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def small(**changes):
    """Returns the config of a small model: two layers, four patches and a width of 128.

    The width is large enough that fsdp shards its kernels. The head uses all tokens, so that the
    last layer, half of this model, computes all of them.
    """
    config = load("quickstart")
    config.model.pooling = "gap"
    config.model.update(dict(dim=128, depth=2, mlp_dim=256, heads=2, dtype="bfloat16"))
    config.batch_size, config.steps, config.optimizer.warmup_steps = 64, 10, 1
    return with_values(run_options(config), changes)


def step_for_v5e() -> jax.stages.Lowered:
    config, mesh = small(), make_mesh(MeshOptions(data=4), topology_devices(WHERE))
    program = make_program(config, num_classes=10, steps=10, mesh=mesh)
    return program.train_step.lower(program.state, program.metrics, abstract_batch(config, mesh))


@pytest.mark.slow
@needs_compiler
def test_other_flags_of_the_compiler_compile_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compiled() -> bool:
        return not compile_lowered(step_for_v5e(), WHERE, {}, {}).cached

    assert compiled()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    assert compiled()
    with dumped_schedules():
        assert not compiled()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("chip", "precision", "asked", "kernels"),
    [("v5e", None, "1", 2), ("v5e", "highest", "1", 2), ("v3", None, "1", 0), ("v5e", None, "", 0)],
)
def test_a_swins_windows_are_a_kernel_if_asked_for_and_where_the_compiler_has_them(
    chip, precision, asked, kernels, monkeypatch
):
    monkeypatch.setenv(sharding.KERNELS, asked)
    values = {"model.name": "Swin-T", "model.dim": 64, "model.blocks": (1,), "model.window": 4}
    values |= {"model.stage_heads": (2,), "model.patch_size": 4, "model.dtype": "bfloat16"}
    config = with_values(RunOptions(), values | {"data.image_size": 32, "batch_size": 8})
    with jax.default_matmul_precision(precision):
        compiled = compile_step(config, find_slice(chip, "2x2"), num_classes=10, steps=20_000)
    calls = [x for x in compiled.operations if "window_attention" in x.name]
    assert len(calls) == kernels
    assert all(x.cycles and x.flops for x in calls)


def plan(config):
    return estimate(config, make_workload(config, None), WHERE, PRICES)


@needs_compiler
def test_plan_of_a_small_model_is_consistent():
    found = plan(small())
    parameters = 4 * found.job.parameters
    assert found.fits and found.memory.parameters == parameters
    assert 2 * parameters <= found.memory.optimizer < 2.01 * parameters
    # The gradient of the first layer with respect to the image is not computed, so there are
    # slightly fewer FLOPs than in three passes.
    assert 0.9 < found.flops / found.job.flops < 1.05
    assert (
        found.collectives["all-reduce"] >= 2 * found.job.parameters
    )  # Gradients are in bfloat16 or float32.
    assert 0 < found.mfu < 1 and found.step_seconds > 0
    assert {"Attention", "Mlp", "optimizer"} <= found.parts.keys()
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    assert len(found.costliest) == 10
    text = table(found)
    assert "fits" in text and "MFU" in text and "the ten costliest operations" in text


@pytest.mark.slow
@needs_compiler
def test_a_config_whose_model_is_a_checkpoints_is_one_line():
    config = base_config()
    config.model.name, config.finetune.checkpoint = "", "hf://timm/some"
    with pytest.raises(UserError, match=r"that of hf://timm/some, .* --config.model.name=ViT-B/16"):
        make_workload(config, images=1000)


@pytest.mark.slow
@needs_compiler
def test_scanned_layers_do_as_many_flops_as_layers_one_by_one():
    job = make_workload(small(), None)
    one_by_one, scanned = (
        compile_step(small(**{"model.scan": scan}), WHERE, 10, job.steps) for scan in (False, True)
    )
    assert total(scanned.operations, "flops") == pytest.approx(
        total(one_by_one.operations, "flops"), rel=0.02
    )


@pytest.mark.slow
@needs_compiler
def test_fsdp_divides_the_state_and_gathers_it():
    whole, divided = plan(small()), plan(small(**{"mesh.fsdp": 4, "mesh.data": 1}))
    assert divided.memory.parameters < 0.4 * whole.memory.parameters
    assert divided.collectives["all-gather"] > 0


@needs_compiler
@pytest.mark.slow
def test_a_program_that_is_too_large_is_reported_with_a_change_that_fits():
    # The state has 18 GiB.
    config = small(**{"model.mlp_dim": 2**20, "model.dim": 384, "model.depth": 2})
    failed = plan(config)
    assert not failed.fits and failed.memory.total > WHERE.chip.memory_bytes
    assert "does not fit" in table(failed)
    said = []
    changes, found = choices.nearest_fit(
        config, make_workload(config, None), WHERE, PRICES, failed, said.append
    )
    assert found.fits and found.memory.total < WHERE.chip.memory_bytes
    assert changes["mesh.fsdp"] == 4 and said == ["trying --config.mesh.fsdp=4"]


@pytest.mark.slow
@needs_compiler
def test_a_program_that_was_compiled_before_is_not_compiled_again():
    first, second = (
        compile_step(small(), WHERE, 10, make_workload(small(), None).steps) for _ in range(2)
    )
    assert second.cached and second.memory == first.memory and second.operations == first.operations


def test_error_of_a_missing_compiler_contains_the_command_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[plan\]"'):
        plan(small())


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "line"),
    [({"batch_size": 62}, "batch size 62 does not divide"), ({"mesh.fsdp": 3}, "mesh")],
)
def test_sizes_that_the_slice_does_not_divide_raise_an_error(changes, line):
    with pytest.raises(UserError, match=line):
        plan(small(**changes))


def test_sums_by_key_are_largest_first_and_without_zeros():
    from vit_jax.planning.hlo import Operation

    rows = [Operation("a", "fusion", "", "Mlp", 2, 5), Operation("b", "copy", "", "loss", 1, 0)]
    rows.append(Operation("c", "fusion", "", "Attention", 1, 30))
    assert list(by(rows, "part", "cycles").items()) == [("Attention", 30), ("Mlp", 10)]


@pytest.mark.slow
@needs_compiler
def test_gradients_are_sent_as_they_are_computed_or_once_in_float32():
    sent = {}
    for way in ("as_computed", "float32_once"):
        found = plan(small(**{"micro_batches": 4, "optimizer.sum_gradients": way}))
        sent[way] = found.collectives["all-reduce"] / found.job.parameters
    assert sent["float32_once"] == pytest.approx(4, rel=0.02)
    assert sent["as_computed"] > 5  # The gradients of layers are sent four times, in bfloat16.


@pytest.mark.slow
@needs_compiler
def test_blocks_of_the_sigmoid_loss_need_a_thousandth_of_the_memory_of_all_similarities():
    """There are 32,768 pairs on 256 devices; docs/planning.md contains the printed figures."""
    where = find_slice("v5e", "16x16")
    mesh = make_mesh(MeshOptions(), topology_devices(where))

    def blocks(images, texts, scale, bias, keep):
        return sigmoid_losses(Pairs(images, texts, scale, keep), bias, mesh)[0].mean()

    def matrix(images, texts, scale, bias, keep):
        logits = scale * jnp.matmul(images, texts.T, precision="highest") + bias
        negatives = jnp.where(keep, jax.nn.softplus(logits), 0).sum(axis=1)
        return (negatives - jnp.diagonal(logits)).mean()

    def shape(sizes, kind, *axes):
        return jax.ShapeDtypeStruct(sizes, kind, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    embeddings, number = shape((32768, 768), "float32", BATCH), shape((), "float32")
    inputs = embeddings, embeddings, number, number, shape((32768,), "bool", BATCH)
    memory = {}
    for loss in (blocks, matrix):
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(*inputs)
        compiled = lowered.compile()
        memory[loss] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        milliseconds = 1e3 * total(read_operations(compiled.as_text()), "cycles") / where.chip.clock
        print(f"{loss.__name__}: {memory[loss]:.1f} MiB, {milliseconds:.1f} ms")
    assert 0 < 500 * memory[blocks] < memory[matrix]
