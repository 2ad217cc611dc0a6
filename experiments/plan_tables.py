"""The tables of docs/planning.md: python experiments/plan_tables.py

1. The paper's three headline runs on TPU v3: estimated core-days beside the published (table 2).
2. B/16, L/16 and H/14 on JFT-300M at batch 4,096 on slices of TPU v3, v4, v5e and v6e. What does not fit is
   shown with the nearest change that does.

Each compilation takes minutes on two cores, and is kept in the user's cache folder, so that the command goes
on where it was stopped. Needs pip install -e ".[plan]".
"""

import importlib.util
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from vit_jax.parallel.chips import GIB
from vit_jax.planning import choices, cost
from vit_jax.planning.compile import find_slice
from vit_jax.planning.estimate import estimate, make_workload

CONFIGS = Path(__file__).parents[1] / "configs"
# (config, epochs, published TPUv3-core-days)
HEADLINES = (("vit_h14_jft", 14, 2500), ("vit_l16_jft", 14, 680), ("vit_l16_i21k", 90, 230))
SLICES = (("v3", "16x16"), ("v4", "4x4x8"), ("v5e", "16x16"), ("v6e", "8x8"))
MODELS = ("vit_b16_jft", "vit_l16_jft", "vit_h14_jft")


def main() -> None:
    prices = cost.read_prices(cost.PRICES)
    show("config", "epochs", "core-days, published", "estimated", "ratio", "step, ms", "MFU")
    show(*["---"] * 7)
    for name, epochs, published in HEADLINES:
        config = load_config(name)
        config.epochs = float(epochs)
        changes, plan = first_that_fits(config, find_slice("v3", "16x16"), prices)
        days = plan.cost.core_days
        row = name + changes, epochs, f"{published:,}", f"{days:,.0f}", f"{days / published:.2f}"
        show(*row, f"{plan.step_seconds * 1e3:,.1f}", f"{plan.mfu:.1%}")

    print()
    show("config", "slice", "GiB a device", "step, ms", "MFU", "hours", "price")
    show(*["---"] * 7)
    for name in MODELS:
        for slice_name in SLICES:
            where = find_slice(*slice_name)
            changes, plan = first_that_fits(load_config(name), where, prices)
            memory = f"{plan.memory.total / GIB:.1f} of {where.chip.memory_bytes / GIB:.1f}"
            if plan.fits:
                speed = f"{plan.step_seconds * 1e3:,.1f}", f"{plan.mfu:.1%}", f"{plan.cost.hours:,.1f}"
                show(name + changes, where, memory, *speed, f"${plan.cost.dollars:,.0f}")
            else:
                show(name, where, memory, "does not fit", "", "", "")


def first_that_fits(config, where, prices):
    """The plan, or that of the nearest change that fits, and the change in words."""
    job = make_workload(config, None)
    plan = estimate(config, job, where, prices)
    if not plan.fits:
        print(
            f"{config.model.name} on {where}: {plan.memory.total / GIB:.1f} GiB do not fit", file=sys.stderr
        )
        found = choices.nearest_fit(
            config, job, where, prices, plan, lambda line: print(line, file=sys.stderr)
        )
        if found:
            return f" {choices.in_words(found[0])}", found[1]
    return "", plan


def load_config(name: str):
    """The config of a file in configs/."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def show(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
