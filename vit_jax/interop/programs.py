"""Exports a model as a program in one file, StableHLO or ONNX, and checks its outputs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.image_text import TextPart
from vit_jax.interop.preprocessing import DEFAULT_PREPROCESSING, Preprocessing, per_channel
from vit_jax.models.dense.dense_model import DenseModel
from vit_jax.models.dense.detector import Detector
from vit_jax.models.image_text import unit
from vit_jax.models.layers import placing
from vit_jax.options.text import TextOptions

PLATFORMS = ("cpu", "cuda", "tpu")
# Maximum size of the parameters in a file. The formats of the files, protocol buffers and
# flatbuffers, are limited to 2 GiB.
MOST_BYTES = 2**31 - 2**20


def as_served(model):
    """Returns the model without scan and rematerialization, which are useful only in training."""
    for _, part in nnx.iter_modules(model):
        for name, value in dict(scan=False, remat="none").items():
            if hasattr(part, name):
                setattr(part, name, value)
    return model


class Embedder(nnx.Module):
    """An image tower or a text tower that returns normalized embeddings."""

    def __init__(self, tower: nnx.Module):
        self.tower = tower

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns embeddings of images or tokens, float32 `[batch, dim]`."""
        return unit(self.tower(inputs).astype(np.float32))


class Objects(nnx.Module):
    """A detector that returns one array of objects, and a second array if it predicts masks."""

    def __init__(self, detector: Detector):
        self.detector = detector

    def __call__(self, images: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Returns objects `[batch, objects, 6]`, the highest score first, and their masks, if any.

        The six numbers of an object are left, top, right and bottom (relative to the image, in [0,
        1]), the score and the class. Masks are logits `[batch, objects, rows, columns]`, which
        cover the whole image.
        """
        scores, labels, boxes, masks = self.detector(images)
        columns = scores[..., None], labels[..., None].astype(boxes.dtype)
        objects = jnp.concatenate([boxes, *columns], axis=-1)
        return objects if masks is None else (objects, masks)


def function_of(model) -> Callable:
    """Returns the model as a function of images or tokens, with float32 outputs.

    The function is traced for a CPU, because all platforms support the operations for CPUs. The
    operations for GPUs, such as cuDNN's attention, run on GPUs only.
    """
    graphdef, params = nnx.split(model)

    def call(inputs: jax.Array) -> Any:
        with placing(lambda _, x: x, platform="cpu"):
            outputs = nnx.merge(graphdef, params)(inputs)
        return jax.tree.map(lambda x: x.astype(np.float32), outputs)

    return call


def any_batch(shape: tuple[int, ...], dtype: np.dtype):
    """Returns shape and dtype of a batch of inputs, with a symbolic batch size.

    `shape` is the shape of one input.
    """
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *shape), dtype)


def metadata_of(model, dtype: np.dtype, preprocessing: Preprocessing | None) -> dict[str, Any]:
    """Returns the metadata that a server needs: the preprocessing of images, and class names.

    `dtype` is the dtype of the program's images. `preprocessing` is the checkpoint's; None:
    unknown.
    """
    seen, size = preprocessing or DEFAULT_PREPROCESSING, model.image_size
    smoothed = seen.interpolation not in ("bilinear", "area")
    facts = {
        "input_dtype": str(dtype),
        "input_layout": "NHWC",
        "input_range": [0, 255] if dtype == np.uint8 else [-1, 1],
        "channels": {1: "grey", 3: "RGB"}.get(model.channels, model.channels),
        "image_size": [*size],
        "resize": seen.kind,
        "resize_to": int(seen.resize(size)),
        "crop": "center",
        "interpolation": seen.interpolation.removesuffix("_antialias"),
        "antialias": smoothed,
        "preprocessing_known": preprocessing is not None,
        "mean": per_channel(model.mean, model.channels),
        "std": per_channel(model.std, model.channels),
        "normalization": "in the program, whose input is pixels in input_range; mean and std are "
        "of [0, 1]",
    }
    # Height and width of the resized image are the crop's height and width divided by `share`: a
    # `square` resize changes the aspect ratio to theirs, and with `cover` they are the minimum.
    if seen.kind == "square" or (seen.kind == "short_side" and size[0] != size[1]):
        facts["resize"] = {"short_side": "cover"}.get(seen.kind, seen.kind)
        facts["resize_to"] = [int(side / seen.share) for side in size]
    elif seen.kind == "fit":
        facts["resize_to"], facts["crop"] = [*size], "none: padded at the right and at the bottom"
    if model.num_classes:
        about = model.about
        facts["class_names"] = [*about.class_names] if about else []
        facts["probabilities"] = about.probabilities if about else "softmax"
    return facts


def dense_metadata_of(
    model: DenseModel, dtype: np.dtype, preprocessing: Preprocessing | None
) -> dict[str, Any]:
    """Returns the metadata that a server of a dense prediction model needs; see `metadata_of`."""
    facts = metadata_of(model.model, dtype, preprocessing)
    return facts | {"output": model.output[1], "class_names": [*model.class_names]}


def text_metadata_of(text_part: TextPart) -> dict[str, Any]:
    """Returns the metadata that a server needs to tokenize texts and to compare embeddings."""
    options = text_part.tower.options
    return {
        "input_dtype": "int32",
        "input_layout": "NL",
        "length": options.length,
        "vocabulary": options.vocabulary,
        "padding_token": text_part.tokenizer.padding,
        "end_token": text_part.tokenizer.end,
        "tokenizer_files": [file.name for file in text_part.tokenizer.files],
        "text_cleaning": text_part.tokenizer.cleaning or "none: the tokens are bytes of UTF-8",
    } | similarity_of(text_part)


def similarity_of(text_part: TextPart) -> dict[str, Any]:
    """Returns the metadata to compute probabilities from image and text embeddings."""
    return {
        "output": "embeddings of length 1",
        "logits": "exp(logit_scale) * images @ texts.T + logit_bias",
        "logit_scale": text_part.logit_scale,
        "logit_bias": text_part.logit_bias or 0.0,
        "probabilities": text_part.probabilities,
    }


def write_stablehlo(
    model,
    file: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    metadata: Mapping[str, Any] | None = None,
) -> Callable:
    """Writes a model with jax.export, and returns a function that runs the file.

    StableHLO files cannot store metadata. The metadata are written to `metadata_file(file)`.
    """
    # The size of the parameters is checked before the export. Without this check, JAX would run for
    # minutes before it raises an error.
    if (size := sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))) > MOST_BYTES:
        raise UserError(
            f"its parameters take {size / 1e9:.1f} GB, and StableHLO is limited to "
            f"{MOST_BYTES / 1e9:.1f}; "
            "--dtype=float16 and a file called .onnx take half"
        )
    exported = jax.export.export(jax.jit(function_of(model)), platforms=PLATFORMS)(
        any_batch(shape, dtype)
    )
    file.write_bytes(exported.serialize())
    if metadata:
        text = json.dumps(metadata, indent=2, ensure_ascii=False) + "\n"
        metadata_file(file).write_text(text, encoding="utf-8", errors="backslashreplace")
    return jax.export.deserialize(bytearray(file.read_bytes())).call


def metadata_file(file: Path) -> Path:
    """Returns the path of the JSON file with the metadata of a StableHLO program."""
    return file.with_name(f"{file.name}.json")


def write_onnx(
    model,
    file: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    metadata: Mapping[str, Any] | None = None,
    names: tuple[str, ...] = ("images", "logits"),
) -> Callable:
    """Writes a model with `vit_jax.interop.onnx`, and returns a function that runs the file.

    The metadata are written to `metadata_props`, strings unchanged and other values as JSON. ONNX's
    standard metadata for image pixels are added.

    Args:
      model: the model.
      file: path of the file.
      shape: shape of one input, without the batch.
      dtype: dtype of the inputs.
      metadata: the metadata; None: no metadata.
      names: name of the program's input, followed by the names of its outputs.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f'{error.name} is not installed; pip install -e ".[onnx]" brings it'
        ) from error
    from vit_jax.interop.onnx import convert

    written = convert(function_of(model), any_batch(shape, dtype), names, MOST_BYTES)
    if metadata:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in metadata.items()
        }
        pixels = _onnx_pixels(shape[-1], dtype) if names[0] == "images" else {}
        onnx.helper.set_model_props(written, texts | pixels)
    onnx.checker.check_model(written, full_check=True)
    file.write_bytes(written.SerializeToString())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(batch: np.ndarray) -> Any:
        outputs = session.run(None, {names[0]: batch})
        return outputs[0] if len(outputs) == 1 else outputs

    return run


def _onnx_pixels(channels: int, dtype: np.dtype) -> dict[str, str]:
    """Returns ONNX's standard metadata for image pixels; {} for unusual numbers of channels."""
    formats = {1: "Gray8", 3: "Rgb8"}
    if channels not in formats:
        return {}
    return {
        "Image.BitmapPixelFormat": formats[channels],
        "Image.ColorSpaceGamma": "SRGB",
        "Image.NominalPixelRange": "NominalRange_0_255" if dtype == np.uint8 else "Normalized_1_1",
    }


def random_images(shape: tuple[int, ...], dtype: np.dtype, batch: int) -> np.ndarray:
    """Returns random images `[batch, *shape]` of uint8, or of floats in [-1, 1]."""
    rng = np.random.default_rng(batch)
    if dtype == np.uint8:
        return rng.integers(256, size=(batch, *shape), dtype=np.uint8)
    return rng.uniform(-1, 1, (batch, *shape)).astype(dtype)


def random_tokens(options: TextOptions, batch: int) -> np.ndarray:
    """Returns random tokens, int32 `[batch, length]`, with the end token at random positions."""
    rng = np.random.default_rng(batch)
    tokens = rng.integers(options.vocabulary, size=(batch, options.length), dtype=np.int32)
    tokens[range(batch), rng.integers(options.length, size=batch)] = options.end
    return tokens


def difference(model, run: Callable, inputs: np.ndarray) -> float:
    """Returns the largest difference between the outputs of a model and of the exported program.

    The difference is relative to the largest output. An object that the model detects is compared
    with the most similar object that the program detects, because objects with equal scores may be
    in any order.
    """
    expected, actual = (
        jax.tree.map(np.asarray, call(inputs)) for call in (jax.jit(function_of(model)), run)
    )
    if isinstance(model, Objects):
        images = ([*zip(*outputs_of(x), strict=True)] for x in (actual, expected))
        return max(map(_objects_difference, *images))
    return _relative(actual, expected)


def outputs_of(result: Any) -> tuple:
    """Returns the outputs of a program as a tuple."""
    return result if isinstance(result, tuple | list) else (result,)


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference of two arrays divided by the largest value of `expected`."""
    return float(np.abs(actual - expected).max() / (np.abs(expected).max() or 1))


def _objects_difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Returns the largest difference of the objects that model and program detect in an image.

    Each object is compared with the most similar object of the other result. Only the half of the
    objects with the higher scores is compared, because rounding decides which objects with low
    scores are detected. Objects of different classes differ by 1 or more.

    Args:
      first, second: outputs of `Objects` for an image: objects `[objects, 6]` and, if any, masks.
    """
    distances = np.abs(first[0][:, None] - second[0]).max(axis=-1)
    half = -(-len(distances) // 2)
    nearest = distances[:half].argmin(axis=1)
    worst = [distances[:half].min(axis=1).max(), distances[:, :half].min(axis=0).max()]
    for masks, others in zip(first[1:], second[1:], strict=True):
        worst.append(_relative(masks[:half], others[nearest]))
    return float(max(worst))
