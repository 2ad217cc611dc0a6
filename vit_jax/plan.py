"""Plans a run: python -m vit_jax.plan --config=configs/vit_h14_jft.py --chip=v5e --topology=16x16.

It compiles the training step for a TPU slice on this machine's CPU (pip install -e ".[plan]") and
prints memory, estimated time and cost. No such compiler exists for GPUs and CPUs. For these,
--chip=h100 --devices=8 prints a roofline estimate. --chip is v2, v3, v4, v5e, v5p or v6e; a100 (80
GB), h100, h200, l4, l40s, a10g, rtx3090, rtx4090 or rtx5090; or cpu, whose speed is measured.
"""

import json
import os
import sys
from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.config import check, given_keys
from vit_jax.errors import UserError

CONFIG = command.define_config("The job: a file such as configs/vit_h14_jft.py.")
CHIP = flags.DEFINE_string(
    "chip", None, "As v5e (a TPU), h100 or rtx4090 (a GPU); cpu: this machine."
)
TOPOLOGY = flags.DEFINE_string("topology", None, "The shape of a TPU slice, in chips: 16x16.")
DEVICES = flags.DEFINE_integer("devices", None, "How many GPUs; without: one.", lower_bound=1)
IMAGES = flags.DEFINE_integer(
    "images", None, "Training images, where the data set is not the paper's.", 1
)
JSON = flags.DEFINE_string("json", None, "A file to write the plan to.")
PRICES = flags.DEFINE_string("prices", None, "Prices in place of vit_jax/planning/prices.toml.")
SWEEP = flags.DEFINE_boolean("sweep", False, "Try meshes and rematerialization, and rank them.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if CONFIG.value is None or CHIP.value is None:
        raise UserError("give --config=configs/vit_h14_jft.py, --chip=v5e and --topology=16x16")
    os.environ["JAX_PLATFORMS"] = "cpu"  # Otherwise libtpu would search for a TPU.
    if "data.path" in given_keys(CONFIG.value):
        from vit_jax.runs.choices.recognised import recognise

        recognise(CONFIG.value, given_keys(CONFIG.value), _log)
    config = check(CONFIG.value, file=command.as_in_file(CONFIG.value))

    from vit_jax.parallel.chips import find_chip
    from vit_jax.planning import cost, roofline
    from vit_jax.planning.compile import find_slice
    from vit_jax.planning.estimate import estimate, make_workload

    is_tpu = CHIP.value != "cpu" and bool(find_chip(CHIP.value).topologies)
    _check_size(is_tpu)
    if is_tpu:
        where, planner = find_slice(CHIP.value, TOPOLOGY.value), estimate
    else:
        where, planner = roofline.find_machine(CHIP.value, DEVICES.value), roofline.estimate_best
    prices = cost.read_prices(Path(PRICES.value) if PRICES.value else cost.PRICES)
    job = make_workload(config, IMAGES.value)
    if SWEEP.value:
        plans = print_sweep(config, job, where, prices, planner, counts_traffic=is_tpu)
    else:
        if is_tpu:
            _log(f"compiling for {where}")
        plans = print_plan(config, job, where, prices, planner)
    if JSON.value:
        _write(Path(JSON.value), [plan.as_dict() for plan in plans])


def _check_size(is_tpu: bool) -> None:
    """Raises UserError if the number of devices is given by the flag of other kinds of chips."""
    wrong, right = (DEVICES, "--topology=16x16") if is_tpu else (TOPOLOGY, "--devices=8")
    if wrong.value is not None:
        raise UserError(
            f"--{wrong.name}={wrong.value} does not apply to --chip={CHIP.value}: give the number "
            f"of devices by a flag such as {right}"
        )


def print_sweep(config, job, where, prices, planner, counts_traffic: bool) -> list:
    """Prints a ranking of meshes and remat policies, with or without traffic; returns estimates."""
    from vit_jax.planning import choices

    plans = choices.sweep(config, job, where, prices, _log, planner)
    print(choices.ranking(plans))
    if not counts_traffic and where.devices > 1:
        print(
            "\nTraffic between devices is not counted: of near times take the least fsdp, tensor."
        )
    return plans


def print_plan(config, job, where, prices, planner) -> list:
    """Prints the estimate of the config's run; returns the printed estimates.

    If the run does not fit into memory, also prints a small change of the config with which it
    fits.
    """
    from vit_jax.planning import choices
    from vit_jax.planning.estimate import table

    plan = planner(config, job, where, prices)
    print(table(plan))
    if plan.fits:
        return [plan]
    fitting = choices.nearest_fit(config, job, where, prices, plan, _log, planner)
    if fitting is None:
        print("\nNo change of remat, fsdp or micro-batches that was tried fits; use more chips.")
        return [plan]
    changes, nearest = fitting
    print(f"\nThis fits: {choices.in_words(changes)}\n\n{table(nearest)}")
    return [plan, nearest]


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(path: Path, plans: list[dict]) -> None:
    try:
        path.write_text(json.dumps(plans, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write --json={path}: {error.strerror}") from error


if __name__ == "__main__":
    command.run(main)
