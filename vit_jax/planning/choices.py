"""Search for the mesh, rematerialization and micro-batches of the fastest step that fits memory."""

import time
from collections.abc import Callable

from vit_jax.config import with_values
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB
from vit_jax.planning.compile import Slice
from vit_jax.planning.cost import Workload
from vit_jax.planning.estimate import Estimate, estimate
from vit_jax.progress import duration
from vit_jax.runs.memory_check import LEFT, Changes, in_words, likely_changes

ATTEMPTS = 4  # Maximum number of estimates in the search for changes that fit.
# Function that estimates a config's run on some devices.
Planner = Callable[[RunOptions, Workload, Slice, dict[str, dict]], Estimate]


def nearest_fit(
    config: RunOptions,
    job: Workload,
    where: Slice,
    prices: dict[str, dict],
    failed: Estimate,
    log: Callable[[str], None],
    planner: Planner = estimate,
) -> tuple[Changes, Estimate] | None:
    """Searches for config changes with which the training step fits into memory.

    Candidates are estimated one after the other, in the order of their expected speed, until the
    step of a candidate fits.

    Args:
      failed: estimate of the config without changes.
      planner: function that estimates a run.

    Returns:
      The first changes that fit, and their estimate; None: no candidate fits.
    """
    memory, limit = failed.memory, where.chip.memory_bytes
    sizes = memory.parameters, memory.optimizer, memory.temporaries
    attempts = ATTEMPTS
    for changes in likely_changes(config, where.devices, limit, *sizes):
        if not attempts:
            break
        log(f"trying {in_words(changes)}")
        try:
            plan = planner(with_values(config, changes), job, where, prices)
        except UserError:
            continue  # For example, the mesh does not divide the batch size.
        attempts -= 1
        if plan.fits:
            return changes, plan
    return None


def sweep(
    config: RunOptions,
    job: Workload,
    where: Slice,
    prices: dict[str, dict],
    log: Callable[[str], None],
    planner: Planner = estimate,
) -> list[Estimate]:
    """Estimates every mesh with every rematerialization policy.

    Returns:
      The estimates, sorted by step time. Estimates that do not fit into memory are last.
    """
    sizes = sorted({size for size in (1, 8, where.devices) if where.devices % size == 0})
    candidates = [
        {"mesh.data": None, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "model.remat": remat}
        for tensor in (1, 2)
        for fsdp in sizes
        if where.devices % (fsdp * tensor) == 0
        for remat in LEFT
    ]
    plans, started = [], time.monotonic()
    for done, changes in enumerate(candidates):
        then = ""
        if done:
            left = (time.monotonic() - started) / done * (len(candidates) - done)
            then = f", {duration(left)} left"
        log(f"{done + 1} of {len(candidates)}{then}: {in_words(changes)}")
        try:
            plans.append(planner(with_values(config, changes), job, where, prices))
        except UserError as error:
            log(f"  skipped: {error}")
    return sorted(plans, key=lambda plan: (not plan.fits, plan.step_seconds or plan.memory.total))


def ranking(plans: list[Estimate]) -> str:
    """Returns a sweep's estimates as a text table, with one line for each estimate."""
    lines = ["  data x fsdp x tensor  remat    step ms     MFU      GiB     hours       price"]
    for plan in plans:
        fsdp, tensor = plan.choices["mesh.fsdp"], plan.choices["mesh.tensor"]
        mesh = f"{plan.where.devices // fsdp // tensor} x {fsdp} x {tensor}"
        line = f"{mesh:>22}  {plan.choices['model.remat']:5}"
        memory = f"{plan.memory.total / GIB:7.2f}"
        if plan.fits:
            price = f"{plan.cost.dollars:10,.0f}" if plan.cost.dollars is not None else ""
            line += f"  {plan.step_seconds * 1e3:9,.1f}  {plan.mfu:6.1%}  {memory}"
            line += f"  {plan.cost.hours:8,.1f}  {price}"
        else:
            line += f"  {'does not fit':>17}  {memory}"
        lines.append(line)
    return "\n".join(lines)
