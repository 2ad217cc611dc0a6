"""Classes by name in requests to a model of images and texts, with cached embeddings."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.image_text import (
    MOST_TEXTS,
    ImageTextModel,
    checked_names,
    class_embeddings,
)

MOST_NAMES = 100  # Of a request.
MOST_CHARACTERS = 100  # Of a name.
MOST_CACHED = 4096  # Names whose embeddings are kept.
SIZES = (1, 8, MOST_TEXTS)  # Texts of one call of the text tower; fewer are padded.


class Names:
    """The classes of requests: those of the server, or names in the request.

    Names that are not cached are embedded by the thread that calls `embeddings`; all programs are
    compiled at construction.

    Args:
      model: the model of images and texts.
      templates: texts with `{}` for the name.
      default: embeddings of the server's own classes, float32 `[classes, dim]`.
    """

    def __init__(self, model: ImageTextModel, templates: Sequence[str], default: np.ndarray):
        self._model, self._templates, self._default = model, templates, default
        self._scale = math.exp(float(model.logit_scale[...]))
        self._bias = 0.0 if model.logit_bias is None else float(model.logit_bias[...])
        self._cached: OrderedDict[str, np.ndarray] = OrderedDict()
        for size in SIZES:
            self._encode(["a"] * size)

    def checked(self, names: object) -> tuple[str, ...]:
        """Returns the names of a request without surrounding spaces.

        Raises:
          UserError: they are no list of texts, too many or too long, or not valid as class names.
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
        """Returns the embeddings of checked names, float32 `[names, dim]`, from the cache if there.

        Only one thread may call this.
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
        """Returns the probability of each class, float32 `[classes]`.

        Args:
          image: embedding of the image, of length 1, `[dim]`.
          classes: embeddings of the classes; None: the server's.
        """
        logits = (
            self._scale * ((self._default if classes is None else classes) @ image) + self._bias
        )
        if self._model.probabilities == "sigmoid":
            return 0.5 + 0.5 * np.tanh(0.5 * logits)  # Does not overflow.
        chances = np.exp(logits - logits.max())
        return chances / chances.sum()

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns embeddings of length 1, `[texts, dim]`, in batches of the sizes in `SIZES`."""
        parts = []
        for start in range(0, len(texts), MOST_TEXTS):
            part = [*texts[start : start + MOST_TEXTS]]
            size = next(size for size in SIZES if size >= len(part))
            padded = part + [part[-1]] * (size - len(part))
            parts.append(np.asarray(self._model.encode_text(padded))[: len(part)])
        return np.concatenate(parts)
