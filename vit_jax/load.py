"""Loading of models: from other libraries' files, the Hugging Face Hub, or a run's workdir."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, build, model_name
from vit_jax.interop.open import open_checkpoint
from vit_jax.models.image_model import About, ImageModel
from vit_jax.models.prediction import Prediction
from vit_jax.options.model import ImageOptions
from vit_jax.published.weights import Weights, find_weights

if TYPE_CHECKING:
    from vit_jax.inference import Predictor


class AboutLoaded(About):
    """Metadata of a loaded model; `predict` applies the checkpoint's preprocessing."""

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
        other._predictor = None  # It depends on `probabilities`.
        return other

    def lines(self, model: ImageModel) -> dict[str, str]:
        # Models do not need the code for reading images.
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
            # Imported here: the code for reading images takes a second to import.
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
    """Loads the model of a checkpoint, adapted to a new task where arguments are changed.

    The model is an nnx module: `model(images)` computes logits of preprocessed images.
    `model.predict(images)` applies the checkpoint's preprocessing and names classes,
    `print(model)` prints a summary, and `model.tree()` prints all parameters.

    Args:
      source: the workdir of a run (its newest checkpoint), `WORKDIR@best` (best test accuracy, else
        test loss) or `WORKDIR@STEP`; a `.npz` file of Google's; a `.safetensors` file or a folder
        of timm or Transformers; `hf://owner/name` or `hf://owner/name@revision`; or, with
        `pretrained`, the name of a model.
      pretrained: tag of published weights, listed by `list_models(pretrained=True)`, or the name of
        their repository.
      log: callback for each line of the log: the checkpoint, and how its parameters were adapted.
      **changes: arguments of the model to change, such as `num_classes=10` (a new head, all zeros,
        without pre-logits layer; 0 for no head) or `image_size=384` (position embeddings are
        resized).

    Raises:
      UserError: the checkpoint does not exist, is damaged, or does not match the arguments; several
        weights have the tag.
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
    """Builds the model of an open checkpoint; other arguments as in `load_model`.

    Args:
      weights: the registry's entry for published weights.
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
    model = build(options, sources)
    model.about = AboutLoaded(checkpoint, options, weights)
    return model


def _preprocessing_differences(weights: Weights, checkpoint: Checkpoint) -> str:
    """Describes differences between a checkpoint's preprocessing and the registry's; '': none."""
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
