"""The likeliest classes of photographs, with their probabilities."""

from PIL import Image

import vit_jax

model = vit_jax.load_model("runs/pets")
print(model)
for prediction in model.predict(["cat.jpg", "dog.jpg"], top=3):
    print(prediction.image, prediction.classes[0], f"{prediction.probabilities[0]:.1%}")
best: vit_jax.Prediction = model.predict(Image.open("cat.jpg"))[0]
named = dict(zip(best.classes, best.probabilities, strict=True))
print({name: round(chance, 3) for name, chance in named.items()})
