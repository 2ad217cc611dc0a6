"""Roofline estimate of a step for GPUs, and for this machine's CPU.

The time of a matrix product is the time of its FLOPs or the time of its memory traffic, whichever
is longer. All other operations are assumed to be fused into their neighbours and take no time. The
exception is the optimizer's update, which reads and writes the state.

The results of matrix products stay in memory as long as they are used. All other results are
assumed to be recomputed.
"""

import os
import time

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh

from vit_jax.config import with_values
from vit_jax.models.model_card import multiply_adds
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import Chip, find_chip
from vit_jax.parallel.mesh import AXES, batch_parts, check_batch, make_mesh, mesh_shape
from vit_jax.planning.compile import Memory, Slice
from vit_jax.planning.cost import Workload, cost
from vit_jax.planning.estimate import Estimate, choices
from vit_jax.runs.frozen_model import frozen_shapes
from vit_jax.runs.memory_check import PRODUCTS, bytes_of, most_alive
from vit_jax.training.program import abstract_batch, make_program

# Operations that move no data even if they are not fused.
VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient", "copy")


def find_machine(name: str, devices: int | None) -> Slice:
    """Returns a machine with GPUs, or this machine's CPU; the CPU's speed is measured.

    Raises:
      UserError: no known chip has this name.
    """
    return Slice(_this_cpu() if name == "cpu" else find_chip(name), "", devices or 1)


def estimate_best(
    config: RunOptions, job: Workload, where: Slice, prices: dict[str, dict]
) -> Estimate:
    """Returns a roofline estimate. Its `step_seconds` is a lower bound of the real step time."""
    whole = AbstractMesh(mesh_shape(config.mesh, where.devices), AXES)
    check_batch(whole, config.batch_size, config.micro_batches)
    parts, tensor = batch_parts(whole), whole.shape["tensor"]
    one_device = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
    local = with_values(config, one_device | {"batch_size": config.batch_size // parts})
    mesh = make_mesh(local.mesh, jax.devices("cpu")[:1])
    sizes = dict(num_classes=job.num_classes, steps=job.steps)
    program = make_program(local, mesh=mesh, frozen=frozen_shapes(local), **sizes)
    batch = abstract_batch(local, mesh)
    jaxpr = program.train_step.trace(program.state, program.metrics, batch).jaxpr.jaxpr

    chip = where.chip
    work = _Work(chip)
    work.count(jaxpr)
    divided = whole.shape["fsdp"] * tensor
    frozen, changed = (
        bytes_of(jax.tree.leaves([program.state[name] for name in names])) // divided
        for names in (["frozen"], ["params", "extra", "objective_state"])
    )
    moments = bytes_of(jax.tree.leaves(program.state["optimizer"])) // divided
    memory = Memory(
        parameters=changed + frozen,
        optimizer=moments,
        batch=bytes_of(jax.tree.leaves(batch)),
        temporaries=most_alive(jaxpr) // tensor,
        code=0,
    )
    fits = memory.total <= chip.memory_bytes
    update = 2 * (changed + moments) / chip.memory_bandwidth
    seconds = work.seconds / tensor + update
    return Estimate(
        model=config.model.name,
        where=where,
        choices=choices(config),
        job=job,
        method="a roofline, from all operations fused to none; no device waits for another",
        memory=memory,
        fits=fits,
        step_seconds=seconds if fits else None,
        slowest_seconds=work.unfused_seconds / tensor + update if fits else None,
        flops=float(work.flops * parts),
        cost=cost(job, where, seconds, prices) if fits else None,
    )


class _Work:
    """FLOPs and estimated time of a program.

    `flops` and `seconds` are those of the matrix products; all other operations are assumed to be
    fused. `unfused_seconds` is the time of all operations without any fusion.
    """

    def __init__(self, chip: Chip):
        self.chip, self.flops, self.seconds, self.unfused_seconds = chip, 0, 0.0, 0.0

    def count(self, jaxpr: core.Jaxpr, times: int = 1) -> None:
        for equation in jaxpr.eqns:
            inner_programs = [*core.jaxprs_in_params(equation.params)]
            moved = bytes_of([x.aval for x in (*equation.invars, *equation.outvars)])
            moving = times * moved / self.chip.memory_bandwidth
            if equation.primitive.name in PRODUCTS:
                flops = 2 * multiply_adds(equation)
                self.flops += times * flops
                self.seconds += max(times * flops / self.chip.peak_flops, moving)
                self.unfused_seconds += times * flops / self.chip.peak_flops + moving
            elif not inner_programs and equation.primitive.name not in VIEWS:
                self.unfused_seconds += moving
            turns = equation.params["length"] if equation.primitive.name == "scan" else 1
            for inner in inner_programs:
                self.count(inner, times * turns)


def _this_cpu() -> Chip:
    """Measures this machine's CPU: FLOP/s by a matrix product, and bandwidth by a vector sum."""

    def fastest(function, *arguments) -> float:
        compiled = jax.jit(function).lower(*arguments).compile()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - started)
        return min(times)

    matrix, vector = jnp.ones((2048, 2048)), jnp.ones(2**25)
    flops = 2 * 2048**3 / fastest(lambda x: x @ x, matrix)
    bandwidth = 2 * vector.nbytes / fastest(lambda x: x + 1, vector)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip("cpu", "cpu", flops, memory, bandwidth, bandwidth)
