"""The suite `depth`: depth metrics on images with depth maps, at original size."""

import numpy as np

from vit_jax.data.dense_fields import check_size
from vit_jax.data.fields import DEPTH
from vit_jax.data.sources import DataSet, open_source
from vit_jax.data.sources.base import Source, check_fields
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import NYU_CROP, DepthMetrics, depth_metrics
from vit_jax.evaluation.dense_suite import Predicted, dense_measurements, tested_set
from vit_jax.evaluation.suite import (
    DATA_DIR,
    Measurement,
    Options,
    Ranged,
    Row,
    Subject,
    Suite,
    SuiteOption,
)
from vit_jax.evaluation.suite_fewshot import SETS

# A dict from the name of a result row to the metric's attribute in `DepthMetrics` and its unit.
METRICS = {
    **{"RMSE": ("rmse", "m"), "AbsRel": ("abs_rel", ""), "log10": ("log10", "")},
    **{f"delta{power}": (f"delta{power}", "%") for power in (1, 2, 3)},
}
NYU_SIDES = (480, 640)


def parse_part(text: str) -> str:
    """Checks `--depth_part`: the whole image (`all`), or NYU Depth v2's usual crop (`nyu`)."""
    if text not in ("all", "nyu"):
        raise UserError(f"--depth_part={text!r} is unknown; supported: all, nyu")
    return text


def parse_scale(text: str) -> float:
    """Parses `--depth_scale`, a unit in metres such as 0.001; raises UserError if it is none."""
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise UserError(f"--depth_scale={text!r} must be metres of a unit, above 0, such as 0.001")
    return scale


def scale_of(subject: Subject, options: Options) -> float:
    """Returns the unit of the depth maps in metres: `--depth_scale`, or the unit of the run's."""
    return options["depth_scale"] or subject.dense.depth_scale


def open_ranged(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens the test images of a data set with their depth maps.

    Raises:
      UserError: the checkpoint has no depth head, or the data cannot be opened or have no depth
        maps.
    """
    described = tested_set(described, "depth", options, subject.log)
    source = open_source(
        described.kind,
        described.test_split,
        path=described.path,
        image_size=subject.depth_model.model.image_size[0],
        labels=False,
        fields=(DEPTH,),
        depth_scale=scale_of(subject, options),
    )
    check_fields(source, (DEPTH,), "test")
    return source


def measured(described: DataSet, options: Options, subject: Subject, source: Source) -> list[Row]:
    """Returns a data set's depth metrics, and passes the worst images to `subject.on_outputs`."""
    model = subject.depth_model
    predictions = Predicted(described, subject, source, model.stream)
    nearest, farthest = model.head.range
    found: list[DepthMetrics] = []
    scores = []
    for index, predicted in predictions:
        true = source.fields_of(index)[DEPTH]
        check_size(true.shape, predicted.shape, source.describe(index))
        if options["depth_part"] == "nyu":
            if true.shape != NYU_SIDES:
                raise UserError(
                    f"--depth_part=nyu is for images of 640x480 pixels, and "
                    f"{source.describe(index)} has {true.shape[1]}x{true.shape[0]}: leave it out"
                )
            true, predicted = true[NYU_CROP], predicted[NYU_CROP]
        metrics = depth_metrics(predicted, true, nearest, farthest)
        if metrics is not None:
            found.append(metrics)
            scores.append((-metrics.rmse, index))
    if not found:
        raise UserError(f"{described.name} has no readable image with known depths")
    chosen, worst = predictions.worst(scores)
    shown = [(place, -score, predicted) for place, score, predicted in worst]
    subject.on_outputs(Ranged(described.name, chosen, (nearest, farthest), shown))
    height, width = model.model.image_size
    note = f"windows of {height}x{width}, {subject.test_crop.interpolation}; "
    note += f"depth maps in units of {scale_of(subject, options):.9g} m"
    means = DepthMetrics(*np.mean(found, axis=0).tolist())
    return [
        Row("depth", f"{described.name}, {name}", getattr(means, key), None, len(found), note, unit)
        for name, (key, unit) in METRICS.items()
    ]


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each data set."""
    example = "images with depth maps, such as --set=/data/rooms"
    return dense_measurements(subject, options, [*METRICS], open_ranged, measured, example)


def settings(subject: Subject, options: Options) -> dict[str, str | float]:
    """Returns the options on which the metrics depend: `depth_part` and `depth_scale`."""
    return {"depth_part": options["depth_part"], "depth_scale": scale_of(subject, options)}


SUITE = Suite(
    name="depth",
    title="Depth at the images' original size",
    needs="a depth run; folders of images and depth maps by --set",
    measurements=measurements,
    options={
        "set": SETS,
        "data_dir": DATA_DIR,
        "depth_part": SuiteOption(
            "all", "Part of the images: all, or nyu, the part of NYU Depth v2's.", parse_part
        ),
        "depth_scale": SuiteOption(
            None,
            "Metres of a unit of 16-bit depth maps; KITTI: 0.00390625. By default the unit of the "
            "run's depth maps.",
            parse_scale,
        ),
    },
    settings=settings,
    spoken="depth of",
    in_training=False,
)
