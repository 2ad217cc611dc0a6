"""The suite `retrieval`: image-to-text and text-to-image retrieval by cosine similarity."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.fields import CAPTION_KEYS, TEXT
from vit_jax.data.sources import DataSet, open_source
from vit_jax.data.sources.base import Source, check_fields, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation.features import image_embedding
from vit_jax.evaluation.suite import (
    DATA_DIR,
    Matched,
    Measurement,
    Options,
    Row,
    Subject,
    Suite,
    measurement,
    text_option,
    unavailable,
)
from vit_jax.evaluation.suite_fewshot import SETS
from vit_jax.evaluation.suite_zero_shot import tested_sets
from vit_jax.models.retrieval import RECALLS, Paired, distinct, recalls

# Names of the two directions of retrieval in the result table.
WAYS = {"image_to_text": "image to text", "text_to_image": "text to image"}


class Opened(NamedTuple):
    """Opened test images, and all captions of each image."""

    source: Source
    captions: list[Sequence[str]]


def open_captioned(described: DataSet, options: Options, subject: Subject) -> Opened:
    """Opens the test images of a data set with all their captions.

    Without the option `caption_key`, the captions are in the run's column, or else in a column with
    a usual name.

    Raises:
      UserError: the model has no text encoder, or the data cannot be opened or have no captions.
    """
    _ = subject.texts  # Raises UserError if the model has no text encoder.
    size = options["image_size"] or 224
    key = options["caption_key"] or subject.caption_key
    try:
        source = _open_source(described, size, key)
    except UserError as error:
        if options["caption_key"] or key == CAPTION_KEYS[0]:
            raise
        subject.log(f"note: not the run's captions {key!r}, but those with a usual name ({error})")
        source = _open_source(described, size, CAPTION_KEYS[0])
    return Opened(source, [source.fields_of(index)[TEXT] for index in range(len(source))])


def _open_source(described: DataSet, image_size: int, caption_key: str) -> Source:
    source = open_source(
        described.kind,
        described.test_split,
        path=described.path,
        image_size=image_size,
        labels=False,
        fields=(TEXT,),
        caption_key=caption_key,
    )
    check_fields(source, (TEXT,), "test")
    return source


def embedded(described: DataSet, subject: Subject, opened: Opened) -> Matched:
    """Computes the embeddings of all readable images and of their captions."""
    seen = subject.see(opened.source, image_embedding, subject.test_crop)
    of_images = [opened.captions[index] for index in seen.indices.tolist()]
    captions = [caption for each in of_images for caption in each]
    first, texts = distinct(subject.texts.tokenizer(captions))
    captions = [captions[index] for index in first.tolist()]
    owners = np.repeat(np.arange(len(of_images)), [len(each) for each in of_images])
    paired = Paired(seen.values, subject.texts(captions), np.stack([owners, texts], axis=1))
    about = "retrieval", described.name, opened.source, subject.test_crop
    return Matched(*about, paired, captions, seen.indices)


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each data set."""

    def measure(described: DataSet, subject: Subject, opened: Opened) -> list[Row]:
        found = embedded(described, subject, opened)
        subject.on_outputs(found)
        images, texts, pairs = found.paired
        shares = recalls(found.paired)
        note = f"{len(pairs):,} captions"
        if len(texts) < len(pairs):
            note += f", {len(texts):,} of them distinct"
        return [
            Row(
                "retrieval",
                name_of(described, way, k),
                shares[f"recall@{k}_{way}"],
                None,
                len(images),
                f"{note}; {subject.test_crop}",
            )
            for way in WAYS
            for k in RECALLS
        ]

    chosen = tested_sets(subject, options)
    if not chosen:
        why = "give pairs of images and captions, such as --set=csv:/data/pairs"
        return [unavailable("recall", UserError(why))]
    return [
        measurement(
            [name_of(described, way, k) for way in WAYS for k in RECALLS],
            functools.partial(open_captioned, described, options, subject),
            functools.partial(measure, described),
            lambda opened, samples=16: fingerprint(opened.source, samples),
        )
        for described in chosen
    ]


def name_of(described: DataSet, way: str, k: int) -> str:
    """Returns the name of a result row, such as `coco, image to text, recall@5`."""
    return f"{described.name}, {WAYS[way]}, recall@{k}"


SUITE = Suite(
    name="retrieval",
    title="Retrieval between images and captions",
    needs="a model of images and texts; images with captions by --set",
    measurements=measurements,
    options={
        "set": SETS,
        "caption_key": text_option(
            "Column or key of the captions; by default the run's data.caption_key, or else "
            "caption, captions or text."
        ),
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {
        "caption_key": options["caption_key"] or subject.caption_key,
        "crop": str(subject.test_crop),
    },
    spoken="retrieval on",
    short=lambda name: "{0}/{2} {1}".format(*name.rsplit(", ", 2)),
)
