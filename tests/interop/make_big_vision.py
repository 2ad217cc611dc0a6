"""Writes the `big_vision_*` folders in `golden/`: checkpoints and logits of big_vision's models.

The script runs the code of a checkout of github.com/google-research/big_vision. It requires flax,
absl-py, einops and ml_collections. TensorFlow, with which that code reads files, is not required.
To write the folders again:

python tests/interop/make_big_vision.py CHECKOUT
"""

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import flax.training.checkpoints  # noqa: F401  (Before there is a TensorFlow of only a name.)
import jax
import jax.numpy as jnp
import numpy as np

FOLDER = Path(__file__).parent / "golden"
SIZE = dict(width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(8, 8), num_classes=5)
MODELS = {
    # A small version of big_vision's S/16 baseline.
    "big_vision_sincos": dict(posemb="sincos2d", rep_size=True),
    "big_vision_map": dict(pool_type="map"),
    "big_vision_token": dict(pool_type="tok"),
    "big_vision_scan": dict(pool_type="tok", posemb="sincos2d", scan=True),
    "big_vision_towers": dict(pool_type="map"),
    "big_vision_training": dict(pool_type="map", posemb="sincos2d"),
}


def import_big_vision(checkout: Path):
    """Imports big_vision's modules `vit`, `two_towers` and `utils`."""
    sys.path.insert(0, str(checkout))
    if importlib.util.find_spec("tensorflow") is None:
        for name in ("tensorflow", "tensorflow.io", "tensorflow.io.gfile"):
            module = types.ModuleType(name)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
            sys.modules[name] = module
    from big_vision import utils
    from big_vision.models import vit
    from big_vision.models.proj.image_text import two_towers

    return vit, two_towers, utils


def drawn(params: dict) -> dict:
    """Returns random parameters, such that activations keep their scale."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        kind = path[-1].key
        if kind == "kernel":
            # The inputs of an attention's output layer are heads and head widths. A scan's layer
            # axis is no input.
            inputs = 16 if x.shape[-1] == 16 and x.ndim > 2 else np.prod(x.shape[:-1])
            return rng.normal(0, inputs**-0.5, x.shape)
        return rng.normal(0, 0.1, x.shape) + (kind == "scale")

    return jax.tree_util.tree_map_with_path(lambda *leaf: draw(*leaf).astype(np.float32), params)


def main(checkout: Path):
    vit, two_towers, utils = import_big_vision(checkout)
    images = np.load(FOLDER / "images.npy")
    for name, options in MODELS.items():
        if name == "big_vision_towers":
            text = dict(width=16, depth=1, mlp_dim=24, num_heads=2, vocab_size=20)
            image = SIZE | options
            image.pop("num_classes")
            model = two_towers.Model(image=image, text=text, out_dim=5, bias_init=-10.0)
            inputs = (images, np.zeros((2, 4), np.int32))
        else:
            model, inputs = vit.Model(**SIZE, **options), (images,)
        params = drawn(model.init(jax.random.key(0), *inputs)["params"])
        logits = model.apply({"params": params}, *inputs)[0]
        if name == "big_vision_towers":
            # The logits of the image tower alone; the output of the whole model is normalized.
            logits = vit.Model(**SIZE, **options).apply({"params": params["img"]}, images)[0]
        saved = params if name in ("big_vision_sincos", "big_vision_scan") else {"params": params}
        if name == "big_vision_training":
            moments = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), params)
            state = ({"count": np.int32(7), "mu": moments, "nu": params}, {"count": np.int32(7)})
            saved |= {"opt": state, "chrono": {"accum_train_time": 12.5}}
        arrays = dict(utils.tree_flatten_with_names(saved)[0])
        (FOLDER / name).mkdir(exist_ok=True)
        np.savez(FOLDER / name / "model.npz", **arrays)
        np.save(FOLDER / name / "logits.npy", np.asarray(logits))
    write_text_tower(two_towers, utils)


def write_text_tower(two_towers, utils):
    """Writes a model with a deeper text tower, and its embeddings of images and tokens."""
    folder = FOLDER / "big_vision_siglip"
    folder.mkdir(exist_ok=True)
    text = dict(width=16, depth=3, mlp_dim=24, num_heads=2, vocab_size=90)
    image = SIZE | dict(pool_type="map")
    image.pop("num_classes")
    model = two_towers.Model(image=image, text=text, out_dim=(None, 16), bias_init=-10.0)
    inputs = np.load(FOLDER / "images.npy"), np.arange(18, dtype=np.int32).reshape(3, 6) ** 2 % 90
    params = drawn(model.init(jax.random.key(1), *inputs)["params"])
    images, texts, out = model.apply({"params": params}, *inputs)
    arrays = dict(utils.tree_flatten_with_names({"params": params})[0])
    np.savez(folder / "model.npz", **arrays)
    scores = images @ texts.T * out["t"] + out["b"]
    results = dict(images=images, texts=texts, scores=scores, tokens=inputs[1])
    np.savez(folder / "results.npz", **{name: np.asarray(x) for name, x in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
