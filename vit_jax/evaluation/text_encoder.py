"""Text embeddings and logits of an image-text model.

The parameters of the model may change between calls, as during training.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.models.image_text import MOST_TEXTS, unit
from vit_jax.models.layers import placing
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import Tokenizer
from vit_jax.parallel.mesh import over_devices, replicated, split_batch, whole_batch
from vit_jax.parallel.sharding import place_activation


class TextEncoder:
    """Text encoder of an image-text model, on all devices of a mesh.

    Batches of texts are padded to a power of two, so the encoder is compiled for a few batch sizes
    only.

    Args:
      tokenizer: function from texts to tokens, int32 `[texts, length]`.
      probabilities: `softmax` or `sigmoid`, the function from logits to probabilities.
      load: function that returns the graph definition, parameters and shardings of the module that
        contains the text tower. It is called once, when the first text is encoded.
      tower: function that returns the module's text tower.
      similarity: function `params -> (scale, bias)`. A logit is `scale * cosine + bias`. The bias
        is None for a model without a bias.

    Attributes:
      params: the parameters to use; None: the parameters that `load` has returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        probabilities: str,
        mesh: Mesh,
        load: Callable[[], tuple[nnx.GraphDef, dict, dict]],
        tower: Callable[[Any], TextTower],
        similarity: Callable[[dict], tuple[float, float | None]],
    ):
        self.tokenizer, self.probabilities = tokenizer, probabilities
        self.params: dict | None = None
        self._mesh, self._load, self._tower, self._similarity = mesh, load, tower, similarity
        self._loaded: tuple[Callable, dict] | None = None

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the L2-normalized embeddings of all texts, float32 `[texts, dim]`.

        Every process of the run gets all embeddings.
        """
        if self._loaded is None:
            graphdef, params, shardings = self._load()
            self._loaded = self._compiled(graphdef, shardings), params
        embed, params = self._loaded[0], self._current
        tokens, parts = self.tokenizer(texts), []
        for start in range(0, len(tokens), MOST_TEXTS):
            part = tokens[start : start + MOST_TEXTS]
            size = whole_batch(self._mesh, min(MOST_TEXTS, 1 << (len(part) - 1).bit_length()))
            padded = np.pad(part, ((0, size - len(part)), (0, 0)), mode="edge")
            found = embed(params, over_devices(padded, self._mesh))
            parts.append(jax.device_get(found)[: len(part)])
        return np.concatenate(parts)

    @property
    def _current(self) -> dict:
        """The parameters to use. They are available after the first text was encoded."""
        assert self._loaded is not None
        return self._loaded[1] if self.params is None else self.params

    def logits(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Returns the logits of all pairs of an image and a text, float32 `[images, texts]`.

        Args:
          images: embeddings of images with unit norm, `[images, dim]`.
          texts: embeddings of texts with unit norm, `[texts, dim]`.
        """
        scale, bias = self._similarity(self._current)
        return np.float32(scale) * (images @ texts.T) + np.float32(bias or 0)

    def _compiled(self, graphdef: nnx.GraphDef, shardings: dict) -> Callable:
        def embed(params, tokens):
            with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
                return unit(self._tower(nnx.merge(graphdef, params))(tokens))

        mesh = self._mesh

        places = shardings, split_batch(mesh)
        return jax.jit(embed, in_shardings=places, out_shardings=replicated(mesh))
