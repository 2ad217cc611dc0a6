"""Lists and PIL images as inputs instead of arrays."""

import numpy as np
from PIL import Image

import vit_jax

model = vit_jax.create_model("ViT-Ti/16", num_classes=10, image_size=32)
photograph = Image.new("RGB", (32, 32))
print(model(photograph).shape, model([photograph, photograph]).shape)
print(model([np.zeros((32, 32, 3), np.uint8)]).shape)
print(model.features([photograph]).shape)
