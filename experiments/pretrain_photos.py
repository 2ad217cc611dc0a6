"""`vit-jax pretrain` on 1,000 photographs: vit-jax experiment pretrain_photos --out=DIR.

    pip install scikit-image
    python -m vit_jax.experiment pretrain_photos --checkpoint=FOLDER --stamps=STAMPS --out=DIR

It writes 1,000 images to 17 folders: the 796 cut-outs of Debian's tuxpaint-stamps-default by topic,
and 204 crops of scikit-image's brick, grass and gravel. It continues the training of the checkpoint
on them without labels, by configs/my_images_unlabelled.py. Then it fine-tunes the result, and the
original checkpoint, with labels by configs/my_images.py. Values of these configs are not changed.
k-NN accuracy is measured on 500 images, with the other 500 as neighbours.

--stamps is the folder of Debian's tuxpaint-stamps-default, such as /usr/share/tuxpaint/stamps.
"""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import markdown_table, spread

# Textures of scikit-image, number of crops of each, and side of a crop in pixels.
TEXTURES, CROPS, SIDE = ("brick", "grass", "gravel"), 68, 128


def pretrained(study: Study) -> list[Trial]:
    """Returns the runs without labels, which have the command's default values."""
    return [
        Trial(
            "pretrained",
            {"seed": seed},
            _job(study, f"pretrained-{seed}", "my_images_unlabelled", seed),
        )
        for seed in study.options["seeds"]
    ]


def tuned(study: Study) -> list[Trial]:
    """Returns the fine-tuning runs: from the checkpoint, and from each run without labels."""
    trials = []
    for seed in study.options["seeds"]:
        starts = {
            "the checkpoint": _checkpoint(study),
            "trained on": study.workdir("pretrained", seed=seed),
        }
        for start, folder in starts.items():
            if folder is not None:
                name = f"tuned-{start.replace(' ', '-')}-{seed}"
                job = _job(study, name, "my_images", seed, finetune__checkpoint=folder)
                trials.append(Trial("tuned", {"start": start, "seed": seed}, job))
    return trials


def _job(study: Study, name: str, config: str, seed: int, **values):
    start = {"finetune__checkpoint": _checkpoint(study)} | values
    minutes = study.options["minutes"]
    return study.job(
        name,
        config,
        seed=seed,
        data__path=lay_out(study),
        data__source="folder",
        minutes=minutes,
        **start,
    )


def _checkpoint(study: Study) -> Path:
    if study.options["checkpoint"] is None:
        raise UserError("give --checkpoint=FOLDER, of a trained model")
    return Path(study.options["checkpoint"]).absolute()


def lay_out(study: Study) -> Path:
    """Returns the folder that contains the 17 folders; writes it if it does not exist.

    If writing is interrupted, the folder does not exist.
    """
    path = (study.out / "images").absolute()
    if path.exists():
        return path
    stamps, found = Path(study.options["stamps"]), importlib.util.find_spec("skimage")
    if not (stamps / "animals").is_dir():
        raise UserError(
            f"--stamps={stamps} must be the folder stamps of Debian's tuxpaint-stamps-default"
        )
    if found is None:
        raise UserError("scikit-image is not installed: pip install scikit-image")
    part = path.with_name("images.part")
    shutil.rmtree(part, ignore_errors=True)
    for file in sorted(stamps.rglob("*.png")):
        topic, *rest = file.relative_to(stamps).parts
        (part / topic).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, part / topic / "_".join(rest))
    (part / "textures").mkdir()
    random = np.random.default_rng(0)
    for name in TEXTURES:
        image = Image.open(
            Path(found.submodule_search_locations[0]) / "data" / f"{name}.png"
        ).convert("RGB")
        for number in range(CROPS):
            left, top = (int(random.integers(side - SIDE + 1)) for side in image.size)
            crop = image.crop((left, top, left + SIDE, top + SIDE))
            crop.save(part / "textures" / f"{name}{number:02}.png")
    part.rename(path)
    return path


def read(study: Study) -> list[dict]:
    """Returns the results before and after training without labels, from 0 to 1, for all seeds.

    They are k-NN accuracy, and test accuracy after fine-tuning.
    """
    neighbours, seconds = [], []
    for trial in study.finished("pretrained"):
        history = study.outcome(trial).history.items()
        # Runs that were shortened by --steps have no k-NN accuracy.
        neighbours += [values for name, values in history if name.startswith("knn/")]
        seconds.append(study.figure(trial, "seconds"))
    if not seconds:
        return []

    def accuracies(start: str) -> list[float]:
        return [study.figure(trial, "accuracy") for trial in study.finished("tuned", start=start)]

    return [
        {"features": "the checkpoint", "knn": [values[0] for values in neighbours], "minutes": []}
        | {"tuned": accuracies("the checkpoint")},
        {"features": "trained on without labels", "knn": [max(values) for values in neighbours]}
        | {"tuned": accuracies("trained on"), "minutes": [value / 60 for value in seconds]},
    ]


def table(rows: list[dict]) -> str:
    """Returns a table of the results: mean and std over the seeds."""
    lines = [
        (
            row["features"],
            spread(row["knn"]),
            spread(row["tuned"]),
            f"{max(row['minutes']):.1f}" if row["minutes"] else "",
        )
        for row in rows
    ]
    return markdown_table(("", "k-NN, %", "fine-tuned, test accuracy, %", "minutes at most"), lines)


EXPERIMENT = Experiment(
    claim=(
        "Going on without labels on 1,000 photographs of one's own improves a trained model's "
        "features."
    ),
    stages=(pretrained, tuned),
    read=read,
    table=table,
    options=dict(
        checkpoint=dict(help="what load_model takes, to be trained on"),
        stamps=dict(default="/usr/share/tuxpaint/stamps", help="folder of tuxpaint-stamps-default"),
        seeds=dict(type=int, nargs="+", default=[0]),
        minutes=dict(type=float, default=10.0, help="of each run, about"),
    ),
    needs="tuxpaint-stamps-default (Debian), scikit-image and a trained checkpoint",
    minutes=25,
)
