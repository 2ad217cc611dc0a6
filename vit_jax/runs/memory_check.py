"""Estimate of a step's device memory before compilation, and config changes that reduce it."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

from vit_jax.config import with_values
from vit_jax.errors import UserError, requested_bytes
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB, memory_of
from vit_jax.parallel.mesh import batch_parts
from vit_jax.training.lora import trained
from vit_jax.training.program import Program, abstract_batch
from vit_jax.training.step import weights_of

Changes = dict[str, Any]  # Changes of a config: new values by dotted key.

# Approximate memory of activations and gradients with each rematerialization policy, relative to
# the policy `none`.
LEFT = {"none": 1.0, "dots": 0.6, "full": 0.2}
# If a step needs more than this factor times the memory of a device, it cannot fit.
CERTAIN = 2.0
# Memory of activations in a compiled step, divided by their minimum memory. Measured with a small
# model on a CPU.
TAKEN = 4
PRODUCTS = ("dot_general", "conv_general_dilated")


class Needs(NamedTuple):
    """Minimum bytes that a step needs on each device, without the compiler's overhead."""

    parameters: int  # Includes averages and a frozen model's parameters.
    optimizer: int
    gradients: int
    batch: int
    activations: int

    @property
    def certain(self) -> int:
        """Bytes that a step certainly needs: all bytes except the activations."""
        return self.parameters + self.optimizer + self.gradients + self.batch

    def __str__(self):
        named = {"parameters and moments": self.parameters + self.optimizer}
        named |= {name: getattr(self, name) for name in ("gradients", "batch", "activations")}
        parts = [f"{name} {size / GIB:,.1f}" for name, size in named.items()]
        return f"{sum(self) / GIB:,.1f} GiB ({', '.join(parts)})"


def needs_of(program: Program, config: RunOptions, max_labels: int) -> Needs:
    """Estimates a step's memory by tracing it, for at most `max_labels` labels of an image."""
    batch = abstract_batch(config, program.mesh, max_labels)
    # The trace costs no extra time: JAX caches it, and reuses it when the step is compiled.
    jaxpr = program.train_step.trace(program.state, program.metrics, batch).jaxpr.jaxpr
    weights = weights_of(program.state)
    leaves = zip(*map(jax.tree.leaves, (weights, trained(config.finetune, weights))), strict=True)
    moving = [x for x, moves in leaves if moves]
    return Needs(
        parameters=sum(
            held(x) for x in (weights, program.state["objective_state"], program.state["frozen"])
        ),
        optimizer=held(program.state["optimizer"]),
        gradients=held(moving),
        batch=held(batch),
        activations=max(0, most_alive(jaxpr) - bytes_of(moving)) // program.mesh.size,
    )


class MemoryCheck:
    """Check that a run's step fits into memory. If it does not fit, suggests config changes."""

    def __init__(
        self,
        program: Program,
        config: RunOptions,
        max_labels: int,
        make: Callable[[RunOptions], Program],
    ):
        self._config, self._mesh = config, program.mesh
        self._max_labels, self._make = max_labels, make
        self._device = program.mesh.local_devices[0]
        self._needs = needs_of(program, config, max_labels)

    def check(self, log: Callable[[str], None]) -> None:
        """Logs a note if a step may not fit; raises UserError if it certainly does not."""
        limit, free = memory_of(self._device)
        if limit is None:
            return
        needs = f"a step needs {self._needs} at least"
        has = (
            f"each of {self._mesh.size} device(s) ({self._device.device_kind}) has "
            f"{limit / GIB:,.1f}"
        )
        if self._needs.certain > limit or sum(self._needs) > CERTAIN * limit:
            raise UserError(f"{needs}, and {has}; {self._remedy(TAKEN, limit)}")
        if sum(self._needs) > free:
            log(
                f"note: {needs}, and {has}, {free / GIB:,.1f} of it free; "
                f"{self._remedy(TAKEN, free)}"
            )

    def explain(self, error: BaseException) -> str | None:
        """Returns a line that explains an out-of-memory error; None for other errors."""
        asked = requested_bytes(error)
        if asked is None:
            return None
        limit, _ = memory_of(self._device)
        text = f"out of memory ({self._device.device_kind}"
        text += f", {limit / GIB:,.1f} GiB)" if limit else ")"
        if asked:
            text += f": {asked / GIB:,.1f} GiB were requested"
        # Assumed memory of the activations: the largest of three values. They are the size of the
        # failed allocation, the memory that parameters, optimizer state, gradients and batch leave
        # free, and the estimated minimum.
        taken = max(asked, (limit or 0) - self._needs.certain, self._needs.activations)
        return f"{text}; {self._remedy(taken / max(1, self._needs.activations), limit or taken)}"

    def _remedy(self, taken: float, limit: float) -> str:
        """Returns a phrase that suggests config changes with which the step should fit.

        Args:
          taken: memory of activations in the compiled step, divided by their minimum memory.
          limit: memory of a device in bytes.
        """

        def total(needs: Needs) -> float:
            return needs.certain + taken * needs.activations

        limit, config, needs = 0.9 * limit, self._config, self._needs
        remedies, tries = [], 6  # At most 6 changes are traced, since tracing takes seconds.
        temporaries = int(total(needs)) - needs.parameters - needs.optimizer
        sizes = needs.parameters, needs.optimizer, temporaries
        for changes in itertools.islice(
            likely_changes(config, self._mesh.size, limit, *sizes), tries
        ):
            other = with_values(config, changes)
            with contextlib.suppress(UserError):  # The batch size may not be divisible.
                if total(needs_of(self._make(other), other, self._max_labels)) <= limit:
                    remedies.append(in_words(changes))
                    break
        unit = batch_parts(self._mesh) * config.micro_batches
        each = (taken * needs.activations + needs.batch) / config.batch_size
        images = (limit - needs.parameters - needs.optimizer - needs.gradients) / each
        if unit <= images and unit < config.batch_size:
            remedies.append(f"--config.batch_size={unit * 2 ** int(math.log2(images / unit))}")
        if not remedies:
            return "use more devices with --config.mesh.fsdp, or a smaller model"
        return f"this should fit: {' or '.join(remedies)}"


def likely_changes(
    config: RunOptions,
    devices: int,
    limit: float,
    parameters: int,
    optimizer: int,
    temporaries: int,
) -> Iterator[Changes]:
    """Yields config changes with which a step should fit. Changes with fast steps come first.

    `limit` is a device's memory, and the other sizes are those of the unchanged config, in bytes.
    Temporaries are activations and gradients.
    """
    mesh, state = config.mesh, parameters + optimizer
    fsdps = {
        size for size in (8, devices) if devices % (size * mesh.tensor) == 0 and size > mesh.fsdp
    }
    remats = [name for name in LEFT if LEFT[name] <= LEFT[config.model.remat]]
    micros = _micro_batches(config, devices)
    for micro, remat, fsdp in itertools.product(micros, remats, (mesh.fsdp, *sorted(fsdps))):
        left = temporaries * LEFT[remat] / LEFT[config.model.remat] / micro
        extra = parameters if micro > 1 else 0
        if left + extra + state * mesh.fsdp / fsdp > limit:
            continue
        if changes := _changes(config, micro, remat, fsdp):
            yield changes


def _micro_batches(config: RunOptions, devices: int) -> list[int]:
    """Returns factors by which the number of micro-batches can be multiplied."""
    # The contrastive loss compares all pairs of the batch, so the batch cannot be split.
    if config.objective.name == "contrastive":
        return [1]
    divisor = devices // config.mesh.tensor * config.micro_batches
    return [micro for micro in (1, 2, 4, 8, 16) if config.batch_size % (divisor * micro) == 0]


def _changes(config: RunOptions, micro: int, remat: str, fsdp: int) -> Changes:
    """Returns the config changes that multiply micro-batches, and set remat policy and FSDP."""
    changes: Changes = {}
    if micro > 1:
        changes["micro_batches"] = config.micro_batches * micro
        changes |= groups_within(config, changes["micro_batches"])
    if remat != config.model.remat:
        changes["model.remat"] = remat
    if fsdp != config.mesh.fsdp:
        changes |= {"mesh.data": None, "mesh.fsdp": fsdp}
    return changes


def groups_within(config: RunOptions, micro_batches: int) -> Changes:
    """Returns the change of `dino.koleo_group` that this number of micro-batches requires.

    A micro-batch must consist of whole KoLeo groups. Empty: no change is necessary.
    """
    dino, size = config.dino, config.batch_size // micro_batches
    if (
        config.objective.name != "dino"
        or not dino.koleo
        or (dino.koleo_group and size % dino.koleo_group == 0)
    ):
        return {}
    return {"dino.koleo_group": size} if size > 1 else {}


def in_words(changes: Changes) -> str:
    """Returns config changes as flags, such as `--config.micro_batches=2`."""
    return " ".join(
        f"--config.{key}={value}" for key, value in changes.items() if value is not None
    )


def held(tree) -> int:
    """Returns the bytes that sharded arrays take on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def most_alive(jaxpr: core.Jaxpr) -> int:
    """Returns the peak memory of a program's intermediate results in bytes, without its arguments.

    Only results of matrix products, reductions and loops are counted. All other operations are
    assumed to be fused: their results take no memory, but their inputs stay in memory as long as
    their results are used.
    """
    # Size of each result in memory, and the first and last operation in which it is live.
    sizes: list[int] = []
    born: list[int] = []
    last: list[int] = []
    extra: dict[int, int] = {}  # Bytes that an operation needs internally.
    clock = 0

    def run(jaxpr: core.Jaxpr, arguments: list[frozenset]) -> list[frozenset]:
        nonlocal clock
        made_of = dict(zip(jaxpr.invars, arguments, strict=True))

        def of(atom) -> frozenset:
            return frozenset() if isinstance(atom, core.Literal) else made_of.get(atom, frozenset())

        for equation in jaxpr.eqns:
            clock += 1
            used = [of(x) for x in equation.invars]
            everything = frozenset().union(*used)
            for index in everything:
                last[index] = clock
            name, inner = equation.primitive.name, list(core.jaxprs_in_params(equation.params))
            if inner and name not in ("scan", "while", "cond"):
                results = run(inner[0], used[-len(inner[0].invars) :])
            elif inner or name in PRODUCTS or name.startswith("reduce_"):
                extra[clock] = max((most_alive(x) for x in inner), default=0)
                results = []
                for x in equation.outvars:
                    results.append(frozenset([len(sizes)]))
                    sizes.append(bytes_of([x.aval]))
                    born.append(clock)
                    last.append(clock)
            else:
                results = [everything] * len(equation.outvars)
            made_of.update(zip(equation.outvars, results, strict=False))
        return [of(x) for x in jaxpr.outvars]

    for index in frozenset().union(*run(jaxpr, [frozenset()] * len(jaxpr.invars))):
        last[index] = max(last[index], born[index])
    changes = [0] * (clock + 2)
    for size, start, end in zip(sizes, born, last, strict=True):
        changes[start] += size
        changes[end + 1] -= size
    alive = most = 0
    for at, change in enumerate(changes):
        alive += change
        most = max(most, alive + extra.get(at, 0))
    return most


def program_memory(compiled: jax.stages.Compiled) -> int:
    """Returns the memory of a compiled program on a device in bytes.

    It includes arguments, temporary arrays, and results that do not reuse an argument's memory.
    """
    sizes = compiled.memory_analysis()
    new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + new


def bytes_of(arrays: list) -> int:
    """Returns the total bytes of arrays, or of shapes with dtypes, without regard to sharding."""
    return sum(
        math.prod(x.shape) * x.dtype.itemsize for x in arrays if hasattr(x.dtype, "itemsize")
    )
