"""A model as a program in one file, of images alone: StableHLO and ONNX, and whether it computes the same."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError

PLATFORMS = ("cpu", "cuda", "tpu")
MOST_BYTES = 2**31 - 2**20  # Of parameters in a file: protocol buffers and flatbuffers end at 2 GiB.


def as_served(model):
    """The model without what helps training alone: its layers one after the other, computed once."""
    for _, part in nnx.iter_modules(model):
        for name, value in dict(scan=False, remat="none").items():
            if hasattr(part, name):
                setattr(part, name, value)
    return model


def function_of(model) -> Callable:
    """The model as a function of images alone, to float32: features come in the type that is computed in."""
    graphdef, params = nnx.split(model)
    return lambda images: nnx.merge(graphdef, params)(images).astype(np.float32)


def any_batch(images: tuple[int, ...], dtype: np.dtype):
    """The shape of any number of images."""
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *images), dtype)


def write_stablehlo(model, file: Path, images: tuple[int, ...], dtype: np.dtype) -> Callable:
    """Writes a model by jax.export and returns what runs the file."""
    # Checked first: JAX writes for minutes before it finds out.
    if (size := sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))) > MOST_BYTES:
        raise UserError(
            f"its parameters take {size / 1e9:.1f} GB, and StableHLO holds {MOST_BYTES / 1e9:.1f}; "
            "--dtype=float16 and a file called .onnx take half"
        )
    exported = jax.export.export(jax.jit(function_of(model)), platforms=PLATFORMS)(any_batch(images, dtype))
    file.write_bytes(exported.serialize())
    return jax.export.deserialize(bytearray(file.read_bytes())).call


def write_onnx(model, file: Path, images: tuple[int, ...], dtype: np.dtype) -> Callable:
    """Writes a model by `vit_jax.interop.onnx` and returns what runs the file."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(f'{error.name} is not installed; pip install -e ".[onnx]" brings it') from error
    from vit_jax.interop.onnx import convert

    written = convert(function_of(model), any_batch(images, dtype), ("images", "logits"), MOST_BYTES)
    if model.num_classes and model.about:
        onnx.helper.set_model_props(written, {"probabilities": model.about.probabilities})
    onnx.checker.check_model(written, full_check=True)
    file.write_bytes(written.SerializeToString())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"images": batch})[0]


def difference(model, run: Callable, images: tuple[int, ...], dtype: np.dtype, batch: int) -> float:
    """The largest between the logits of the model and of the program over random images, as a share of the
    largest logit."""
    rng = np.random.default_rng(batch)
    shape = (batch, *images)
    drawn = rng.integers(256, size=shape, dtype=np.uint8) if dtype == np.uint8 else rng.uniform(-1, 1, shape)
    drawn = drawn.astype(dtype)
    wanted = np.asarray(jax.jit(function_of(model))(drawn))
    return float(np.abs(np.asarray(run(drawn)) - wanted).max() / (np.abs(wanted).max() or 1))
