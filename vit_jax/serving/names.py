"""Class names in requests to an image-text model, with cached embeddings."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.image_text import MOST_TEXTS, ImageTextModel, checked_names, class_embeddings

MOST_NAMES = 100  # Maximum number of names in a request.
MOST_CHARACTERS = 100  # Maximum length of a name.
MOST_CACHED = 4096  # Maximum number of cached embeddings.
SIZES = (1, 8, MOST_TEXTS)  # Batch sizes of the text tower; smaller batches are padded.


class Names:
    """Class names of requests: each request uses the server's classes or contains its own names.

    All programs of the text tower are compiled at construction.

    Args:
      templates: prompt templates, with `{}` for the name.
      default: embeddings of the server's classes, float32 `[classes, dim]`.
    """

    def __init__(self, model: ImageTextModel, templates: Sequence[str], default: np.ndarray):
        self._model, self._templates, self._default = model, templates, default
        self._scale = math.exp(float(model.logit_scale[...]))
        self._bias = 0.0 if model.logit_bias is None else float(model.logit_bias[...])
        self._cached: OrderedDict[str, np.ndarray] = OrderedDict()
        for size in SIZES:
            self._encode(["a"] * size)

    def checked(self, names: object) -> tuple[str, ...]:
        """Checks the names of a request, and returns them without spaces at both ends.

        Raises:
          UserError: the names are not a list of texts, too many, too long, or invalid.
        """
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError('names must be a list of texts, such as ["cat", "dog"]')
        if len(names) > MOST_NAMES:
            raise UserError(f"a request may have {MOST_NAMES} names, and this one has {len(names)}")
        for name in names:
            if len(name) > MOST_CHARACTERS:
                raise UserError(
                    f"a name may have {MOST_CHARACTERS} characters, and {name[:20]!r}... has "
                    f"{len(name)}"
                )
            if not name.isprintable():
                raise UserError(f"the name {name!r} has a character that cannot be printed")
        model = self._model
        return checked_names(names, model.tokenizer, model.probabilities, self._templates)

    def embeddings(self, names: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of valid names, float32 `[names, dim]`.

        Cached embeddings are reused. Other names are computed in the calling thread and then
        cached. Not thread-safe.
        """
        found = {name: self._cached[name] for name in names if name in self._cached}
        if new := [name for name in names if name not in found]:
            found |= zip(new, class_embeddings(self._encode, new, self._templates), strict=True)
        for name in names:
            self._cached[name] = found[name]
            self._cached.move_to_end(name)
        while len(self._cached) > MOST_CACHED:
            self._cached.popitem(last=False)
        return np.stack([found[name] for name in names])

    def probabilities(self, image: np.ndarray, classes: np.ndarray | None) -> np.ndarray:
        """Returns the probability of each class for an image, float32 `[classes]`.

        `image` is the image's normalized embedding, `[dim]`. `classes` are the embeddings of the
        classes; None: the server's classes.
        """
        similarities = (self._default if classes is None else classes) @ image
        logits = self._scale * similarities + self._bias
        if self._model.probabilities == "sigmoid":
            return 0.5 + 0.5 * np.tanh(0.5 * logits)  # The sigmoid, without overflow.
        chances = np.exp(logits - logits.max())
        return chances / chances.sum()

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns normalized embeddings, `[texts, dim]`, computed in batches of `SIZES`."""
        parts = []
        for start in range(0, len(texts), MOST_TEXTS):
            part = [*texts[start : start + MOST_TEXTS]]
            size = next(size for size in SIZES if size >= len(part))
            padded = part + [part[-1]] * (size - len(part))
            parts.append(np.asarray(self._model.encode_text(padded))[: len(part)])
        return np.concatenate(parts)
