"""A checkpoint written for another library, and a handler of its errors."""

from pathlib import Path

import vit_jax

try:
    model = vit_jax.load_model("runs/pets@best", num_classes=0, image_size=32)
    written: Path = vit_jax.save_model(model, "pets_exported", library="timm")
    print(written.name)
except vit_jax.UserError as error:
    print(str(error).upper())
