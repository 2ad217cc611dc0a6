"""Image-text models: an image tower, a text tower and the scale of their similarities."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, ImagesLike
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import Tokenizer

MOST_TEXTS = 64  # Maximum number of texts in one call of the text tower.
MOST_EMBEDDED = 4096  # Maximum number of text embeddings in memory before they are averaged.
TEMPLATES = ("a photo of a {}.",)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors scaled to unit L2 norm."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _logits(
    images: jax.Array, texts: jax.Array, scale: nnx.Param, bias: nnx.Param | None
) -> jax.Array:
    scores = jnp.exp(scale[...]) * jnp.matmul(images, texts.T, precision="highest")
    return scores if bias is None else scores + bias[...]


@nnx.jit
def _embed_texts(text: TextTower, tokens: jax.Array) -> jax.Array:
    return unit(text(tokens))


class ImageTextModel(nnx.Module):
    """Image and text encoders with a shared embedding space: CLIP, SigLIP and SigLIP 2.

    Attributes:
      image: the image tower.
      text: the text tower.
      logit_scale: logarithm of the factor that multiplies cosine similarities.
      logit_bias: offset that is added to the logits; None: no offset, as in CLIP.
      probabilities: a key of `PROBABILITIES`: `softmax` over the texts (CLIP), or a `sigmoid` of
        each pair (SigLIP).
      tokenizer: maps texts to tokens, int32 `[texts, length]`.
    """

    def __init__(
        self,
        image: ImageModel,
        text: TextTower,
        logit_scale: float,
        logit_bias: float | None,
        probabilities: str,
        tokenizer: Any,
    ):
        self.image, self.text = image, text
        self.logit_scale = nnx.Param(jnp.float32(logit_scale))
        self.logit_bias = None if logit_bias is None else nnx.Param(jnp.float32(logit_bias))
        self.probabilities, self.tokenizer = probabilities, tokenizer

    def encode_image(self, images: ImagesLike) -> jax.Array:
        """Returns embeddings of unit norm, float32 `[images, dim]`, of preprocessed images.

        Args:
          images: images of the image tower's size: uint8, floats in [-1, 1], or PIL images.
        """
        return unit(self.image(images).astype(jnp.float32))

    def encode_text(self, texts: str | Sequence[str]) -> jax.Array:
        """Returns L2-normalized embeddings of texts, float32 `[texts, dim]`.

        Texts that are too long for the text tower are truncated.

        Raises:
          UserError: `texts` is empty.
        """
        tokens = self.tokenizer([texts] if isinstance(texts, str) else texts)
        parts = []
        for start in range(0, len(tokens), MOST_TEXTS):
            part = tokens[start : start + MOST_TEXTS]
            size = min(MOST_TEXTS, 1 << (len(part) - 1).bit_length())  # Few sizes to compile.
            padded = np.pad(part, ((0, size - len(part)), (0, 0)), mode="edge")
            parts.append(_embed_texts(self.text, jnp.asarray(padded))[: len(part)])
        return jnp.concatenate(parts)

    def logits(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        """Returns the logit of each pair of embeddings, float32 `[images, texts]`."""
        return _logits(images, texts, self.logit_scale, self.logit_bias)

    def __repr__(self):
        text = self.text.options
        kind = "softmax over texts" if self.probabilities == "softmax" else "sigmoid of each pair"
        return (
            f"{self.image!r}\n  text tower           {text.depth} layers of width {text.dim}, "
            f"{text.heads} heads, {text.length} tokens of {text.vocabulary:,}\n  similarity"
            f"           {kind}, embeddings of {text.output_dim}"
        )

    __str__ = __repr__

    def classifier(
        self, names: Sequence[str], templates: Sequence[str] = TEMPLATES
    ) -> "ZeroShotClassifier":
        """Returns a zero-shot classifier of images for the given class names.

        The embedding of a class is the mean of its texts' embeddings, one for each template, scaled
        to unit norm (Radford et al., 2021, section 3.1.4). The classifier's `predict` applies the
        checkpoint's preprocessing.

        Args:
          names: names of the classes.
          templates: texts such as "a photo of a {}.", where `{}` is replaced by the name.

        Raises:
          UserError: there are no names or no templates; a name is empty; two names have the same
            tokens; the model uses a softmax and there is only one name; or a template has no `{}`.
        """
        templates = checked_templates(templates)
        names = checked_names(names, self.tokenizer, self.probabilities, templates)
        embeddings = class_embeddings(self.encode_text, names, templates)
        return ZeroShotClassifier(self, jnp.asarray(embeddings), names)


def class_embeddings(
    encode: Callable[[list[str]], Any], names: Sequence[str], templates: Sequence[str]
) -> np.ndarray:
    """Returns the embedding of each class, float32 `[classes, dim]`.

    A class has one text for each template: the template with the class name in place of `{}`. The
    class's embedding is the mean of the embeddings of its texts, scaled to unit L2 norm. `encode`
    returns L2-normalized embeddings of texts, `[texts, dim]`.
    """
    at_once, means = max(1, MOST_EMBEDDED // len(templates)), []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        texts = [template.replace("{}", name) for name in part for template in templates]
        embeddings = np.asarray(encode(texts)).reshape(len(part), len(templates), -1)
        means.append(embeddings.mean(axis=1))
    classes = np.concatenate(means)
    return classes / np.linalg.norm(classes, axis=-1, keepdims=True)


def checked_names(
    names: Sequence[str], tokenizer: Tokenizer, probabilities: str, templates: Sequence[str]
) -> tuple[str, ...]:
    """Strips spaces from the class names, checks the names and returns them.

    Two names must have different tokens. Because a text tower reads only a limited number of
    tokens, the names are compared within the template that has the fewest characters before the
    name.

    Raises:
      UserError: there is no name; a name is empty or has no tokens; two names have the same tokens;
        or `probabilities` is "softmax" and there is only one name.
    """
    names = tuple(name.strip() for name in ([names] if isinstance(names, str) else names))
    if not names or not all(names):
        raise UserError("class names are empty: give one or more, such as 'cat', 'dog'")
    if len(names) == 1 and probabilities == "softmax":
        raise UserError(
            f"{names[0]!r} is the only class name, and this model's probabilities sum to 1: "
            "give two or more, such as 'cat', 'something else'"
        )
    template = min(templates, key=lambda template: template.index("{}"))
    filled = [template.replace("{}", name) for name in ("", *names)]
    nothing, *texts = (tuple(row) for row in tokenizer(filled).tolist())
    known: dict[tuple[int, ...], str] = {}
    for name, text in zip(names, texts, strict=True):
        if text == nothing:
            raise UserError(
                f"class name {name!r} has no tokens in {template!r}, of which the text tower reads "
                f"{tokenizer.length} tokens: give one with letters, or a shorter template"
            )
        if text in known:
            raise UserError(
                f"class names {known[text]!r} and {name!r} have the same tokens in {template!r}, "
                f"of which the text tower reads {tokenizer.length}: give one, or a shorter template"
            )
        known[text] = name
    return names


def checked_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """Returns the templates; raises UserError for no templates, or for a template without `{}`."""
    templates = tuple([templates] if isinstance(templates, str) else templates)
    for template in templates or ("",):
        if "{}" not in template:
            raise UserError(
                f"template {template!r} has no {{}} for the class name; a valid one is "
                f"{TEMPLATES[0]!r}"
            )
    return templates


class ZeroShotClassifier(ImageModel):
    """An image tower whose head computes logits from the similarity of images and class texts."""

    def __init__(self, model: ImageTextModel, classes: jax.Array, names: tuple[str, ...]):
        """Creates a classifier from a model and the embeddings of classes, `[classes, dim]`."""
        tower = model.image
        super().__init__(
            dataclasses.replace(tower.options, num_classes=len(names)), any_size=tower.any_size
        )
        self.image, self.classes, self.head = tower, nnx.Param(classes), None
        self.logit_scale, self.logit_bias = model.logit_scale, model.logit_bias
        self.about = tower.about and tower.about.for_classes(names, model.probabilities)

    @property
    def pixel_kernel(self) -> jax.Array:
        """Kernel of the first layer, which reads pixels."""
        return self.image.pixel_kernel

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns image embeddings of unit norm, `[batch, dim]`.

        Args:
          dense: return the dense features of the image tower instead.
        """
        if dense:
            return self.image.features(images, rngs, dense=True)
        return unit(self.image(images, rngs).astype(jnp.float32))

    def each_head(self, images: ImagesLike, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, ...]:
        embeddings = self.features(images, rngs)
        return (_logits(embeddings, self.classes[...], self.logit_scale, self.logit_bias),)
