"""Pooled features, and the features of each patch."""

import jax
import numpy as np

import vit_jax

images = np.zeros((2, 224, 320, 3), np.uint8)
vit = vit_jax.create_model("ViT-Ti/16", image_size=224).resized((224, 320))
pooled: jax.Array = vit.features(images)
print(pooled.mean(0), vit.features(images, dense=True).shape)

convnext = vit_jax.create_model("ConvNeXt-Atto")
stages: list[jax.Array] = convnext.features(images, dense=True)
print([stage.shape for stage in stages])
