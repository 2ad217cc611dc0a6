"""Names, sizes and published weights of models."""

import vit_jax

card = vit_jax.model_card("ViT-L/16", image_size=384)
print(card.name, card.parameters, card.multiply_adds / 1e9)
print([name for name in vit_jax.list_models("*ViT-L/16") if name.startswith("ViT")])
for weights in vit_jax.list_models("*deit*", pretrained=True):
    print(weights.model, weights.tag, weights.pixels)
