"""The encoder of OpenAI's DALL-E: safetensors with the tensor names of OpenAI's code.

The folder may also contain a `config.json`, which describes the preprocessing as in timm.
"""

from vit_jax.interop import timm
from vit_jax.interop.library import Library
from vit_jax.interop.openai.openai_dvae import FIRST, FORMAT
from vit_jax.interop.preprocessing import Preprocessing


def _preprocessing(
    config: dict, processor_config: dict, channels: int
) -> tuple[dict, Preprocessing | None, str]:
    """Without a `config.json` the preprocessing is OpenAI's."""
    return (
        timm.LIBRARY.preprocessing(config, processor_config, channels) if config else ({}, None, "")
    )


LIBRARY = Library(
    title="OpenAI's DALL-E",
    formats=(FORMAT,),
    suffix="",
    claims=lambda path, config, tensors: FIRST in tensors,
    prepare=lambda path, tensors, config: (tensors, config),
    unknown=lambda config, tensors: "these are not the tensors of DALL-E's encoder",
    preprocessing=_preprocessing,
    class_names=lambda config: [],
    files=timm.LIBRARY.files,
)
