"""The price of each entry at the paper's scale: python -m vit_jax.experiment prices --out=DIR

Device-days of the pre-training runs of each entry, by the TPU compiler's estimate of their steps on
256 chips
of TPU v3 and v5e: days of a core of v3, of a chip of v5e. Fine-tuning comes on top. One step is
compiled for models of a name; those of another width, depth or position embedding are taken to have
its MFU. One that does not fit is planned with the nearest change that does. Each takes minutes;
`--list` reads the record.
"""

import jax

from vit_jax import published
from vit_jax.experiment import load, names
from vit_jax.ledger.prices import SLICES, device_days, known_mfus, pretraining_jobs
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, written

# Runs whose core-days of TPU v3 table 2 prints, by its columns.
PRINTED = {
    "vit_h14_jft": dict(model="ViT-H/14", pretraining="JFT-300M"),
    "vit_l16_jft": dict(model="ViT-L/16", pretraining="JFT-300M"),
    "vit_l16_i21k": dict(model="ViT-L/16", pretraining="ImageNet-21k"),
    "bit_r152x4_jft": dict(model="BiT-R152x4", pretraining="JFT-300M"),
}


def read(study) -> dict:
    """The days and runs of each entry, the paper's days where it prints those of all its runs, and
    MFUs.
    """
    jax.config.update("jax_platforms", "cpu")  # The compiler's library would look for a TPU.
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
    """A line for each entry."""
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
