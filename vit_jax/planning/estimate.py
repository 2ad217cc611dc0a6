"""Estimate of a config's run on some devices: memory, time and cost, as values and as a table."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from vit_jax.config import value_at
from vit_jax.errors import UserError
from vit_jax.models import abstract, count_parameters, model_factory
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB
from vit_jax.planning.compile import Compiled, Memory, Slice, compile_step
from vit_jax.planning.cost import Cost, Workload, cost, data_set_size
from vit_jax.planning.hlo import UNKNOWN_LOOP, by, total
from vit_jax.runs.assemble import step_count
from vit_jax.runs.frozen_model import frozen_shapes
from vit_jax.training.objectives import abstract_objective
from vit_jax.training.program import model_arguments, shapes_of_batch


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run. Memory, collectives and operations are for one device."""

    model: str
    where: Slice
    choices: dict[str, Any]  # Config values that the sweep and `nearest_fit` change, by key.
    job: Workload
    method: str  # Description of the method: the TPU compiler or a roofline.
    memory: Memory
    fits: bool
    compile_seconds: float = 0.0
    step_seconds: float | None = None  # None if the step does not fit into memory.
    slowest_seconds: float | None = None  # Only for a roofline: step time without any fusion.
    unknown_loops: int = 0  # Loops whose number of iterations depends on the data.
    flops: float | None = None  # FLOPs of a compiled step, on all devices.
    collectives: dict[str, int] | None = None  # Bytes per step by the kind of collective.
    link_seconds: float | None = None  # Time of collectives without overlap with computation.
    parts: dict[str, float] | None = None  # Seconds per step by class or scope of the program.
    costliest: list[dict] | None = None
    cost: Cost | None = None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (MFU): FLOP/s of the model, divided by the devices' peak FLOP/s.

        The FLOPs of the model are a lower bound (`Workload.flops`). None: the step time is unknown.
        """
        if self.step_seconds is None:
            return None
        return self.job.flops / self.step_seconds / self.where.devices / self.where.chip.peak_flops

    def as_dict(self) -> dict:
        """Returns all values, for JSON."""
        more = dict(
            mfu=self.mfu,
            least_flops=self.job.flops,
            exaflops=self.job.exaflops,
            limit_bytes=self.where.chip.memory_bytes,
            total_bytes=self.memory.total,
        )
        return asdict(self) | more


CHOICES = (
    *("batch_size", "micro_batches"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "model.scan"),
)


def make_workload(config: RunOptions, images: int | None) -> Workload:
    """Returns the amount of work of a config's run. No memory is allocated for the model.

    Raises:
      UserError: the config names no model.
    """
    if not config.model.name:
        raise UserError(
            f"config.model.name is empty: the model is that of {config.finetune.checkpoint}, which "
            "is not opened; name it, as by --config.model.name=ViT-B/16 "
            "--config.finetune.checkpoint=None"
        )
    images, num_classes = data_set_size(config, images)
    model = abstract(model_factory(num_classes=num_classes, **model_arguments(config)))
    objective = abstract_objective(config, model, frozen=frozen_shapes(config))
    return Workload(
        images=images,
        num_classes=num_classes,
        steps=step_count(config, images),
        batch_size=config.batch_size,
        parameters=count_parameters(model),
        multiply_adds=objective.multiply_adds(model, shapes_of_batch(config, 1)),
    )


def choices(config: RunOptions) -> dict[str, Any]:
    """Returns the config values that a search for a faster or smaller step may change.

    The keys are `CHOICES`: batch size, micro-batches, mesh, rematerialization and scan.
    """
    return {key: value_at(config, key) for key in CHOICES}


def estimate(config: RunOptions, job: Workload, where: Slice, prices: dict[str, dict]) -> Estimate:
    """Estimates a run on a slice of TPUs with the TPU compiler.

    Raises:
      UserError: the config is incompatible with the devices, or the compiler is not installed.
    """
    compiled = compile_step(config, where, job.num_classes, job.steps)
    return Estimate(
        model=config.model.name,
        where=where,
        choices=choices(config),
        job=job,
        method="the TPU compiler's own estimate",
        memory=compiled.memory,
        fits=compiled.fits,
        compile_seconds=compiled.seconds,
        **(_speed(compiled, job, where, prices) if compiled.fits else {}),
    )


def _speed(compiled: Compiled, job: Workload, where: Slice, prices: dict[str, dict]) -> dict:
    chip, operations = where.chip, compiled.operations
    seconds = total(operations, "cycles") / chip.clock
    sent = by(operations, "kind", "sent")
    # A ring all-reduce sends its data twice: to sum them and to distribute the sum. Other
    # collectives send them once.
    moved = sum(size * (2 if kind == "all-reduce" else 1) for kind, size in sent.items())
    # Layers that are compiled separately have the same operations. Operations with the same name in
    # JAX are therefore added up.
    runs, cycles = Counter(), Counter()
    for operation in operations:
        key = operation.part, operation.source
        runs[key] += operation.times
        cycles[key] += operation.times * operation.cycles
    costliest = [(key, count / chip.clock) for key, count in cycles.most_common(10)]
    return dict(
        step_seconds=seconds,
        flops=total(operations, "flops") * where.devices,
        unknown_loops=sum(operation.kind == UNKNOWN_LOOP for operation in operations),
        collectives=sent,
        link_seconds=moved / chip.link_bandwidth,
        parts={part: x / chip.clock for part, x in by(operations, "part", "cycles").items()},
        costliest=[
            dict(seconds=x, share=x / seconds, part=part, runs=runs[part, source], source=source)
            for (part, source), x in costliest
        ],
        cost=cost(job, where, seconds, prices),
    )


def table(plan: Estimate) -> str:
    """Returns the estimate as a text table."""
    job, where = plan.job, plan.where
    chosen = [f"{key} {value}" for key, value in plan.choices.items() if value is not None]
    lines = [
        f"{plan.model} on {where}: {plan.method}",
        f"  {', '.join(chosen)}",
        "",
        _row("parameters", _number(job.parameters)),
        _row("FLOPs a step, at least", _number(job.flops)),
    ]
    if plan.flops is not None:
        share = plan.flops / job.flops
        lines.append(_row("FLOPs a step, compiled", f"{_number(plan.flops)} ({share:.1%})"))
    lines += _memory_rows(plan)
    if plan.step_seconds is None:
        return "\n".join(lines)
    slower = plan.slowest_seconds / plan.step_seconds if plan.slowest_seconds else 1.0
    lines += [*_time_rows(plan, slower), *_run_rows(plan, slower)]
    if plan.unknown_loops:
        words = f"{plan.unknown_loops}, each counted as one iteration"
        lines.append(_row("loops of unknown length", words))
    if plan.parts:
        lines += ["", "a step by part"]
        for part, seconds in plan.parts.items():
            if seconds >= 0.005 * plan.step_seconds:
                share = seconds / plan.step_seconds
                lines.append(_row(part, f"{seconds * 1e3:,.1f} ms  {share:.1%}"))
    if plan.costliest:
        lines += ["", "the ten costliest operations"]
        for x in plan.costliest:
            time = f"{x['seconds'] * 1e3:8.2f} ms {x['share']:6.1%}"
            lines.append(f"  {time}  {x['runs']:4} x {x['part']}: {x['source']}")
    return "\n".join(lines)


def _memory_rows(plan: Estimate) -> list[str]:
    lines = ["", "memory of a device, GiB"]
    names = dict(
        parameters="parameters",
        optimizer="optimizer",
        batch="batch",
        temporaries="activations, gradients",
        code="program",
    )
    for name, words in names.items():
        if size := getattr(plan.memory, name):
            lines.append(_row(words, f"{size / GIB:,.2f}"))
    total, limit = plan.memory.total / GIB, plan.where.chip.memory_bytes / GIB
    fits = "fits" if plan.fits else "does not fit"
    return [*lines, _row("total", f"{total:,.2f} of {limit:,.2f}: {fits}")]


def _time_rows(plan: Estimate, slower: float) -> list[str]:
    """Returns the table's rows about the time of a step.

    `slower` is the upper bound of the step time divided by the lower bound; 1: there are no bounds.
    """
    rate = plan.job.batch_size / plan.step_seconds
    of_all = _range(rate, ",.0f", 1 / slower)
    of_device = _range(rate / plan.where.devices, ",.1f", 1 / slower)
    lines = [
        "",
        "time, estimated",
        _row("step", f"{_range(plan.step_seconds * 1e3, ',.1f', slower)} ms"),
        _row("images/s", f"{of_all} ({of_device} a device)"),
        _row("MFU", _range(plan.mfu, ".1%", 1 / slower)),
    ]
    if plan.collectives is not None:
        sent = [f"{kind} {size / 1e9:,.3f} GB" for kind, size in plan.collectives.items()]
        lines.append(_row("collectives", ", ".join(sent) or "none"))
        lines.append(_row("  without overlap", f"{plan.link_seconds * 1e3:,.1f} ms more"))
    return lines


def _run_rows(plan: Estimate, slower: float) -> list[str]:
    """Returns the table's rows about the whole run; `slower` as in `_time_rows`."""
    job, run = plan.job, plan.cost
    core_days, chip_days = (_range(days, ",.1f", slower) for days in (run.core_days, run.chip_days))
    price = run.price
    if run.dollars is not None:
        price = f"${_range(run.dollars, ',.0f', slower)} at {run.price}"
    return [
        "",
        "the run",
        _row("steps", f"{job.steps:,} ({job.images:,} images)"),
        _row("exaFLOPs", f"{job.exaflops:,.4g}"),
        _row("hours", _range(run.hours, ",.1f", slower)),
        _row("device-days", f"{core_days} ({chip_days} chip-days)"),
        _row("price", price),
    ]


def _range(value: float, form: str, factor: float) -> str:
    """Formats the range from `value` to `value * factor`. If the factor is 1, formats the value."""
    return format(value, form) if factor == 1 else f"{value:{form}} to {value * factor:{form}}"


def _row(name: str, value: str) -> str:
    return f"  {name:26}{value}"


def _number(value: float) -> str:
    """Formats a number with a metric prefix, such as 100.46 M."""
    power = min(5, max(0, int(math.log10(max(value, 1)) // 3)))
    return f"{value / 1000**power:,.2f} {' kMGTP'[power]}".rstrip()
