"""`TextFormat`: a text tower in another library's files."""

from typing import NamedTuple

from vit_jax.interop.layout import Rule
from vit_jax.interop.library import Tensors
from vit_jax.options.text import TextOptions


class TextFormat(NamedTuple):
    """A text tower in a file of an image-text model.

    Attributes:
      title: the library's name in messages.
      options: arguments of the text tower.
      rules: rules that map the text tower's parameters to tensor names.
      tensors: tensors of the text tower, with the names in `rules`.
      probabilities: a key of `PROBABILITIES`: `softmax` or `sigmoid`.
      cleaning: kind of text cleaning, as in `open_tokenizer`.
      logit_scale: name of the tensor with the logarithm of the factor that multiplies cosine
        similarities.
      logit_bias: name of the tensor with the bias of the logits; None: the model has no bias.
    """

    title: str
    options: TextOptions
    rules: tuple[Rule, ...]
    tensors: Tensors
    probabilities: str
    cleaning: str
    logit_scale: str = "logit_scale"
    logit_bias: str | None = None
