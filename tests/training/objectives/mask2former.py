"""Compares EoMT's loss with its authors': python -m tests.training.objectives.mask2former \
    --mask2former=DIR --detectron2=DIR --eomt=DIR [--write]

The folders are checkouts of facebookresearch/Mask2Former, facebookresearch/detectron2 (Mask2Former
uses its sampling of points) and tue-mps/eomt. The authors' criteria get the same logits, masks and
random points as ours. The command prints a line for each trial. It fails if losses or gradients
differ by more than a relative 1e-5. --write saves Mask2Former's numbers in mask2former.json; a test
compares with this file and needs no PyTorch. The command itself requires PyTorch and Transformers.
"""

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.training.objectives.test_segmentation import CLASSES, floats, masks
from vit_jax.training.objectives.mask_losses import (
    OVERSAMPLED,
    UNCERTAIN,
    Points,
    Weights,
    set_losses,
    targets_of,
)

GOLDEN = Path(__file__).with_name("mask2former.json")
TRIALS, IMAGES, QUERIES, POINTS, ALLOWED = 8, 3, 7, 48, 1e-5
WEIGHTS = Weights()


class Trial:
    """Random logits, masks and points of a batch.

    Args:
      number: random seed. Trials with odd seeds have logits that are ten times as large (confident
        predictions), and fewer classes in the second image.
    """

    def __init__(self, number: int):
        scale = 10.0 if number % 2 else 1.0
        self.logits = scale * floats(IMAGES, QUERIES, 6, 5, seed=number)
        self.classes = floats(IMAGES, QUERIES, CLASSES + 1, seed=100 + number)
        self.mask = masks(IMAGES, 12, 10, seed=number)
        if number % 2:
            self.mask[1] = np.where(self.mask[1] > 2, 255, self.mask[1])
        rng, chosen = np.random.default_rng(number), int(UNCERTAIN * POINTS)
        sizes = POINTS, OVERSAMPLED * POINTS, POINTS - chosen
        self.points = Points(*(rng.random((IMAGES, n, 2), dtype=np.float32) for n in sizes))

    def labels(self) -> list[list[int]]:
        """Returns the classes that occur in each image, in ascending order."""
        return [sorted({*one.ravel().tolist()} - {255}) for one in self.mask]

    def drawn(self) -> Iterator[np.ndarray]:
        """Yields the points in the order of the authors' draws: for matching, then for losses."""
        counts = [len(one) for one in self.labels()]
        yield from (one[None] for one in self.points.matched)
        for values in (self.points.candidates, self.points.others):
            yield np.repeat(values, counts, axis=0)


def described(loss: Any, gradients: Any) -> dict[str, list[float]]:
    """Returns the loss, and each gradient's norm and dot products with four random directions."""
    rng, found = np.random.default_rng(0), {"loss": [float(loss)]}
    for name, gradient in zip(("masks", "classes"), gradients, strict=True):
        gradient = np.asarray(gradient, np.float64).ravel()
        products = rng.normal(size=(4, gradient.size)) @ gradient
        found[name] = [float(np.linalg.norm(gradient)), *products.tolist()]
    return found


def ours(trial: Trial) -> dict[str, list[float]]:
    """Returns our loss and gradients of a trial, in the format of `described`."""
    return described(*loss_and_gradients(trial.logits, trial.classes, trial.mask, trial.points))


@jax.jit
def loss_and_gradients(logits, classes, mask, points):
    """Returns our loss of a batch, and its gradients with respect to mask and class logits."""
    targets = jax.vmap(lambda one: targets_of(one, CLASSES, QUERIES))(mask)
    count = jnp.full(IMAGES, targets.valid.sum(-1).mean())

    def loss(logits, classes):
        return set_losses(logits, classes, targets, points, count, WEIGHTS).mean()

    return jax.value_and_grad(loss, (0, 1))(logits, classes)


def difference(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """Returns the largest difference of any number, relative to the largest number of its list."""
    return max(
        float(np.abs(np.subtract(found[name], row)).max() / np.abs(row).max())
        for name, row in expected.items()
    )


def theirs(trial: Trial, criterion: Any) -> dict[str, list[float]]:
    """Returns the authors' loss and gradients of a trial, in the format of `described`.

    Args:
      criterion: function of logits, classes and targets.
    """
    import torch

    given = [torch.tensor(x, requires_grad=True) for x in (trial.logits, trial.classes)]
    targets = [
        {
            "labels": torch.tensor(labels),
            "masks": torch.tensor(
                np.stack([one == label for label in labels]), dtype=torch.float32
            ),
        }
        for one, labels in zip(trial.mask, trial.labels(), strict=True)
    ]
    queue = trial.drawn()

    def rand(*shape, device=None):
        values = torch.tensor(next(queue))
        assert values.shape == shape
        return values

    with mock.patch.object(torch, "rand", rand):
        loss = criterion(*given, targets)
    loss.backward()
    return described(loss.detach(), [x.grad.numpy() for x in given])


def mask2former(checkout: Path, detectron2: Path) -> Any:
    """Returns Mask2Former's criterion, which samples points with detectron2's own functions."""
    import torch

    from tests.authors.theirs import definition

    points = types.ModuleType("detectron2.projects.point_rend.point_features")
    file = detectron2 / "projects/PointRend/point_rend/point_features.py"
    points.point_sample = definition(file, "point_sample", torch=torch, F=torch.nn.functional)
    points.get_uncertain_point_coords_with_randomness = definition(
        file,
        "get_uncertain_point_coords_with_randomness",
        torch=torch,
        cat=torch.cat,
        point_sample=points.point_sample,
    )
    alone = types.ModuleType("detectron2.utils.comm")
    alone.get_world_size = lambda: 1
    stubs = {module.__name__: module for module in (points, alone)}
    for name in ("detectron2", "detectron2.utils", "detectron2.projects"):
        stubs[name] = types.ModuleType(name)
    stubs["detectron2.projects.point_rend"] = types.ModuleType("point_rend")
    # Packages without their __init__.py, which would import all of Mask2Former.
    for name in ("mask2former", "mask2former.modeling", "mask2former.utils"):
        stubs[name] = types.ModuleType(name)
        stubs[name].__path__ = [str(checkout / name.replace(".", "/"))]
    with mock.patch.dict(sys.modules, stubs):
        matcher = importlib.import_module("mask2former.modeling.matcher").HungarianMatcher(
            cost_class=WEIGHTS.classes, cost_mask=WEIGHTS.mask, cost_dice=WEIGHTS.dice,
            num_points=POINTS,
        )  # fmt: skip
        weights = dict(loss_ce=WEIGHTS.classes, loss_mask=WEIGHTS.mask, loss_dice=WEIGHTS.dice)
        criterion = importlib.import_module("mask2former.modeling.criterion").SetCriterion(
            CLASSES, matcher, weights, WEIGHTS.no_object, ["labels", "masks"], POINTS, OVERSAMPLED,
            UNCERTAIN,
        )  # fmt: skip

    def run(logits, classes, targets):
        found = criterion({"pred_masks": logits, "pred_logits": classes}, targets)
        return sum(weights[name] * value for name, value in found.items())

    return run


def eomt(checkout: Path) -> Any:
    """Returns EoMT's criterion, from the authors' file."""
    file = checkout / "training/mask_classification_loss.py"
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("eomt", file))
    module.__loader__.exec_module(module)
    criterion = module.MaskClassificationLoss(
        POINTS, OVERSAMPLED, UNCERTAIN, WEIGHTS.mask, WEIGHTS.dice, WEIGHTS.classes, CLASSES,
        WEIGHTS.no_object,
    )  # fmt: skip

    def run(logits, classes, targets):
        return criterion.loss_total(criterion(logits, targets, classes), lambda *_, **__: None)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("mask2former", "detectron2", "eomt"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="the checkout")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name}")
    arguments = parser.parse_args()
    import torch

    from tests.conftest import name_missing_operators

    name_missing_operators(torch)
    criteria = {
        "Mask2Former": mask2former(arguments.mask2former, arguments.detectron2),
        "EoMT": eomt(arguments.eomt),
    }
    kept, worst = [], 0.0
    for number in range(TRIALS):
        trial = Trial(number)
        found = ours(trial)
        expected = {name: theirs(trial, criterion) for name, criterion in criteria.items()}
        far = {name: difference(found, numbers) for name, numbers in expected.items()}
        print(f"trial {number}: " + ", ".join(f"{name} {x:.1e}" for name, x in far.items()))
        worst = max(worst, *far.values())
        kept.append(expected["Mask2Former"])
    if arguments.write:
        rounded = json.loads(json.dumps(kept), parse_float=lambda x: float(f"{float(x):.8g}"))
        GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, rounded)) + "\n]\n")
    if worst > ALLOWED:
        sys.exit(f"further from the authors' losses than {ALLOWED:.0e}")


if __name__ == "__main__":
    main()
