"""The answer of a model of classes to an image."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image.

    Attributes:
      image: its path, or its place among the images that were handed in.
      classes: names, the likeliest first; none where no class reaches a threshold.
      probabilities: float, of each of these classes.
    """

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def __str__(self):
        chances = zip(self.classes, self.probabilities, strict=True)
        named = [f"{name} {chance:.1%}" for name, chance in chances] or ["(no class)"]
        return "  ".join([self.image, *named])
