"""Compares our training steps with those of other projects, by the TPU compiler's estimates."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.figures import Table
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
    "ViT._embed": "patch embedding",
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
) -> dict:
    """Prints and returns tables of training steps.

    The first table contains each step's estimated cycles, memory and sent bytes. The second table
    contains a second estimate by schedules and memory traffic, and the last one the cycles of each
    component of our steps, such as the MLP.

    Args:
      slices: chips and topologies, such as `v5e:2x2`.
      images: images per device.
      checkouts: folder with the projects' checkouts.
      operations: number of the most expensive operations to print of each program.
    """
    columns = {"M cycles a step (estimated)": ".1f", "MFU": ".1%", "temporaries, GiB": ".2f"}
    columns |= {"FLOPs to least": ".1%", "sent, MB": ".0f"}
    columns |= {"ours to it: cycles": ".3f", "ours to it: temporaries": ".3f"}
    table, ours, programs = Table("program, slice", columns), [], []
    with dumped_schedules() as dump:
        for model in models:
            for name in slices:
                chip, _, topology = name.partition(":")
                where = find_slice(chip, topology)
                batch_size = images * where.devices
                config = other_projects.our_config(model, image_size, "bfloat16", batch_size)
                compiled = compile_step(config, where, other_projects.CLASSES, STEPS, dump)
                card = model_card(model, image_size=image_size)
                least = training_flops(config.batch_size * card.multiply_adds)
                title = f"{model} {image_size}, {images} images"
                program = Program(title, compiled, where, least)
                row(table, program)
                ours.append(program)
                peers = compile_peers(table, model, config, program, against, checkouts, dump)
                programs += [program, *peers]
    show_schedules(table, [program for program in programs if program.compiled.fits])
    for program in programs if operations else []:
        show_operations(program, operations)
    show_parts(table, ours)
    return table.figures


def compile_peers(
    table: Table,
    model: str,
    config: RunOptions,
    ours: Program,
    against: Sequence[str],
    checkouts: str | None,
    dump: Path,
) -> Iterator[Program]:
    """Compiles other projects' steps of a model, adds their rows to the table, and yields them."""
    where = ours.where
    for peer in against:
        try:
            checkout = other_projects.find_checkout(peer, checkouts)
        except UserError as error:
            table.skip(peer, error)
            continue
        for option, values in other_projects.PEERS[peer].options.items():
            mesh = make_mesh(config.mesh, topology_devices(where))
            sizes = "bfloat16", config.data.image_size, config.batch_size, mesh
            step = other_projects.make_step(peer, checkout, model, values, *sizes)
            lowered = step.run.lower(step.state, step.images, step.labels)
            params, optimizer = step.state["params"], step.state["optimizer"]
            compiled = compile_lowered(lowered, where, params, optimizer, dump=dump)
            program = Program(f"{peer}, {option}", compiled, where, ours.least)
            row(table, program, ours.compiled)
            yield program


def row(table: Table, program: Program, ours: Compiled | None = None) -> None:
    """Adds a row to the first table, which compares a program with our program, `ours`.

    `ours` None: `program` is our program.
    """
    name, compiled, where, least = program
    memory = compiled.memory.temporaries / GIB
    values, ratios = ("does not fit", None, memory, None, None), (None, None)
    if compiled.fits:
        cycles = total(compiled.operations, "cycles")
        mfu = program.peak_cycles / cycles
        flops = total(compiled.operations, "flops") * where.devices / least
        values = cycles / 1e6, mfu, memory, flops, total(compiled.operations, "sent") / 1e6
    if ours and ours.fits:
        faster = total(ours.operations, "cycles") / cycles if compiled.fits else None
        ratios = faster, ours.memory.temporaries / compiled.memory.temporaries
    table.row(f"{name}, {where}", *values, *ratios)


def show_schedules(table: Table, programs: list[Program]) -> None:
    """Prints a table with an estimate by schedules and memory traffic, in millions of cycles.

    The last two columns are for the sum over operations of the larger of schedule and traffic. The
    figures of `table` also contain the results.
    """
    print()
    columns = {"M cycles by schedules": ".1f", "by memory traffic": ".1f"}
    columns |= {"by the larger of both": ".1f", "MFU by the larger of both": ".1%"}
    table = Table("program, slice", columns, table.figures)
    for program in programs:
        operations = program.compiled.operations
        schedules = total(operations, "schedule")
        traffic = total(operations, "traffic") / bytes_in_a_cycle(program.where)
        larger = sum(map(program.larger_cycles, operations))
        millions = (cycles / 1e6 for cycles in (schedules, traffic, larger))
        table.row(f"{program.name}, {program.where}", *millions, program.peak_cycles / larger)


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


def show_parts(table: Table, programs: list[Program]) -> None:
    """Prints and adds to `table` the millions of cycles of each part of our programs."""
    sums = []
    for program in programs:
        sums.append(Counter({"all products at the peak": round(program.peak_cycles)}))
        for part, cycles in by(program.compiled.operations, "part", "cycles").items():
            sums[-1][name_of_part(part)] += cycles
    print()
    names = [f"{program.name.split()[0]}, {program.where}" for program in programs]
    columns = {f"M cycles of {name}": ".2f" for name in names}
    table = Table("part", columns, table.figures)
    for part in dict.fromkeys(["all products at the peak", *PARTS.values(), "other"]):
        table.row(part, *(count[part] / 1e6 for count in sums))


def name_of_part(part: str) -> str:
    """Returns the name of an operation's part, as in `PARTS`; parts of a class may be methods."""
    return PARTS.get(part) or PARTS.get(part.partition(".")[0], "other")


def flops_in_a_cycle(where: Slice) -> float:
    """Returns how many FLOPs the matrix units of a device compute in a cycle."""
    return where.chip.peak_flops / where.chip.clock


def bytes_in_a_cycle(where: Slice) -> float:
    """Returns how many bytes a device reads from or writes to HBM in a cycle."""
    return where.chip.memory_bandwidth / where.chip.clock
