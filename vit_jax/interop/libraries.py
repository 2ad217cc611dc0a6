"""The libraries whose checkpoints are read and written."""

from vit_jax.interop import google, open_clip, openai, timm, transformers

# Files belong to the first library whose `claims` returns True; timm's always does.
LIBRARIES = {
    "google": google.LIBRARY,
    "transformers": transformers.LIBRARY,
    "open_clip": open_clip.LIBRARY,
    "openai": openai.LIBRARY,
    "timm": timm.LIBRARY,
}
WRITTEN = [name for name, library in LIBRARIES.items() if library.written]
