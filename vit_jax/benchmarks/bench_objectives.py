"""FLOPs and time of each objective's training step, compared with the supervised step."""

from collections.abc import Sequence

from vit_jax.benchmarks.bench_train import compare

STEPS = {
    "supervised": {},
    "masked patches": {"objective.name": "masked_patch"},
    "masked autoencoder": {"objective.name": "mae"},
    "with a decoder of 4 layers": {"objective.name": "mae", "mae.decoder_depth": 4},
    "with a decoder of 1 layer": {"objective.name": "mae", "mae.decoder_depth": 1},
}
OF_CONVNEXTS = {"supervised": {}, "masked autoencoder": {"objective.name": "fcmae"}}


def measure(models: Sequence[str], **values) -> dict:
    """Prints and returns FLOPs and time of each objective's training step for each model.

    Args:
      **values: arguments of `bench_train.compare`, except `steps` and `models`.
    """
    figures = {}
    for convolutional, steps in ((False, STEPS), (True, OF_CONVNEXTS)):
        if those := [model for model in models if model.startswith("ConvNeXt") == convolutional]:
            figures |= compare(steps, those, **values)
    return figures
