"""Evaluates one model on meshes of 8 devices: python -m tests.evaluation.meshes 1,1,1 2,2,2

test_meshes.py runs this module in a separate process, because the number of devices is fixed when
JAX starts. It prints a JSON list with an entry for each mesh: the accuracies, the features of
images and texts, and the coefficients of least squares.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Subset
from vit_jax.evaluation.features import extractor_of
from vit_jax.evaluation.fewshot import FewShotTask
from vit_jax.evaluation.knn import knn_accuracies
from vit_jax.evaluation.least_squares import fit
from vit_jax.evaluation.probe import linear_probe
from vit_jax.evaluation.sgd_probe import SgdProbe
from vit_jax.evaluation.text_encoder import TextEncoder
from vit_jax.models import create_model
from vit_jax.models.text import TextTower
from vit_jax.models.text_tokens import open_tokenizer
from vit_jax.options.run import MeshOptions
from vit_jax.options.text import TextOptions
from vit_jax.parallel.mesh import AXES, make_mesh, place
from vit_jax.parallel.sharding import parameter_shardings

TEXT = dict(dim=32, depth=1, heads=2, mlp_dim=64, output_dim=16)
# Neither number of images is divisible by the number of devices.
TRAIN = Subset(open_source("digits", "train"), range(307))
TEST = Subset(open_source("digits", "test"), range(101))
FEATURES = np.random.default_rng(0).normal(size=(307, 40)) @ np.random.default_rng(1).normal(
    size=(40, 40)
)


def evaluate(shape: list[int]) -> dict:
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = make_mesh(MeshOptions(**dict(zip(AXES, shape, strict=True))), devices)
    model = create_model(
        "ViT-Ti/4", num_classes=10, image_size=16, dim=128, depth=1, mlp_dim=256, heads=2
    )
    extractor, params = extractor_of(model, mesh, batch_size=50)
    shots = FewShotTask("digits", TRAIN, TEST, (2, 20), (0,)).accuracies(extractor, params)
    train, test = extractor(params, TRAIN), extractor(params, TEST)
    (classifier,) = fit(FEATURES, train.labels[:, 0], 10, [1.0], mesh)
    columns = {"all": slice(0, None), "some": slice(0, 60)}
    text = TextTower(TextOptions(vocabulary=258, length=16, **TEXT), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(text)
    text_params = nnx.to_pure_dict(state)
    places = parameter_shardings(mesh, text_params)
    placed = jax.tree.map(place, text_params, places)
    encoder = TextEncoder(
        open_tokenizer(Path("bytes"), 16, "clip"),
        *(
            "sigmoid",
            mesh,
            lambda: (graphdef, placed, places),
            lambda tower: tower,
            lambda _: (1, 0),
        ),
    )
    sgd = SgdProbe(columns, mesh, rates=(0.05,), batch_size=30, steps=40)
    return {
        "accuracies": [
            *(one.mean for one in shots),
            *knn_accuracies(train, test, 10, mesh, (10, 20)).values(),
            linear_probe(train, test, 10, mesh, penalties=(0.1,)).accuracy,
            *(fitted.accuracy for fitted in sgd(train, test, 10).values()),
        ],
        "features": train.values.tolist(),
        "texts": encoder([f"text {number}" for number in range(67)]).tolist(),
        "coefficients": classifier.coefficients.tolist(),
    }


if __name__ == "__main__":
    print(
        json.dumps([evaluate([int(size) for size in shape.split(",")]) for shape in sys.argv[1:]])
    )
