"""Loading of models: from other libraries' files, the Hugging Face Hub, or a run's workdir."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, fill, model_name, sketch
from vit_jax.interop.open import open_checkpoint
from vit_jax.models.image_model import About, ImageModel
from vit_jax.models.prediction import Prediction
from vit_jax.options.model import ImageOptions
from vit_jax.published.weights import Weights, find_weights

if TYPE_CHECKING:
    from vit_jax.inference import Predictor


class AboutLoaded(About):
    """Metadata of a loaded model: name, source, preprocessing and class names.

    Its method `predict` applies the checkpoint's preprocessing and the model.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: ImageOptions, weights: Weights | None = None
    ):
        super().__init__(model_name(options))
        self.place, self.library = checkpoint.place, checkpoint.library
        self.preprocessing, self.objective = checkpoint.preprocessing, checkpoint.objective
        if options.num_classes == checkpoint.options.num_classes:
            self.class_names, self.probabilities = checkpoint.class_names, checkpoint.probabilities
        self._checkpoint, self._weights = checkpoint, weights
        self._predictor: Predictor | None = None

    def for_classes(self, names: tuple[str, ...], probabilities: str) -> About:
        other = super().for_classes(names, probabilities)
        assert isinstance(other, AboutLoaded)
        other._predictor = None  # A predictor depends on `probabilities`, so it is not shared.
        return other

    def lines(self, model: ImageModel) -> dict[str, str]:
        # The module is imported here, because it imports the code for reading images. Most uses of
        # a model do not need this code.
        from vit_jax.checkpoint_crop import checkpoint_crop

        try:
            crop = str(checkpoint_crop(self._checkpoint, model.image_size))
        except UserError as error:
            crop = str(error)
        lines = {"from": f"{self.place}, {self.library}", "preprocessing": crop}
        return lines if self._weights is None else {"published as": str(self._weights)} | lines

    def predict(
        self, model: ImageModel, images: Any, top: int | None, threshold: float | None
    ) -> list[Prediction]:
        if self._predictor is None:
            # The module is imported here, because it imports the code for reading images, which
            # takes a second.
            from vit_jax.inference import Predictor

            self._predictor = Predictor(self._checkpoint, self.probabilities)
        return self._predictor(model, images, self.class_names, top, threshold)


def load_model(
    source: str | Path,
    *,
    pretrained: str | None = None,
    log: Callable[[str], None] = print,
    **changes: Any,
) -> ImageModel:
    """Loads the model of a checkpoint. Arguments of the model can be changed for a new task.

    The model is an nnx module: `model(images)` computes logits of preprocessed images.
    `model.predict(images)` applies the checkpoint's preprocessing and names classes,
    `print(model)` prints a summary, and `model.tree()` prints all parameters.

    Args:
      source: one of these:

        - The workdir of a run, for its newest checkpoint.
        - `WORKDIR@STEP`, or `WORKDIR@best` for the checkpoint with the highest k-NN accuracy.
          Without k-NN it is the one with the highest accuracy, and without accuracy the one with
          the lowest loss. The metrics are those of the split for model selection: `data.dev_split`
          or, if it is not set, the test split.
        - A `.npz` file of Google's.
        - A `.safetensors` file or a folder of timm or Transformers.
        - `hf://owner/name` or `hf://owner/name@revision`.
        - The name of a model, if `pretrained` is set.

      pretrained: tag of published weights, or the name of their repository.
        `list_models(pretrained=True)` lists them.
      log: callback for each line of the log: the checkpoint, and how its parameters were adapted.
      **changes: arguments of the model to change. For example, `num_classes=10` adds a new head
        with parameters of zeros and without pre-logits layer, `num_classes=0` removes the head, and
        `image_size=384` resizes position embeddings.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or is incompatible with the arguments;
        or several published weights have the tag.
    """
    if pretrained is None:
        return build_model(open_checkpoint(source, changes.get("image_size")), log=log, **changes)
    weights = find_weights(str(source), pretrained)
    checkpoint = open_checkpoint(f"hf://{weights.repository}", changes.get("image_size"))
    return build_model(checkpoint, log=log, weights=weights, **(weights.arguments | changes))


def build_model(
    checkpoint: Checkpoint,
    *,
    log: Callable[[str], None] = print,
    weights: Weights | None = None,
    **changes: Any,
) -> ImageModel:
    """Builds the model of an open checkpoint.

    Args:
      log: callback for each line of the log.
      weights: entry in the registry of published weights; None: the weights are not published.
      **changes: arguments of the model to change, as in `load_model`.
    """
    options, sources, report = fit(checkpoint, changes)
    log(checkpoint.describe())
    if weights and (differences := _preprocessing_differences(weights, checkpoint)):
        log(
            "the checkpoint's preprocessing is used, which differs from the registry's: "
            f"{differences}"
        )
    for line in report.describe():
        log(line)
    if options.dtype != checkpoint.options.dtype:
        log(f"computes in {options.dtype} here")
    model = fill(sketch(options), sources)
    model.about = AboutLoaded(checkpoint, options, weights)
    return model


def _preprocessing_differences(weights: Weights, checkpoint: Checkpoint) -> str:
    """Describes how the preprocessing of a checkpoint differs from the registry's; empty: equal."""
    if (preprocessing := checkpoint.preprocessing) is None:
        return ""
    values = dict(
        crop=float(preprocessing.share),
        kind=preprocessing.kind,
        interpolation=preprocessing.interpolation,
    )
    values |= dict(mean=checkpoint.options.mean, std=checkpoint.options.std)
    differences = []
    for name, value in values.items():
        published = getattr(weights, name)
        is_name = isinstance(published, str)
        if published != value and (is_name or not np.allclose(published, value, rtol=0, atol=1e-4)):
            differences.append(f"{name} {value}, there {published}")
    return "; ".join(differences)
