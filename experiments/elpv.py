"""Classification of defective solar cells: python -m vit_jax.experiment elpv --out=DIR.

It writes links to the 2,624 photographs of elpv-dataset (pip install -e ".[examples]") as
DIR/images/{train,test}/{defective,functional}, trains configs/finetune_elpv.py on them once for
each seed, and reports accuracy and confusion matrices on the test images. There are two baselines:
logistic regression on the pixels, and the more frequent class for all images.

A cell counts as defective if its labelled probability of a defect is 0.5 or more. The test images
are a quarter of the cells of each type (mono, poly) and each probability, chosen with a fixed seed.

The photographs' licence is CC BY-NC-SA 4.0: not for commercial use.
"""

import functools
import importlib.util
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import vit_jax
from vit_jax.config import from_json
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluation.features import extractor_of
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.parallel.mesh import make_mesh
from vit_jax.paths import CONFIG
from vit_jax.runs.evaluator import test_crop

CLASSES = ("defective", "functional")  # In the order of their label numbers.
PIXELS = 32  # Width of the images for logistic regression.


class Cell(NamedTuple):
    """A photograph of a solar cell, with its labels in the data set."""

    file: Path
    probability: float  # Labelled probability that the cell is defective: 0, 1/3, 2/3 or 1.
    kind: str  # mono or poly.


def finetuned(study: Study):
    """Returns a training run for each seed; first links the photographs into folders if needed."""
    images, options = study.out / "images", study.options
    if not images.exists():
        study.out.mkdir(parents=True, exist_ok=True)
        lay_out(read_cells(), images)
    checkpoint = f",checkpoint={options['checkpoint']}" if options["checkpoint"] else ""
    config = f"finetune_elpv:size={options['size']}{checkpoint}"
    return [
        Trial(
            "finetuned",
            {"seed": seed},
            study.job(f"seed{seed}", config, data__path=images, seed=seed),
        )
        for seed in options["seeds"]
    ]


def read(study: Study) -> dict:
    """Returns accuracy and confusion matrix of each run and baseline."""
    images, matrices = study.out / "images", {}
    for trial in study.finished("finetuned"):
        predicted, truth = predictions(trial.job.workdir, images)
        matrices[f"ViT, {trial.job.name}"] = confusion(truth, predicted)
    predicted, truth = logistic_regression(images)
    matrices["logistic regression"] = confusion(truth, predicted)
    matrices["the likelier class"] = confusion(
        truth, np.full_like(truth, np.bincount(truth).argmax())
    )
    results = {
        name: {"accuracy": accuracy(matrix), "confusion": matrix.tolist()}
        for name, matrix in matrices.items()
    }
    return {"classes": CLASSES, "results": results}


def matrices_of(figures: dict) -> dict[str, np.ndarray]:
    """Converts the confusion matrices in the results to arrays, by their names."""
    return {name: np.array(result["confusion"]) for name, result in figures["results"].items()}


def read_cells() -> list[Cell]:
    """Returns all cells of the data set, in the data set's order.

    Raises:
      UserError: the data set is not installed.
    """
    found = importlib.util.find_spec("elpv_dataset")
    if found is None:
        raise UserError('elpv-dataset is not installed: pip install -e ".[examples]"')
    folder = Path(found.submodule_search_locations[0]) / "data"
    rows = [
        line.split() for line in (folder / "labels.csv").read_text().splitlines() if line.strip()
    ]
    return [Cell(folder / file, float(probability), kind) for file, probability, kind in rows]


def lay_out(cells: Sequence[Cell], images: Path) -> None:
    """Links the photographs as `images/{train,test}/<class>/<file>`.

    If it is interrupted, the folder `images` does not exist.
    """
    held_out = test_cells(cells)
    part = images.with_name(f"{images.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for index, cell in enumerate(cells):
        name = "defective" if cell.probability >= 0.5 else "functional"
        link = part / ("test" if index in held_out else "train") / name / cell.file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(cell.file, link)
    part.rename(images)


def test_cells(cells: Sequence[Cell]) -> set[int]:
    """Returns the indices of the test cells: a random quarter of each type and probability."""
    groups = {}
    for index, cell in enumerate(cells):
        groups.setdefault((cell.kind, cell.probability), []).append(index)
    random = np.random.default_rng(0)
    return {
        int(index)
        for _, members in sorted(groups.items())
        for index in random.permutation(members)[: round(len(members) / 4)]
    }


@functools.cache
def predictions(workdir: Path, images: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each test image the class that a run's model predicts, and the label."""
    config = from_json((workdir / CONFIG).read_text())
    mesh = make_mesh()
    model = vit_jax.load_model(workdir, log=str)
    options = dict(batch_size=config.batch_size, compute=likeliest)
    extractor, params = extractor_of(model, mesh, test_crop(config), **options)
    found = extractor(params, open_source("folder", "test", path=str(images)))
    return found.values, found.labels[:, 0]


def likeliest(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Returns the most probable class of each image, int32 `[batch]`."""
    return jnp.argmax(model(images), axis=-1)


@functools.cache
def logistic_regression(images: Path) -> tuple[np.ndarray, np.ndarray]:
    """Fits scikit-learn's logistic regression to 32x32 grey pixels of the training images.

    The penalty is chosen by cross-validation.

    Returns:
      The predicted class of each test image, and the labels.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    arrays, crop = {}, TestCrop(PIXELS, "square", PIXELS)
    for split in ("train", "test"):
        examples = list(open_source("folder", split, path=str(images)))
        pixels = np.stack([crop(example.image)[..., 0].ravel() for example in examples])
        arrays[split] = pixels, np.array([example.labels[0] for example in examples])
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    penalties = {"logisticregression__C": np.logspace(-5, -1, 5)}
    model = GridSearchCV(regression, penalties, cv=5).fit(*arrays["train"])
    return model.predict(arrays["test"][0]), arrays["test"][1]


def confusion(truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Returns the confusion matrix: numbers of images, `[label, predicted class]`."""
    matrix = np.zeros((len(CLASSES), len(CLASSES)), int)
    np.add.at(matrix, (truth, predicted), 1)
    return matrix


def accuracy(matrix: np.ndarray) -> float:
    """Returns the accuracy from a confusion matrix, from 0 to 1."""
    return float(matrix.trace() / matrix.sum())


def table(matrices: Mapping[str, np.ndarray]) -> str:
    """Returns a table with accuracy and confusion matrix of each model, and the ViT's mean."""
    lines = [
        "| | accuracy, % | defective: found | missed | functional: right | called defective |",
        "|---|---|---|---|---|---|",
    ]
    for name, matrix in matrices.items():
        (found, missed), (wrong, right) = matrix
        lines.append(
            f"| {name} | {100 * accuracy(matrix):.2f} | {found} | {missed} | {right} | {wrong} |"
        )
    ours = [matrix for name, matrix in matrices.items() if name.startswith("ViT")]
    if len(ours) > 1:
        accuracies = [100 * accuracy(matrix) for matrix in ours]
        spread = f"{statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}"
        (found, missed), (wrong, right) = np.mean(ours, axis=0)
        counts = f"{found:.1f} | {missed:.1f} | {right:.1f} | {wrong:.1f}"
        lines.insert(2 + len(ours), f"| **ViT, mean of {len(ours)}** | **{spread}** | {counts} |")
    return "\n".join(lines)


def draw(matrices: Mapping[str, np.ndarray]):
    """Draws the confusion matrices of the ViT, summed over seeds, and of logistic regression."""
    from matplotlib.figure import Figure

    ours = [matrix for name, matrix in matrices.items() if name.startswith("ViT")]
    panels = {
        f"ViT, {len(ours)} seed{'s' if len(ours) > 1 else ''}": sum(ours),
        "logistic regression": matrices["logistic regression"],
    }
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    for axes, (name, matrix) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        shares = matrix / matrix.sum(axis=1, keepdims=True)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), share in np.ndenumerate(shares):
            words = f"{share:.1%}\n{matrix[row, column]:,}"
            axes.text(
                column,
                row,
                words,
                ha="center",
                va="center",
                color="white" if share > 0.5 else "black",
            )
        axes.set(title=f"{name}: {accuracy(matrix):.1%}", xlabel="predicted", ylabel="labelled")
        axes.set_xticks(range(len(CLASSES)), CLASSES)
        axes.set_yticks(range(len(CLASSES)), CLASSES, rotation=90, va="center")
    return figure


EXPERIMENT = Experiment(
    claim="A small ViT tells defective solar cells from others by their photographs.",
    stages=(finetuned,),
    read=read,
    table=lambda figures: table(matrices_of(figures)),
    draw=lambda study, figures: {"elpv": draw(matrices_of(figures))},
    options=dict(
        seeds=dict(type=int, nargs="+", default=[0, 1, 2]),
        size=dict(type=int, default=96, help="pixels that the model sees"),
        checkpoint=dict(help="what load_model takes, to be fine-tuned"),
    ),
    needs='pip install -e ".[examples]"',
    minutes=26,
)
