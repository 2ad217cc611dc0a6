"""Compares our training steps with those of other projects, by the TPU compiler's estimates."""

from collections import Counter
from collections.abc import Sequence

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.figures import Table
from vit_jax.errors import UserError
from vit_jax.models import model_card
from vit_jax.models.attention import SCORES, VALUES
from vit_jax.models.model_card import training_flops
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
from vit_jax.planning.hlo import by, total

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


def measure(
    models: Sequence[str],
    slices: Sequence[str],
    images: int,
    image_size: int,
    against: Sequence[str],
    checkouts: str | None,
) -> dict:
    """Prints and returns two tables of training steps.

    The first table contains each step's estimated cycles, memory and sent bytes. The second table
    contains the cycles of each component of our steps, such as the MLP.

    Args:
      models: names of models.
      slices: chip and topology, such as `v3:2x2`.
      images: images per device.
      image_size: image size in pixels.
      against: projects to compare with.
      checkouts: folder with the projects' checkouts.
    """
    columns = {"M cycles a step (estimated)": ".1f", "MFU": ".1%", "temporaries, GiB": ".2f"}
    columns |= {"FLOPs to least": ".1%", "sent, MB": ".0f"}
    columns |= {"ours to it: cycles": ".3f", "ours to it: temporaries": ".3f"}
    table, parts = Table("program, slice", columns), []
    for model in models:
        for name in slices:
            chip, _, topology = name.partition(":")
            where = find_slice(chip, topology)
            batch_size = images * where.devices
            config = other_projects.our_config(model, image_size, "bfloat16", batch_size)
            ours = compile_step(config, where, other_projects.CLASSES, STEPS)
            card = model_card(model, image_size=image_size)
            least = training_flops(config.batch_size * card.multiply_adds)
            row(table, f"{model} {image_size}, {images} images", ours, where, least)
            parts.append(
                (f"{model}, {where}", ours, least / where.devices / flops_in_a_cycle(where))
            )
            for peer in against:
                try:
                    checkout = other_projects.find_checkout(peer, checkouts)
                except UserError as error:
                    table.skip(peer, error)
                    continue
                for option, values in other_projects.PEERS[peer].options.items():
                    mesh = make_mesh(config.mesh, topology_devices(where))
                    step = other_projects.make_step(
                        peer,
                        checkout,
                        model,
                        values,
                        "bfloat16",
                        image_size,
                        config.batch_size,
                        mesh,
                    )
                    lowered = step.run.lower(step.state, step.images, step.labels)
                    compiled = compile_lowered(
                        lowered, where, step.state["params"], step.state["optimizer"]
                    )
                    row(table, f"{peer}, {option}", compiled, where, least, ours)
    show_parts(table, parts)
    return table.figures


def row(
    table: Table,
    name: str,
    compiled: Compiled,
    where: Slice,
    least: float,
    ours: Compiled | None = None,
) -> None:
    """Adds a row to the table.

    Args:
      table: the table.
      name: title of the program.
      compiled: the program.
      where: the TPU slice.
      least: FLOPs of a step on all devices without rematerialization, from which the MFU is
        computed.
      ours: our program. The row compares `compiled` with it. None: `compiled` is our program.
    """
    memory = compiled.memory.temporaries / GIB
    values, ratios = ("does not fit", None, memory, None, None), (None, None)
    if compiled.fits:
        cycles = total(compiled.operations, "cycles")
        mfu = least / where.devices / flops_in_a_cycle(where) / cycles
        flops = total(compiled.operations, "flops") * where.devices / least
        values = cycles / 1e6, mfu, memory, flops, total(compiled.operations, "sent") / 1e6
    if ours and ours.fits:
        faster = total(ours.operations, "cycles") / cycles if compiled.fits else None
        ratios = faster, ours.memory.temporaries / compiled.memory.temporaries
    table.row(f"{name}, {where}", *values, *ratios)


def show_parts(table: Table, programs: list[tuple[str, Compiled, float]]) -> None:
    """Prints a table with the millions of cycles that each part of our programs takes.

    Args:
      table: the table of programs, whose figures also contain the results.
      programs: title, program and number of cycles at the peak of our programs.
    """
    sums = [
        Counter({"all products at the peak": round(least)})
        + sum(
            (
                Counter({PARTS.get(part, "other"): cycles})
                for part, cycles in by(compiled.operations, "part", "cycles").items()
            ),
            Counter(),
        )
        for _, compiled, least in programs
    ]
    print()
    columns = {f"M cycles of {name}": ".2f" for name, *_ in programs}
    table = Table("part", columns, table.figures)
    for part in dict.fromkeys(["all products at the peak", *PARTS.values(), "other"]):
        table.row(part, *(count[part] / 1e6 for count in sums))


def flops_in_a_cycle(where: Slice) -> float:
    """Returns how many FLOPs the matrix units of a device compute in a cycle."""
    return where.chip.peak_flops / where.chip.clock
