"""The suite `imagenet`: accuracy on ImageNet (also with ReaL labels), ImageNet-v2 and ObjectNet."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data.class_names import Match
from vit_jax.data.preprocess import TestCrop, sides
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation import imagenet as sets
from vit_jax.evaluation.features import Features, first_five
from vit_jax.evaluation.suite import (
    COMPARED_EXAMPLES,
    DATA_DIR,
    Measurement,
    Options,
    Row,
    Subject,
    Suite,
    SuiteOption,
    digest_of,
    in_data_dir,
    parse_number,
    text_option,
    unavailable,
)


def crop_of(subject: Subject, options: Options) -> TestCrop:
    """Returns the checkpoint's evaluation transform.

    If `--test_resize` is set, the short side is resized to this number of pixels before the crop.
    """
    if options["test_resize"] is None:
        return subject.test_crop
    return dataclasses.replace(subject.test_crop, kind="short_side", resize=options["test_resize"])


def head(subject: Subject) -> Match:
    """Returns the `Match` of the outputs of the model's head with ImageNet's classes, by name."""
    return sets.match_head(subject.num_classes, subject.class_names, subject.name)


def read_real(path: str) -> list:
    """Reads ReaL's labels with `imagenet.read_real`; raises UserError if `path` is empty."""
    if not path:
        raise UserError(f"give --real=real.json, from {sets.REAL_URL}")
    return sets.read_real(path)


def predict(subject: Subject, source: Source, crop: TestCrop) -> Features:
    """Predicts the five most likely classes of each image, as ImageNet's class indices."""
    seen = subject.see(source, first_five, crop)
    return seen._replace(values=np.argsort(head(subject).order)[seen.values])


def _with_check(
    subject: Subject, open_set: Callable[[Sequence[str]], Source]
) -> Callable[[Sequence[str]], Source]:
    """Returns a function that checks the model's classes, and then calls `open_set`."""

    def opened(names: Sequence[str]) -> Source:
        head(subject)
        return open_set(names)

    return opened


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each test set."""

    def rows(names: Sequence[str], predictions, labels, crop: TestCrop) -> list[Row]:
        """Returns the result rows of a test set."""
        scored = sets.accuracy(predictions, labels)
        note = "; ".join(filter(None, (str(crop), head(subject).note)))
        return [
            Row("imagenet", name, scored[kind], None, scored["images"], note)
            for name, kind in zip(names, ("top1", "top5"), strict=False)
        ]

    def validation(names: Sequence[str], real: list | None = None) -> Source:
        if options["imagenet"]:
            return sets.open_imagenet("folder", options["imagenet"], "all", real)
        return sets.open_imagenet(
            "tfds", in_data_dir("imagenet2012", options["data_dir"]), "validation", real
        )

    def of_validation(subject: Subject, source: Source) -> list[Row]:
        """Returns top-1 and top-5 with original labels (column 0), and top-1 with ReaL labels."""
        seen = predict(subject, source, crop)
        reals = rows(["ReaL"], seen.values, seen.labels[:, 1:], crop) if real else []
        return rows(OWN, seen.values, seen.labels[:, :1], crop) + reals

    def other(
        name: str, open_set: Callable[[Sequence[str]], Source], crop: TestCrop
    ) -> Measurement:
        def measure(subject: Subject, source: Source) -> list[Row]:
            seen = predict(subject, source, crop)
            return rows(names, seen.values, seen.labels, crop)

        def identify(name: str) -> dict[str, int | str]:
            return fingerprint(_with_check(subject, open_set)([name]), COMPARED_EXAMPLES)

        names = (name, f"{name}, top-5")
        return Measurement(
            names, _with_check(subject, open_set), measure, fingerprint, functools.cache(identify)
        )

    @functools.cache
    def of_images() -> dict[str, int | str]:
        return fingerprint(_with_check(subject, validation)(OWN), COMPARED_EXAMPLES)

    def identify(name: str) -> dict[str, int | str]:
        return of_images() | ({} if name in OWN else {"real": digest_of({"classes": real})})

    crop = crop_of(subject, options)
    central = sets.objectnet_crop(sides(crop.size)[0])
    central = dataclasses.replace(crop, kind=central.kind, resize=central.resize)
    try:
        real = read_real(options["real"])
    except UserError as error:
        real, names, without_real = None, OWN, [unavailable("ReaL", error)]
    else:
        names, without_real = (*OWN, "ReaL"), []
    opened = _with_check(subject, functools.partial(validation, real=real))
    on_validation = Measurement(names, opened, of_validation, fingerprint, identify)
    v2, objectnet = (functools.partial(each, options) for each in (_open_v2, _open_objectnet))
    others = other("ImageNet-v2", v2, crop), other("ObjectNet", objectnet, central)
    return [on_validation, *without_real, *others]


def _open_v2(options: Options, names: Sequence[str]) -> Source:
    source = open_source("tfds", "test", path=in_data_dir(sets.IMAGENET_V2, options["data_dir"]))
    sets.check_classes(source.class_names, sets.IMAGENET_V2)
    return source


def _open_objectnet(options: Options, names: Sequence[str]) -> Source:
    if not options["objectnet"]:
        raise UserError(f"give --objectnet=objectnet-1.0, from {sets.OBJECTNET_URL}")
    return sets.open_objectnet(options["objectnet"])


OWN = ("ImageNet", "ImageNet, top-5")

SUITE = Suite(
    name="imagenet",
    title="ImageNet and its other test sets, top-1",
    needs="a model with ImageNet's 1,000 classes; the validation images by --imagenet or TFDS, "
    "ReaL's labels (--real), ImageNet-v2 by TFDS, ObjectNet (--objectnet)",
    measurements=measurements,
    options={
        "imagenet": text_option("A folder of validation images by synset, instead of TFDS's."),
        "real": text_option("ReaL's real.json."),
        "objectnet": text_option("The unpacked objectnet-1.0."),
        "test_resize": SuiteOption(
            None,
            "ImageNet's short side before the central crop; by default the checkpoint's crop, or "
            "the whole image.",
            parse_number,
        ),
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {
        "test_resize": options["test_resize"],
        "crop": str(crop_of(subject, options)),
    },
    published=("table2", "objectnet"),
)
