"""A model from wherever it is: a workdir, Google's npz, timm, Transformers, or the Hugging Face Hub."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, build, fit, model_name
from vit_jax.models.image_model import About, ImageModel
from vit_jax.models.pixels import from_lists
from vit_jax.models.prediction import Prediction
from vit_jax.published.weights import Weights, find_weights
from vit_jax.runs.workdir import checkpoint_crop, open_any

BATCH_SIZE = 32  # Images that `predict` has on the devices at once, at most.
TOP = 3  # Classes that it names of each image.


class AboutLoaded(About):
    """A record of where a loaded model came from, by which it predicts."""

    def __init__(self, checkpoint: Checkpoint, arguments: dict[str, Any], weights: Weights | None = None):
        super().__init__(model_name(checkpoint.model, arguments), arguments)
        same_head = arguments["num_classes"] == checkpoint.arguments["num_classes"]
        self.place, self.library = checkpoint.place, checkpoint.library
        self.preprocessing, self.objective = checkpoint.preprocessing, checkpoint.objective
        if same_head:
            self.class_names, self.probabilities = checkpoint.class_names, checkpoint.probabilities
        self._checkpoint, self._extractors = checkpoint, {}
        self._weights = weights

    def lines(self, model: ImageModel) -> dict[str, str]:
        try:
            crop = str(checkpoint_crop(self._checkpoint, model.image_size))
        except UserError as error:
            crop = str(error)
        found = {"from": f"{self.place}, {self.library}", "preprocessing": crop}
        return found if self._weights is None else {"published as": str(self._weights)} | found

    def predict(
        self, model: ImageModel, images: Any, top: int | None, threshold: float | None
    ) -> list[Prediction]:
        from vit_jax.evaluation.features import reaching, top_of

        if not model.num_classes:
            raise UserError(
                f"the model of {self.place} has no head: it has features, but predicts no classes"
            )
        top = top_of(top, threshold, model.num_classes, TOP)
        names = self.class_names or [*map(str, range(model.num_classes))]
        source = images_of(images) if model.channels in (1, 3) else Channels(images, model.channels)
        predictions, done = [], 0
        for part in self._stream(model, source, top):
            mask = part["mask"][: len(source) - done]
            if not mask.all():
                raise UserError(f"cannot read {source.describe(done + int(mask.argmin()))}: it is no image")
            for chances, labels in zip(*(values[: len(mask)] for values in part["values"]), strict=True):
                count = reaching(threshold, chances)
                found = tuple(names[label] for label in labels[:count])
                predictions.append(Prediction(source.describe(done), found, tuple(chances[:count].tolist())))
                done += 1
        return predictions

    def _stream(self, model: ImageModel, source: Any, top: int):
        """Batches of probabilities and classes; what computes them is compiled once for a batch size."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from vit_jax.evaluation.features import Extractor, likeliest
        from vit_jax.parallel.mesh import make_mesh, place
        from vit_jax.parallel.sharding import parameter_shardings

        if isinstance(source, Channels):
            compute = nnx.jit(likeliest(top, self.probabilities))
            crop = checkpoint_crop(self._checkpoint, model.image_size)
            for start in range(0, len(source), BATCH_SIZE):
                batch = source.cropped(crop, slice(start, start + BATCH_SIZE))
                found = jax.device_get(compute(model, jnp.asarray(batch)))
                yield dict(values=found, mask=np.ones(len(batch), bool))
            return
        batch_size = min(BATCH_SIZE, 1 << (len(source) - 1).bit_length())  # Few sizes: each is compiled.
        graphdef, params = nnx.split(model)
        params = nnx.to_pure_dict(params)
        key = graphdef, batch_size, top
        if key not in self._extractors:
            mesh = make_mesh(dict(data=None, fsdp=1, tensor=1))
            shardings = parameter_shardings(mesh, params)
            self._extractors[key] = (
                shardings,
                Extractor(
                    graphdef,
                    shardings,
                    mesh,
                    checkpoint_crop(self._checkpoint, model.image_size),
                    compute=likeliest(top, self.probabilities),
                    batch_size=batch_size,
                    workers=0,
                    max_unreadable=len(source),
                    say=lambda line: None,
                ),
            )
        shardings, extractor = self._extractors[key]
        yield from extractor.stream(jax.tree.map(place, params, shardings), source)


def images_of(images: Any):
    """A source without labels of images that a program hands in.

    Args:
      images: a path, of an image, a folder or a pattern; an image, of PIL, as an array or nested lists
        `[height, width, channels]`, or as PyTorch's tensor `[channels, height, width]`; a list of any of
        these; an array `[images, height, width, channels]`; or a data set, as of `handed_in`.

    Raises:
      UserError: there is no such file, or no image.
    """
    from vit_jax.data.image_files import find_images
    from vit_jax.data.sources import handed_in

    if isinstance(images, list) and images and isinstance(images[0], list):  # Numbers; a pair is a tuple.
        alone = from_lists(images[0]).ndim < 3
        images = from_lists(images) if alone else [from_lists(image) for image in images]
    several = isinstance(images, Sequence) and not isinstance(images, str | bytes)
    given: list[Any] = list(images) if several else [images]
    if given and all(isinstance(image, str | Path) for image in given):
        return find_images([str(image) for image in given])
    is_tensor = hasattr(images, "detach")  # PyTorch's, whose images have their channels first.
    if hasattr(images, "ndim") and hasattr(images, "__array__") and not is_tensor:
        images = np.asarray(images)  # Of JAX, TensorFlow, or NumPy itself.
    array: Any = images
    if several:
        images = Listed(given)
    elif is_tensor or isinstance(array, np.ndarray):
        channels = {*array.shape[-1:], *(array.shape[:1] if is_tensor else ())}
        alone = array.ndim == 2 or (array.ndim == 3 and channels & {1, 3, 4})
        images = Listed([array]) if alone else array
    elif not (hasattr(images, "__len__") and hasattr(images, "__getitem__")) or isinstance(images, bytes):
        images = Listed([images])
    return handed_in(images, "prediction", labels=False)


class Channels:
    """Images of another number of channels than files have: arrays uint8 `[height, width, channels]`.

    Args:
      images: an array, or several, in a list or in one array.

    Raises:
      UserError: they are no such arrays.
    """

    def __init__(self, images: Any, channels: int):
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        self._images: list[Any] = list(images) if several else [images]
        for image in self._images or [None]:
            known = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
            if not known or image.shape[-1] != channels or 0 in image.shape:
                what = f"uint8 {list(image.shape)}" if known else f"a {type(image).__name__}"
                raise UserError(
                    f"the model takes images of {channels} channels: hand in NumPy arrays of uint8, [height, "
                    f"width, {channels}], not {what}"
                )

    def __len__(self):
        return len(self._images)

    def describe(self, index: int) -> str:
        """The name of an image in a prediction."""
        return f"prediction data's example {index}"

    def cropped(self, crop: Callable[[np.ndarray], np.ndarray], part: slice) -> np.ndarray:
        """Images of a slice as the model sees them, uint8 `[images, height, width, channels]`.

        The crop is applied to three channels at a time.
        """
        found = []
        for image in self._images[part]:
            channels = image.shape[-1]
            padded = np.pad(image, ((0, 0), (0, 0), (0, -channels % 3)))
            threes = [
                crop(np.ascontiguousarray(padded[..., first : first + 3])) for first in range(0, channels, 3)
            ]
            found.append(np.concatenate(threes, axis=-1)[..., :channels])
        return np.stack(found)


class Listed(list):
    """A list of images."""


def load_model(
    source: str | Path,
    *,
    pretrained: str | None = None,
    say: Callable[[str], None] = print,
    **changes: Any,
) -> ImageModel:
    """The model that a checkpoint holds, fitted to a new task if one is asked for.

    It is an nnx module: `model(images)` gives logits of images that are prepared already. Besides,
    `model.predict(images)` prepares images as the checkpoint says and names their classes, `print(model)`
    shows what it is, and `model.tree()` all of its parameters.

    Args:
      source: the workdir of a run, newest checkpoint, or `WORKDIR@best` (by test accuracy, else test loss) or
        `WORKDIR@STEP`; a `.npz` file of Google's; a `.safetensors` file or a folder of timm or
        Transformers; `hf://owner/name` or `hf://owner/name@revision`; with `pretrained` a model's name.
      pretrained: the tag of published weights, of `list_models(pretrained=True)`, or their repository's name.
      say: is told in a few lines what was found and what became of it.
      **changes: arguments of the model to change, such as `num_classes=10` (a new head of zeros,
        without pre-logits layer; 0 for none) or `image_size=384` (position embeddings resized).

    Raises:
      UserError: there is no such checkpoint, it is damaged, or does not fit; several weights have the tag.
    """
    if pretrained is None:
        return build_model(open_any(source, changes.get("image_size")), say=say, **changes)
    weights = find_weights(str(source), pretrained)
    checkpoint = open_any(f"hf://{weights.repository}", changes.get("image_size"))
    return build_model(checkpoint, say=say, weights=weights, **(weights.arguments | changes))


def build_model(
    checkpoint: Checkpoint,
    *,
    say: Callable[[str], None] = print,
    weights: Weights | None = None,
    **changes: Any,
) -> ImageModel:
    """The model of an open checkpoint, which knows what the model should see; otherwise as `load_model`.

    Args:
      weights: what the checkpoint is published as, where that is known.
    """
    values, sources, done = fit(checkpoint, changes)
    say(checkpoint.describe())
    if weights and (otherwise := _otherwise(weights, checkpoint)):
        say(f"its own files, which hold, prepare images otherwise than its line in the registry: {otherwise}")
    for line in done.describe():
        say(line)
    if values["dtype"] != checkpoint.arguments["dtype"]:
        say(f"computes in {values['dtype']} here")
    model = build(checkpoint.model, values, sources)
    model.about = AboutLoaded(checkpoint, values, weights)
    return model


def _otherwise(weights: Weights, checkpoint: Checkpoint) -> str:
    """Words for what a checkpoint's own preprocessing has other than its published line; empty for none."""
    if (seen := checkpoint.preprocessing) is None:
        return ""
    found = dict(crop=float(seen.share), kind=seen.kind, interpolation=seen.interpolation)
    found |= {name: checkpoint.arguments[name] for name in ("mean", "deviation")}
    words = []
    for name, value in found.items():
        said = getattr(weights, name)
        if said != value and (isinstance(said, str) or not np.allclose(said, value, rtol=0, atol=1e-4)):
            words.append(f"{name} {value}, there {said}")
    return "; ".join(words)
