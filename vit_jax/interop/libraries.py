"""The libraries whose checkpoints are read and written."""

from vit_jax.interop import google, open_clip, openai, timm, transformers

# In the order in which they are asked whether files are theirs: timm claims all that are left.
LIBRARIES = {
    "google": google.LIBRARY,
    "transformers": transformers.LIBRARY,
    "open_clip": open_clip.LIBRARY,
    "openai": openai.LIBRARY,
    "timm": timm.LIBRARY,
}
WRITTEN = [name for name, library in LIBRARIES.items() if library.written]
