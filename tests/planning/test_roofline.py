"""Plans by the roofline model, without a compiler."""

import pytest

from tests.planning.test_compile import small
from vit_jax.errors import UserError
from vit_jax.parallel.chips import peak_flops
from vit_jax.planning import choices
from vit_jax.planning.estimate import make_workload, table
from vit_jax.planning.roofline import estimate_best, find_machine

H100 = find_machine("h100", 8)


def plan(**changes):
    config = small(**{"model.dtype": "bfloat16", "model.dropout": 0.0} | changes)
    return estimate_best(config, make_workload(config, None), H100, {})


def test_a_roofline_takes_no_less_than_the_peak():
    found = plan()
    assert found.step_seconds > found.job.flops * 0.9 / 8 / H100.chip.peak_flops
    assert 0.9 < found.flops / found.job.flops < 1.05
    assert found.memory.parameters == 4 * found.job.parameters
    assert "no price known" in table(found) and "roofline" in table(found)


def test_memory_grows_with_the_images_of_a_device_and_less_is_kept_by_computing_anew():
    few, many, anew = (
        plan(),
        plan(batch_size=256),
        plan(**{"batch_size": 256, "model.remat": "full"}),
    )
    assert many.memory.temporaries > 2 * few.memory.temporaries
    assert anew.memory.temporaries < many.memory.temporaries
    assert anew.flops > 1.2 * many.flops


def test_fsdp_divides_the_state():
    assert plan(**{"mesh.fsdp": 8}).memory.optimizer == plan().memory.optimizer // 8


# 25.9 GB are needed. An RTX 3090 has 24.
LARGE = small(**{"batch_size": 2**18, "model.dropout": 0.0})


def test_a_change_is_found_for_a_program_that_does_not_fit_a_gpu():
    job, card, said = make_workload(LARGE, None), find_machine("rtx3090", 1), []
    failed = estimate_best(LARGE, job, card, {})
    assert not failed.fits
    changes, found = choices.nearest_fit(LARGE, job, card, {}, failed, said.append, estimate_best)
    assert changes == {"model.remat": "dots"} and said == ["trying --config.model.remat=dots"]
    assert found.fits and found.choices["model.remat"] == "dots"


def test_a_sweep_over_gpus_ranks_those_that_fit_by_time():
    card = find_machine("rtx3090", 1)
    plans = choices.sweep(LARGE, make_workload(LARGE, None), card, {}, str, estimate_best)
    ranked = [(plan.choices["model.remat"], plan.fits) for plan in plans]
    assert ranked == [("dots", True), ("full", True), ("none", False)]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
    ],
)
def test_gpus_are_recognized_by_their_names(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"batch_size": 60}, "batch size 60 does not divide"),
        ({"mesh.data": 3}, "does not make up 8"),
    ],
)
def test_sizes_that_the_devices_do_not_divide_raise_an_error(changes, line):
    with pytest.raises(UserError, match=line):
        plan(**changes)


@pytest.mark.parametrize(
    "name", ["RTX 4090", "rtx4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "Rtx_4090"]
)
def test_a_chip_has_any_spelling_and_is_one_device_by_default(name):
    found = find_machine(name, None)
    assert (found.chip.name, found.devices) == ("rtx4090", 1)


def test_a_roofline_is_a_range():
    found = plan()
    assert found.slowest_seconds > found.step_seconds
    low, high = found.step_seconds * 1e3, found.slowest_seconds * 1e3
    assert f"{low:,.1f} to {high:,.1f} ms" in table(found)
