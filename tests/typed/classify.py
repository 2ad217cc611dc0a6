"""A model with random parameters, called with arrays."""

import jax
import numpy as np

import vit_jax

images = np.zeros((2, 224, 224, 3), np.uint8)
model = vit_jax.create_model("ViT-S/16", num_classes=10, image_size=224)
logits: jax.Array = model(images)
print(logits.shape, logits.argmax(-1).tolist())
