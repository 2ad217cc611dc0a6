"""The suite `zero_shot`: an image-text model classifies test images by class names."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.class_names import has_names, parse_names
from vit_jax.data.sources import SOURCES, DataSet, open_source
from vit_jax.data.sources.base import Source, check_labelled, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation.features import image_embedding, single_labels
from vit_jax.evaluation.fewshot import DATA_SETS, read_single_labels, with_test_split
from vit_jax.evaluation.imagenet import accuracy, synsets
from vit_jax.evaluation.suite import (
    DATA_DIR,
    LABEL_KEY,
    Classified,
    Measurement,
    Options,
    Row,
    Subject,
    Suite,
    SuiteOption,
    digest_of,
    in_data_dir,
    measurement,
)
from vit_jax.evaluation.suite_fewshot import SETS
from vit_jax.evaluation.text_encoder import TextEncoder
from vit_jax.models.image_model import PROBABILITIES
from vit_jax.models.image_text import TEMPLATES, checked_names, checked_templates, class_embeddings
from vit_jax.published.prompts import imagenet_prompts
from vit_jax.small_files import read_lines

IMAGENET = "imagenet"  # Value of options: CLIP's class names and prompt templates for ImageNet.
CLIP_NAMES = "CLIP's class names"  # Note in a result row that uses CLIP's names.
TOP = 5
MOST_COMPARED = 2**22  # Maximum number of similarities in memory.


class Opened(NamedTuple):
    """Opened test images, and the names of their classes."""

    source: Source
    names: tuple[str, ...]
    # Description of the source of the class names; empty: the class names are the data set's.
    note: str


def parse_class_names(text: str) -> tuple[str, ...] | str:
    """Parses the flag `--names`: class names, or `imagenet` for CLIP's names."""
    return text if text == IMAGENET else tuple(parse_names(text))


def parse_templates(text: str) -> tuple[str, ...]:
    """Parses the option for prompt templates.

    Args:
      text: `imagenet` for CLIP's templates, a template such as `a photo of a {}`, or a file with a
        template in each line.
    """
    if text == IMAGENET:
        return imagenet_prompts().templates
    if "{}" in text:
        return (text,)
    return checked_templates([line for line in read_lines(text, "templates") if line.strip()])


def tested_sets(
    subject: Subject, options: Options, default: Sequence[DataSet] = ()
) -> list[DataSet]:
    """Returns the data sets of the flag `--set`.

    All images of a folder without splits are test images. If a data set has no split `test`, its
    validation split, such as `val`, is evaluated.
    """
    described = []
    for one in options["set"] or default:
        if one.kind == "tfds":
            one = one._replace(path=in_data_dir(one.path, options["data_dir"]))
        elif one.test_split == "test" and SOURCES[one.kind].is_whole(one.path):
            one = one._replace(test_split="all")
        described.append(with_test_split(one, subject.log))
    return described


def class_names_of(source: Source, names: Sequence[str] | str, name: str) -> tuple[list[str], str]:
    """Returns class names (the option `names` or the data set's), and a note on their source.

    Raises:
      UserError: the names do not match the classes, or there are no names.
    """
    classes = source.class_names
    if names == IMAGENET or (not names and _are_synsets(classes)):
        return _names_of_synsets(classes, name), CLIP_NAMES
    if names:
        if len(names) != len(classes):
            raise UserError(
                f"--names has {len(names):,} class names, and {name} {len(classes):,} classes: "
                "give one for each, in the order of the data's classes"
            )
        return [*names], "class names of --names"
    if source.numbered:
        raise UserError(
            f"the classes of {name} have no names, only numbers: give --names=FILE with a name in "
            "each line"
        )
    note = "" if has_names(classes) else "classes are named by their numbers"
    return [one.replace("_", " ") for one in classes], note


def _names_of_synsets(classes: Sequence[str], name: str) -> list[str]:
    """Returns CLIP's names of ImageNet classes, given their synsets, such as n01440764."""
    by_synset = dict(zip(synsets(), imagenet_prompts().class_names, strict=True))
    if unknown := [one for one in classes if one not in by_synset]:
        raise UserError(
            f"{name} has a class {unknown[0]!r}, which is no synset of ImageNet, such as "
            "n01440764: remove --names=imagenet, or give --names=FILE"
        )
    return [by_synset[one] for one in classes]


def _are_synsets(classes: Sequence[str]) -> bool:
    return all(re.fullmatch(r"n\d{8}", one) for one in classes) and {*classes} <= {*synsets()}


def open_labelled(described: DataSet, options: Options, subject: Subject) -> Opened:
    """Opens the test images of a data set in which each image has one label.

    Raises:
      UserError: the model has no text encoder, the data cannot be opened, an image does not have
        exactly one label, or the class names are invalid.
    """
    texts = subject.texts
    source = open_source(
        described.kind,
        described.test_split,
        path=described.path,
        image_size=options["image_size"] or 224,
        each_labelled=True,
        label_key=options["label_key"],
    )
    if not source.class_names:
        raise UserError(f"{described.name} has no labels: zero_shot needs one for each image")
    check_labelled(source, "test")
    if source.max_labels > 1:
        read_single_labels(described.name, source, subject.log)
    names, note = class_names_of(source, options["names"], described.name)
    # CLIP's names of ImageNet's classes contain two pairs of equal names, so the names are not
    # checked for duplicates.
    if note != CLIP_NAMES:
        names = checked_names(names, texts.tokenizer, texts.probabilities, options["templates"])
    return Opened(source, tuple(names), note)


def likeliest_classes(
    images: np.ndarray, classes: np.ndarray, texts: TextEncoder
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the five most probable classes of each image, and the probability of the first one.

    Classes with equal probabilities are in ascending order of their indices. If there are fewer
    than five classes, the result is padded with -1.

    Args:
      images: image embeddings of unit norm, float32 `[images, dim]`.
      classes: embeddings of the classes' names with unit norm, float32 `[classes, dim]`.

    Returns:
      Classes, int `[images, 5]`, and probabilities of the first class, float32 `[images]`.
    """
    rows, ranked, chances = max(1, MOST_COMPARED // len(classes)), [], []
    for start in range(0, len(images), rows):
        logits = texts.logits(images[start : start + rows], classes)
        ranked.append(np.argsort(-logits, axis=1, kind="stable")[:, :TOP])
        chances.append(np.asarray(PROBABILITIES[texts.probabilities](logits)).max(axis=1))
    found = np.concatenate(ranked)
    found = np.pad(found, ((0, 0), (0, TOP - found.shape[1])), constant_values=-1)
    return found, np.concatenate(chances)


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each data set."""
    templates = options["templates"]

    def measure(described: DataSet, subject: Subject, opened: Opened) -> list[Row]:
        classes = class_embeddings(subject.texts, opened.names, templates)
        seen = subject.see(opened.source, image_embedding, subject.test_crop)
        labels = single_labels(seen.labels, described.name)[:, None]
        ranked, probability = likeliest_classes(seen.values, classes, subject.texts)
        answers = dict(numbers=seen.indices, labels=labels, answer=ranked[:, 0])
        about = "zero_shot", described.name, opened.source, subject.test_crop, opened.names
        subject.on_outputs(Classified(*about, answers | {"probability": probability}))
        scored = accuracy(ranked, labels)
        prompts = templates[0] if len(templates) == 1 else f"{len(templates)} templates"
        note = "; ".join(filter(None, (prompts, opened.note, str(subject.test_crop))))
        return [
            Row("zero_shot", name, scored[kind], None, len(labels), note)
            for name, kind in zip(names_of(described), ("top1", "top5"), strict=True)
        ]

    return [
        measurement(
            names_of(described),
            functools.partial(open_labelled, described, options, subject),
            functools.partial(measure, described),
            lambda opened, samples=16: fingerprint(opened.source, samples),
        )
        for described in tested_sets(subject, options, DATA_SETS)
    ]


def names_of(described: DataSet) -> tuple[str, ...]:
    """Returns the names of a data set's result rows, such as `pets, top-1` and `pets, top-5`."""
    return f"{described.name}, top-1", f"{described.name}, top-{TOP}"


SUITE = Suite(
    name="zero_shot",
    title="Zero-shot classification by class names",
    needs="a model of images and texts; data sets of --set, by default big_vision's nine of TFDS",
    measurements=measurements,
    options={
        "set": SETS,
        "names": SuiteOption(
            (),
            "Class names in the order of the data's classes, cat,dog or a file with one in each "
            "line, or imagenet: CLIP's, by synset; by default the data's.",
            parse_class_names,
        ),
        "templates": SuiteOption(
            TEMPLATES,
            "Template of zero_shot with {} for the name, a file with one in each line, or "
            "imagenet: CLIP's 80; by default 'a photo of a {}.'",
            parse_templates,
        ),
        "label_key": LABEL_KEY,
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {
        "names": digest_of({"names": options["names"]}) if options["names"] else "the data's",
        "templates": f"{len(options['templates'])}, "
        + digest_of({"templates": options["templates"]}),
        "crop": str(subject.test_crop),
    },
    spoken="zero-shot accuracy on",
)
