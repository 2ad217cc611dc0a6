"""Steps that cannot fit into memory are refused, with advice that makes them fit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_config import load
from vit_jax.config import check_fits, leaves, run_options, with_values
from vit_jax.errors import UserError, mistake
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB
from vit_jax.parallel.mesh import make_mesh
from vit_jax.runs import memory_check
from vit_jax.runs.memory_check import MemoryCheck, Needs, needs_of
from vit_jax.training.program import Program, abstract_batch, make_program


def program_of(**changes) -> tuple[Program, RunOptions]:
    """Returns the program and the options of a small model."""
    config = load("quickstart")
    config.model.update(dict(dim=64, depth=2, mlp_dim=256, heads=2, pooling="gap"))
    config.batch_size, config.steps, config.optimizer.warmup_steps = 64, 10, 1
    config.update_from_flattened_dict(changes)
    config = run_options(config)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return make_program(config, num_classes=10, steps=10, mesh=mesh), config


def needs(**changes) -> Needs:
    return needs_of(*program_of(**changes), max_labels=1)


def check_of(**changes) -> MemoryCheck:
    def again(config: RunOptions) -> Program:
        return program_of(**dict(leaves(config)))[0]

    return MemoryCheck(*program_of(**changes), max_labels=1, make=again)


@pytest.fixture
def device(monkeypatch):
    """Returns a function that sets the device's memory, in bytes."""

    def has(size: float | None, free: float | None = None):
        monkeypatch.setattr(
            memory_check, "memory_of", lambda _: (size, size if free is None else free)
        )

    return has


def test_parameters_moments_gradients_and_batch_are_counted_to_the_byte():
    found, (program, _) = needs(), program_of()
    parameters = sum(4 * np.prod(x.shape) for x in jax.tree.leaves(program.state["params"]))
    assert found.parameters == found.gradients == parameters
    assert (
        2 * parameters <= found.optimizer <= 2 * parameters + 100
    )  # Adam's two moments and its counters.
    assert found.batch == 64 * (16 * 16 * 3 + 4)


def test_frozen_parameters_have_no_gradients():
    assert needs(**{"finetune.train": "head"}).gradients == 4 * (64 * 10 + 10)


def test_rematerialisation_and_micro_batches_reduce_activation_memory():
    deep = {"model.depth": 4}
    activations = needs(**deep).activations
    assert needs(**deep, **{"model.remat": "full"}).activations < 0.8 * activations
    assert needs(**deep, micro_batches=8).activations < 0.4 * activations
    assert needs(**deep, batch_size=128).activations == pytest.approx(2 * activations, rel=0.1)


@pytest.mark.slow
def test_estimate_is_at_most_the_compiled_memory():
    shallow = {"model.depth": 1, "batch_size": 512}
    (program, config), found = program_of(**shallow), needs(**shallow)
    batch = abstract_batch(config, program.mesh)
    compiled = program.train_step.lower(program.state, program.metrics, batch).compile()
    assert 0.2 < found.activations / compiled.memory_analysis().temp_size_in_bytes <= 1


def test_device_that_cannot_hold_the_state_is_refused_and_one_that_can_is_not(device):
    check = check_of()
    device(needs().certain - 1)
    with pytest.raises(
        UserError, match=r"a step needs .* at least, and each of 1 device\(s\) \(cpu\) has"
    ):
        check.check(pytest.fail)
    device(sum(needs()))
    check.check(pytest.fail)
    device(None)
    check.check(pytest.fail)


@pytest.mark.slow
def test_step_that_may_not_fit_starts_with_a_note(device):
    check, said = check_of(), []
    device(0.9 * sum(needs()))
    check.check(said.append)
    assert re.match("note: a step needs .*; this should fit: --config", *said)


def advised(line: str) -> list[dict[str, str]]:
    """Returns the config changes that a line suggests after "this should fit", by key."""
    ways = line.partition("this should fit: ")[2].split(" or ")
    return [dict(re.findall(r"--config\.([\w.]+)=(\S+)", way)) for way in ways]


@pytest.mark.slow
def test_advised_changes_fit(device):
    check = check_of(batch_size=4096)
    large = needs(batch_size=4096)
    free = large.certain + 0.9 * large.activations
    device(10 * free, free)
    said = []
    check.check(said.append)
    found = advised(*said)
    assert len(found) == 2
    for changes in found:
        changes = {key: int(value) if value.isdigit() else value for key, value in changes.items()}
        smaller = needs(**{"batch_size": 4096} | changes)
        assert smaller.certain + memory_check.TAKEN * smaller.activations <= free


def test_micro_batches_that_are_advised_have_whole_groups_of_koleo():
    config = load("my_images_unlabelled")
    config.batch_size = 64
    found = [*memory_check.likely_changes(run_options(config), 1, 10e9, 10**9, 10**9, 20 * 10**9)]
    micro = {one["micro_batches"]: one for one in found if "micro_batches" in one}
    assert micro and all(one["dino.koleo_group"] == 64 // count for count, one in micro.items())
    for changes in micro.values():
        for key in ("dino.koleo", "dino.koleo_group"):
            check_fits(with_values(run_options(config), changes), key)


def test_micro_batches_are_not_advised_for_contrastive_losses():
    config = load("siglip")
    found = [*memory_check.likely_changes(config, 1, 10e9, 10**9, 10**9, 12 * 10**9)]
    assert found and not any("micro_batches" in one for one in found)


@pytest.mark.parametrize(
    "error",
    [
        lambda: jnp.zeros((10**6, 10**6)),
        lambda: np.ones((10**6, 10**6)),
    ],
    ids=["of a device", "of the host"],
)
def test_errors_of_exhausted_memory_are_one_line(device, error):
    with pytest.raises((jax.errors.JaxRuntimeError, MemoryError)) as raised:
        error()
    device(16 * GIB)
    line = check_of(batch_size=4096).explain(raised.value)
    assert re.match(
        r"out of memory \(cpu, 16.0 GiB\): [\d,.]+ GiB were requested; this should fit: --c", line
    )
    assert re.match(
        r"out of memory: [\d,.]+ GiB were requested; .*--batch_size", mistake(raised.value)
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137.44GiB.", "137.4"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.", "2.0"),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.",
            "20.5",
        ),
    ],
)
def test_out_of_memory_messages_of_gpus_and_tpus_are_parsed(text, size):
    assert f"out of memory: {size} GiB" in mistake(jax.errors.JaxRuntimeError(text))


def test_other_errors_are_not_reported_as_out_of_memory():
    check = check_of()
    for error in (
        jax.errors.JaxRuntimeError("INTERNAL: bad"),
        ValueError("RESOURCE_EXHAUSTED"),
        OSError(),
    ):
        assert check.explain(error) is None and mistake(error) is None
