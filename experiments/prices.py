"""The price of each experiment at the paper's scale: vit-jax experiment prices --out=DIR.

It estimates the device-days of each experiment's pre-training runs on 256 chips of TPU v3 and v5e,
from the TPU compiler's estimate of a step. A device is a core of v3, or a chip of v5e. Fine-tuning
is not included. One step is compiled for each model name: variants with another width, depth or
position embedding are assumed to have the same MFU. If a run does not fit, it is planned with the
nearest change with which it fits. Each compilation takes minutes. `vit-jax experiment --list` shows
the prices from the record.
"""

import jax

from vit_jax import published
from vit_jax.experiment import load, names
from vit_jax.ledger.prices import SLICES, device_days, known_mfus, pretraining_jobs
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, written

# Columns of table 2, which lists core-days of TPU v3, by the name of the run's config.
PRINTED = {
    "vit_h14_jft": dict(model="ViT-H/14", pretraining="JFT-300M"),
    "vit_l16_jft": dict(model="ViT-L/16", pretraining="JFT-300M"),
    "vit_l16_i21k": dict(model="ViT-L/16", pretraining="ImageNet-21k"),
    "bit_r152x4_jft": dict(model="BiT-R152x4", pretraining="JFT-300M"),
}


def read(study) -> dict:
    """Returns device-days, numbers of runs, published core-days and MFUs.

    Core-days are published for experiments whose runs are all listed in table 2.
    """
    jax.config.update("jax_platforms", "cpu")  # Without this the library would search for a TPU.
    days, printed, runs = {}, {}, {}
    for name in study.options["entries"] or [name for name in names() if name != "prices"]:
        jobs = pretraining_jobs(load(name))
        for chip in SLICES if jobs else ():
            found = [device_days(job, chip, study.out) for job in jobs.values()]
            if None not in found:
                days.setdefault(name, {})[chip], runs[name] = sum(found), len(jobs)
        if jobs and jobs.keys() <= PRINTED.keys():
            figure = published.table("table2").figure
            printed[name] = sum(figure("TPUv3-core-days", **PRINTED[run]) for run in jobs)
    return {"days": days, "published": printed, "runs": runs, "mfu": known_mfus(study.out)}


def table(figures: dict) -> str:
    """Returns a table with a line for each experiment."""
    lines = [
        [name, figures["runs"][name], *(written(found.get(chip)) for chip in SLICES)]
        + [written(figures["published"].get(name))]
        for name, found in figures["days"].items()
    ]
    heads = ["entry", "pre-training runs", *(f"{chip} device-days" for chip in SLICES)]
    return markdown_table([*heads, "the paper's, v3 core-days"], lines)


EXPERIMENT = Experiment(
    claim="What pre-training of each entry costs at the paper's scale.",
    read=read,
    table=table,
    options={"entries": dict(nargs="+", help="those entries alone; by default all")},
    needs='pip install -e ".[plan]"',
    minutes=110,
)
