"""Intermediate results in addition to the logits."""

import numpy as np

import vit_jax

vit = vit_jax.create_model("ViT-Ti/16", num_classes=10, image_size=32)
logits, captured = vit(np.zeros((1, 32, 32, 3), np.uint8), capture=("attention", "tokens"))
print(logits.shape, captured["attention"][-1].shape, len(captured["tokens"]))
