"""Compares our training steps with those of other projects, by the TPU compiler's estimates."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.benchmarks import other_projects
from vit_jax.errors import UserError
from vit_jax.models import model_card
from vit_jax.models.attention import SCORES, VALUES
from vit_jax.models.model_card import training_flops
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB
from vit_jax.parallel.mesh import make_mesh
from vit_jax.planning.compile import (
    Compiled,
    Slice,
    compile_lowered,
    compile_step,
    find_slice,
    topology_devices,
)
from vit_jax.planning.hlo import Operation, by, total
from vit_jax.planning.schedule import dumped_schedules, larger_cycles

PEERS = tuple(other_projects.PEERS)
STEPS = 100_000  # Number of steps of the schedule; the compiled program does not depend on it.
# Maps a function of the traced training step to a row of the printed table. The row contains the
# cycles of the operations that the function adds to the program. The compiler fuses most norms with
# matmuls; the cycles of such a norm are in the row of the matmul.
PARTS = {
    "ViT.patches": "patch embedding",
    "ViT.assemble": "patch embedding",
    SCORES: "attention scores",
    VALUES: "attention values",
    "Attention": "projections",
    "Attention.project": "projections",
    "attend": "attention, between products",
    "Mlp": "MLP",
    "EncoderBlock": "norms and residuals",
    "ViT": "norms and residuals",
    "ViT.encoded": "norms and residuals",
    "ViT.pool": "head and loss",
    "ViT.classify": "head and loss",
    "loss": "head and loss",
    "optimizer": "optimizer",
}


class Program(NamedTuple):
    """A compiled training step, to print its figures."""

    name: str
    compiled: Compiled
    where: Slice
    least: float  # FLOPs of a step on all devices without rematerialization.

    def larger_cycles(self, operation: Operation) -> float:
        """Returns an operation's schedule or memory traffic in cycles, whichever is larger."""
        return larger_cycles(operation, bytes_in_a_cycle(self.where))

    @property
    def peak_cycles(self) -> float:
        """Cycles of the step's FLOPs at a device's peak. Divided by the step's cycles: MFU."""
        return self.least / self.where.devices / flops_in_a_cycle(self.where)


def measure(
    models: Sequence[str],
    slices: Sequence[str],
    images: int,
    image_size: int,
    against: Sequence[str],
    checkouts: str | None,
    operations: int = 0,
) -> None:
    """Prints tables of training steps.

    The first table contains each step's estimated cycles, memory and sent bytes. The second table
    contains a second estimate by schedules and memory traffic, and the third one the cycles of each
    component of our steps, such as the MLP.

    Args:
      models: names of models.
      slices: chip and topology, such as `v3:2x2`.
      images: images per device.
      image_size: image size in pixels.
      against: projects to compare with.
      checkouts: folder with the projects' checkouts.
      operations: number of the most expensive operations to print of each program.
    """
    print(
        "| program | slice | cycles a step (estimated) | MFU | temporaries, GiB | FLOPs to least "
        "| sent, MB | ours to it: cycles | temporaries |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    ours, others = [], []
    with dumped_schedules() as dump:
        for model in models:
            for name in slices:
                chip, _, topology = name.partition(":")
                where = find_slice(chip, topology)
                config = other_projects.our_config(
                    model, image_size, "bfloat16", images * where.devices
                )
                compiled = compile_step(config, where, other_projects.CLASSES, STEPS, dump)
                card = model_card(model, image_size=image_size)
                least = training_flops(config.batch_size * card.multiply_adds)
                title = f"{model} {image_size}, {images} images"
                ours.append(Program(title, compiled, where, least))
                row(ours[-1])
                others.append([*compile_others(model, config, ours[-1], against, checkouts, dump)])
    programs = [x for one, more in zip(ours, others, strict=True) for x in (one, *more)]
    show_schedules([program for program in programs if program.compiled.fits])
    for program in programs if operations else []:
        show_operations(program, operations)
    show_parts(ours)


def compile_others(
    model: str,
    config: RunOptions,
    ours: Program,
    against: Sequence[str],
    checkouts: str | None,
    dump: Path,
) -> Iterator[Program]:
    """Compiles other projects' steps of a model, prints their rows, and yields them."""
    where = ours.where
    for peer in against:
        try:
            checkout = other_projects.find_checkout(peer, checkouts)
        except UserError as error:
            print(f"| {peer}: skipped | {error} ||||||||")
            continue
        for option, values in other_projects.PEERS[peer].options.items():
            step = other_projects.make_step(
                peer,
                checkout,
                model,
                values,
                "bfloat16",
                config.data.image_size,
                config.batch_size,
                make_mesh(config.mesh, topology_devices(where)),
            )
            lowered = step.run.lower(step.state, step.images, step.labels)
            params, optimizer = step.state["params"], step.state["optimizer"]
            compiled = compile_lowered(lowered, where, params, optimizer, dump=dump)
            program = Program(f"{peer}, {option}", compiled, where, ours.least)
            row(program, ours.compiled)
            yield program


def row(program: Program, ours: Compiled | None = None) -> None:
    """Prints a row of the first table.

    Args:
      program: the program.
      ours: our program, with which the row compares `program`. None: `program` is our program.
    """
    name, compiled, where, least = program
    memory = compiled.memory.temporaries / GIB
    if compiled.fits:
        cycles = total(compiled.operations, "cycles")
        mfu = program.peak_cycles / cycles
        flops = total(compiled.operations, "flops") * where.devices / least
        sent = total(compiled.operations, "sent") / 1e6
        cells = f"{cycles / 1e6:.1f} M | {mfu:.1%} | {memory:.2f} | {flops:.1%} | {sent:.0f}"
    else:
        cells = f"does not fit | | {memory:.2f} | |"
    ratios = " | "
    if ours and ours.fits:
        faster = f"{total(ours.operations, 'cycles') / cycles:.3f}" if compiled.fits else ""
        ratios = f"{faster} | {ours.memory.temporaries / compiled.memory.temporaries:.3f}"
    print(f"| {name} | {where} | {cells} | {ratios} |", flush=True)


def show_schedules(programs: list[Program]) -> None:
    """Prints a table with two estimates: the compiler's, and by schedules and memory traffic.

    The last figure is the sum over operations of the larger of schedule and traffic.
    """
    print(
        "\n| program | slice | estimated_cycles | MFU "
        "| schedules | traffic | larger of both | MFU |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for program in programs:
        operations = program.compiled.operations
        estimated, schedules = (total(operations, value) for value in ("cycles", "schedule"))
        traffic = total(operations, "traffic") / bytes_in_a_cycle(program.where)
        larger = sum(map(program.larger_cycles, operations))
        cells = [program.name, program.where]
        cells += [f"{estimated / 1e6:.1f} M", f"{program.peak_cycles / estimated:.1%}"]
        cells += [f"{cycles / 1e6:.1f} M" for cycles in (schedules, traffic, larger)]
        cells += [f"{program.peak_cycles / larger:.1%}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def show_operations(program: Program, count: int) -> None:
    """Prints a program's operations that are the most expensive by `larger_cycles`."""
    print(f"\n| M cycles (estimated_cycles) | operation of {program.name}, {program.where} |")
    print("|---|---|")
    descending = sorted(program.compiled.operations, key=program.larger_cycles, reverse=True)
    for operation in descending[:count]:
        estimated = operation.times * operation.cycles
        source = operation.source or operation.name
        larger = program.larger_cycles(operation)
        print(f"| {larger / 1e6:.2f} ({estimated / 1e6:.2f}) | {source} |")


def show_parts(programs: list[Program]) -> None:
    """Prints a table with the millions of cycles that each part of our programs takes."""
    sums = [
        Counter({"all products at the peak": round(program.peak_cycles)})
        + sum(
            (
                Counter({PARTS.get(part, "other"): cycles})
                for part, cycles in by(program.compiled.operations, "part", "cycles").items()
            ),
            Counter(),
        )
        for program in programs
    ]
    names = [f"{program.name.split()[0]}, {program.where}" for program in programs]
    print("\n| M cycles | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(programs))
    for part in dict.fromkeys(["all products at the peak", *PARTS.values(), "other"]):
        print(f"| {part} | " + " | ".join(f"{count[part] / 1e6:.2f}" for count in sums) + " |")


def flops_in_a_cycle(where: Slice) -> float:
    """Returns how many FLOPs the matrix units of a device compute in a cycle."""
    return where.chip.peak_flops / where.chip.clock


def bytes_in_a_cycle(where: Slice) -> float:
    """Returns how many bytes a device reads from or writes to HBM in a cycle."""
    return where.chip.memory_bandwidth / where.chip.clock
