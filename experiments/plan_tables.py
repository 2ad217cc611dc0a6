"""The tables of docs/planning.md: python -m vit_jax.experiment plan_tables --out=DIR.

1. Three runs of the paper on TPU v3: estimated core-days, compared with those in table 2.
2. B/16, L/16 and H/14 on JFT-300M with a batch size of 4,096, on slices of TPU v3, v4, v5e and v6e.
   If a run does not fit, it is planned with the nearest change with which it fits, such as `remat`.

Each compilation takes minutes on two cores. Results are cached in the user's cache folder, so the
same command continues after an interruption. Needs pip install -e ".[plan]".
"""

import jax

from vit_jax.command import read_config
from vit_jax.config import run_options, with_values
from vit_jax.ledger.prices import first_that_fits
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table
from vit_jax.parallel.chips import GIB
from vit_jax.planning import cost
from vit_jax.planning.compile import find_slice
from vit_jax.published import table as published_table
from vit_jax.shipped import CONFIGS

# Runs of the first table: config, epochs, and column of the paper's table 2.
HEADLINES = (
    ("vit_h14_jft", 14, dict(model="ViT-H/14", pretraining="JFT-300M")),
    ("vit_l16_jft", 14, dict(model="ViT-L/16", pretraining="JFT-300M")),
    ("vit_l16_i21k", 90, dict(model="ViT-L/16", pretraining="ImageNet-21k")),
)
SLICES = (("v3", "16x16"), ("v4", "4x4x8"), ("v5e", "16x16"), ("v6e", "8x8"))
MODELS = ("vit_b16_jft", "vit_l16_jft", "vit_h14_jft")


HEADLINE_CELLS = (
    "config",
    "epochs",
    "core-days, published",
    "estimated",
    "ratio",
    "step, ms",
    "MFU",
)
SLICE_CELLS = ("config", "slice", "GiB a device", "step, ms", "MFU", "hours", "price")


def read(study) -> dict:
    """Returns the cells of both tables."""
    jax.config.update("jax_platforms", "cpu")  # Without this the library would search for a TPU.
    prices = cost.read_prices(cost.PRICES)
    return {
        "headlines": [headline(prices, *run) for run in HEADLINES],
        "slices": [
            on_slice(prices, name, find_slice(*where)) for name in MODELS for where in SLICES
        ],
    }


def headline(prices, name: str, epochs: int, column: dict) -> list[str]:
    """Returns a row of the first table: a run of the paper on 256 chips of TPU v3."""
    config = with_values(load_config(name), {"epochs": float(epochs)})
    changes, plan = first_that_fits(config, find_slice("v3", "16x16"), prices)
    days, printed = (
        plan.cost.core_days,
        published_table("table2").figure("TPUv3-core-days", **column),
    )
    row = [name + changes, f"{epochs}", f"{printed:,}", f"{days:,.0f}", f"{days / printed:.2f}"]
    return [*row, f"{plan.step_seconds * 1e3:,.1f}", f"{plan.mfu:.1%}"]


def on_slice(prices, name: str, where) -> list[str]:
    """Returns a row of the second table: a run on a slice, changed if it would not fit."""
    changes, plan = first_that_fits(load_config(name), where, prices)
    memory = f"{plan.memory.total / GIB:.1f} of {where.chip.memory_bytes / GIB:.1f}"
    if not plan.fits:
        return [name, str(where), memory, "does not fit", "", "", ""]
    speed = f"{plan.step_seconds * 1e3:,.1f}", f"{plan.mfu:.1%}", f"{plan.cost.hours:,.1f}"
    return [name + changes, str(where), memory, *speed, f"${plan.cost.dollars:,.0f}"]


def load_config(name: str):
    """Returns the config of a file in configs/, as typed options."""
    return run_options(read_config(str(CONFIGS / f"{name}.py")))


def table(figures: dict) -> str:
    """Returns both tables."""
    headlines = markdown_table(HEADLINE_CELLS, figures["headlines"])
    return f"{headlines}\n\n{markdown_table(SLICE_CELLS, figures['slices'])}"


EXPERIMENT = Experiment(
    claim="The paper's pre-training runs take the core-days that table 2 prints.",
    read=read,
    table=table,
    needs='pip install -e ".[plan]"',
    minutes=60,
)
