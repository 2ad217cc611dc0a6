"""`LIBRARIES`: all libraries whose checkpoints can be read and written."""

from vit_jax.interop import google, open_clip, openai, timm, transformers

# Files are read by the first library whose `claims` returns True. timm is the last library, and its
# `claims` always returns True.
LIBRARIES = {
    "google": google.LIBRARY,
    "transformers": transformers.LIBRARY,
    "open_clip": open_clip.LIBRARY,
    "openai": openai.LIBRARY,
    "timm": timm.LIBRARY,
}
WRITTEN = [name for name, library in LIBRARIES.items() if library.written]
