"""Writes inception.json: the distribution of TensorFlow's `sample_distorted_bounding_box`.

    pip install tensorflow && python tests/data/golden/make_inception.py

The file contains quantiles of each measure of the operator's rectangles in each case. A quantile is
stored with the share of rectangles at or below it. The stored values are from TensorFlow 2.21.0.
"""

import json
import re
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("inception.json")
DRAWS = 200_000
ASPECT = (3 / 4, 4 / 3)
CASES = {  # Height, width, range of the area, range of the aspect ratio.
    "photograph": (375, 500, (0.05, 1.0), ASPECT),
    "upright": (500, 375, (0.05, 1.0), ASPECT),
    "panorama": (100, 1000, (0.05, 1.0), ASPECT),
    "too wide for most": (50, 300, (0.2, 1.0), ASPECT),
    "too wide for any": (10, 1000, (0.9, 1.0), ASPECT),
    "part": (224, 300, (0.3, 0.6), (0.5, 1.5)),
    "digits": (16, 16, (0.3, 1.0), ASPECT),
    "tiny": (4, 5, (0.05, 1.0), ASPECT),
    "three rows": (3, 3, (0.2, 0.7), ASPECT),
}


def measures(boxes: np.ndarray, height: int, width: int) -> dict[str, np.ndarray]:
    """Returns measures of rectangles by name.

    Args:
      boxes: `[n, 4]` rectangles: left, top, right, bottom, as in `Box`.
    """
    left, top, right, bottom = boxes.T
    w, h = right - left, bottom - top
    return {
        "width": w,
        "height": h,
        "area": w * h / (height * width),
        "aspect": w / h,
        "left": left,
        "top": top,
        "beside": width - right,
        "below": height - bottom,
    }


def shares(boxes: np.ndarray, height: int, width: int) -> dict[str, list[tuple[float, float]]]:
    """Returns quantiles of each measure, with the share of rectangles at or below each."""
    found = {}
    for name, values in measures(boxes, height, width).items():
        points = np.unique(np.quantile(values, np.linspace(0.05, 0.95, 10), method="nearest"))
        # The threshold is halfway to the next value, so that rounding errors have no effect.
        points = [(x + min(values[values > x], default=x + 1)) / 2 for x in points]
        found[name] = [(round(float(x), 6), round(float((values <= x).mean()), 5)) for x in points]
    return found


def draw(height: int, width: int, area, aspect, draws: int = DRAWS) -> np.ndarray:
    """Returns `[draws, 4]` rectangles of the operator."""
    import tensorflow as tf

    @tf.function
    def all_of_them():
        def one(_):
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                (height, width, 3),
                tf.zeros([1, 0, 4]),
                seed=1,
                min_object_covered=0.0,
                aspect_ratio_range=aspect,
                area_range=area,
                max_attempts=100,
                use_image_if_no_bounding_boxes=True,
            )
            return tf.concat([begin[1::-1], begin[1::-1] + size[1::-1]], 0)

        return tf.map_fn(one, tf.range(draws), fn_output_signature=tf.int32)

    return all_of_them().numpy()


if __name__ == "__main__":
    golden = {name: shares(draw(*case), *case[:2]) for name, case in CASES.items()}
    lines = re.sub(r"\n {3,}", " ", json.dumps(golden, indent=1))  # One line per measure.
    GOLDEN.write_text(re.sub(r"\n  \]", " ]", lines) + "\n")
