"""A source whose captions are known without reading its images."""

from vit_jax.data.fields import TEXT
from vit_jax.data.sources.base import Source


class Captioned(Source):
    """Images that may have captions.

    Attributes:
      captions: captions of each image; empty: captions are not read.
    """

    captions: tuple[tuple[str, ...], ...] = ()

    @property
    def fields(self):
        return (TEXT,) if self.captions else ()

    def fields_of(self, index):
        return {TEXT: self.captions[index]} if self.captions else {}

    def known_fields(self, indices=None):
        chosen = range(len(self)) if indices is None else indices
        return ("\n".join(self.captions[index]).encode() for index in chosen if self.captions)
