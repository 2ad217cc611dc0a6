"""Growth of the cost of a step: python -m vit_jax.experiment plan_growth --out=DIR.

It compiles the training step of ViT-B/16 on JFT-300M for slices of TPU v4, and draws
docs/images/plan_growth.png: compile time, memory per device and estimated time of a step, over the
depth, the number of devices and the number of images per device. With `scan` only one layer is
compiled for any depth, but the step needs more memory. With a fixed number of images per device,
more devices only add the time of collectives; it is drawn as if they did not overlap with
computation. The dashed line is the memory of a device. A step that needs more has no time.

Every compilation is cached in the user's cache folder: the same command continues after an
interruption. The results are in docs/images/plan_growth.json. Needs pip install -e ".[plan]".
"""

import sys

import jax

from vit_jax.command import read_config
from vit_jax.config import run_options, with_values
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, written
from vit_jax.parallel.chips import GIB
from vit_jax.planning import cost
from vit_jax.planning.compile import find_slice
from vit_jax.planning.estimate import estimate, make_workload
from vit_jax.shipped import CONFIGS

CUBES = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8", 4096: "16x16x16"}
# For each axis and each line: points (x, devices, images per device, overrides of the config).
LINES = {
    "depth": {
        "scan": [(depth, 8, 16, dict(depth=depth, scan=True)) for depth in (12, 24, 48, 96)],
        "unrolled": [(depth, 8, 16, dict(depth=depth, scan=False)) for depth in (12, 24)],
    },
    "devices": {
        "32 images a device": [(devices, devices, 32, dict(scan=True)) for devices in CUBES],
    },
    "images a device": {
        "scan": [(images, 8, images, dict(scan=True)) for images in (8, 16, 32, 64)],
        "scan, remat full": [
            (images, 8, images, dict(scan=True, remat="full")) for images in (8, 32, 128)
        ],
    },
}
PANELS = ("compile time, processor seconds", "memory of a device, GiB", "step, ms (estimated)")


def read(study) -> dict:
    """Returns the measurements for the plot: the points of each line, by axis."""
    jax.config.update("jax_platforms", "cpu")  # Without this the library would search for a TPU.
    return {
        axis: {name: [measure(*point) for point in points] for name, points in lines.items()}
        for axis, lines in LINES.items()
    }


def draw(study, figures: dict) -> dict:
    """Draws a panel for each measured value over each axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    for row, panel in zip(figure.subplots(3, 3), PANELS, strict=True):
        for plot, (axis, lines) in zip(row, figures.items(), strict=True):
            for name, points in lines.items():
                points = [point for point in points if point[panel] is not None]
                xs, ys = [point["x"] for point in points], [point[panel] for point in points]
                plot.plot(xs, ys, "o-", label=name)
            if panel == PANELS[1]:
                plot.axhline(
                    find_slice("v4", CUBES[8]).chip.memory_bytes / GIB, color="gray", ls="--", lw=1
                )
            everywhere = sorted({point["x"] for points in lines.values() for point in points})
            plot.set_xscale("log", base=2)
            plot.set_xticks(everywhere, [f"{x:,}" for x in everywhere])
            plot.set_ylim(0, 1.1 * plot.get_ylim()[1])
            plot.set_xlabel(axis)
            plot.set_ylabel(panel)
            plot.legend(fontsize=7)
            plot.grid(alpha=0.3)
    return {"results": figure}


def table(figures: dict) -> str:
    """Returns a table with a line for each compilation."""
    rows = [
        (axis, name, point["x"], *(written(point[panel]) for panel in PANELS))
        for axis, lines in figures.items()
        for name, points in lines.items()
        for point in points
    ]
    return markdown_table(("axis", "line", "x", *PANELS), rows)


def measure(x: int, devices: int, images: int, changes: dict) -> dict:
    """Compiles a step and returns the point's measurements."""
    where = find_slice("v4", CUBES[devices])
    changes = {name if "." in name else f"model.{name}": value for name, value in changes.items()}
    config = run_options(read_config(str(CONFIGS / "vit_b16_jft.py")))
    config = with_values(config, changes | {"batch_size": images * devices})
    plan = estimate(config, make_workload(config, None), where, cost.read_prices(cost.PRICES))
    point = {
        "x": x,
        PANELS[0]: plan.compile_seconds if plan.fits else None,
        PANELS[1]: plan.memory.total / GIB,
        PANELS[2]: (plan.step_seconds + plan.link_seconds) * 1e3 if plan.fits else None,
    }
    words = ", ".join(f"{name} {value:,.1f}" for name, value in point.items() if value is not None)
    print(f"{where}, {images} images a device, {changes}: {words}", file=sys.stderr, flush=True)
    return point


EXPERIMENT = Experiment(
    claim=(
        "With scanned layers compile time does not grow with depth, nor a step's memory with "
        "devices."
    ),
    read=read,
    table=table,
    draw=draw,
    needs='pip install -e ".[plan]"',
    minutes=24,
)
