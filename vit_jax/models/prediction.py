"""A classifier's prediction for one image."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The most likely classes of an image.

    Attributes:
      image: path of the image, or its index among the input images.
      classes: names of the classes, the most likely first; empty if no class reaches the threshold.
      probabilities: probability of each class in `classes`.
    """

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def __str__(self):
        chances = zip(self.classes, self.probabilities, strict=True)
        named = [f"{name} {chance:.1%}" for name, chance in chances] or ["(no class)"]
        return "  ".join([self.image, *named])
