"""Training steps with the ViTs of other projects, for comparison with ours.

The user passes a checkout of the other project. Only the file that defines its ViT is loaded.
Modules that this file imports but does not need are replaced by empty modules. Loss, optimizer and
sharding are equivalent to ours.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.config import with_values
from vit_jax.errors import UserError
from vit_jax.models.vit_names import SIZES
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import replicated, split_batch

CLASSES = 1000


class Peer(NamedTuple):
    """A project with a model in Flax Linen, and the variants of this model to compare."""

    repository: str
    make: Callable[..., Any]  # (checkout, name of the model, dtype, **option) -> flax.linen.Module
    logits: Callable[[Any], jax.Array]  # Extracts the logits from the model's output.
    options: dict[str, dict]  # Arguments of the model for each variant, by title in tables.


def _vision_transformer(checkout: Path, name: str, dtype: str):
    # The package of google-research/vision_transformer is also named vit_jax. Its ViT has no dtype
    # setting, and computes in float32.
    _load(checkout / "vit_jax" / "models_resnet.py", "vit_jax.models_resnet")
    module = _load(checkout / "vit_jax" / "models_vit.py", "vision_transformer.models_vit")
    size, patch = _size(name)
    return module.VisionTransformer(
        num_classes=CLASSES,
        patches=types.SimpleNamespace(size=(patch, patch)),
        hidden_size=size["dim"],
        transformer=dict(
            num_layers=size["depth"],
            mlp_dim=size["mlp_dim"],
            num_heads=size["heads"],
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
        ),
    )


def _big_vision(checkout: Path, name: str, dtype: str, **option):
    for part in ("", ".models", ".utils", ".models.common"):  # Modules that the ViT does not need.
        sys.modules.setdefault(f"big_vision{part}", types.ModuleType(f"big_vision{part}"))
    sys.modules["big_vision"].utils = sys.modules["big_vision.utils"]
    sys.modules["big_vision.models"].common = sys.modules["big_vision.models.common"]
    module = _load(checkout / "big_vision" / "models" / "vit.py", "big_vision.models.vit")
    variant = name.removeprefix("ViT-")
    return module.Model(CLASSES, variant=variant, pool_type="tok", dtype_mm=dtype, **option)


PEERS = {
    "vision_transformer": Peer(
        "google-research/vision_transformer",
        _vision_transformer,
        lambda out: out,
        {"as published": {}},
    ),
    "big_vision": Peer(
        "google-research/big_vision",
        _big_vision,
        lambda out: out[0],
        {
            "unrolled": {},
            "scan": dict(scan=True),
            "scan, dots": dict(scan=True, remat_policy="dots_with_no_batch_dims_saveable"),
        },
    ),
}


class Step(NamedTuple):
    """A training step with the model of another project, not yet compiled."""

    run: Callable  # (state, images, labels) -> (state, loss), jitted.
    init: Callable[[], dict]  # Returns the state before the first step.
    state: dict  # Shapes, as in the fields below.
    images: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct


def our_config(model: str, image_size: int, dtype: str, batch_size: int) -> RunOptions:
    """Returns the options of our training step, with the same settings as other projects' steps.

    The settings are AdamW, gradient clipping at norm 1, 1,000 classes and no dropout.
    """
    values = {"model.name": model, "model.dtype": dtype, "batch_size": batch_size}
    values |= {"data.image_size": image_size, "data.num_classes": CLASSES}
    return with_values(RunOptions(), values)


def find_checkout(peer: str, folder: str | None) -> Path:
    """Returns the folder of another project's checkout.

    Raises:
      UserError: the folder does not exist; the message contains the command to clone it.
    """
    repository = PEERS[peer].repository
    path = Path(folder or ".") / peer
    if folder is None or not path.is_dir():
        raise UserError(
            f"{peer} is not in {folder or '--checkouts=DIR'}: "
            f"git clone https://github.com/{repository} {path}"
        )
    return path


def make_step(
    peer: str,
    checkout: Path,
    name: str,
    option: dict,
    dtype: str,
    size: int,
    batch: int,
    mesh: Mesh,
) -> Step:
    """Returns the training step of another project's ViT.

    From uint8 images it computes the forward and backward pass, clips gradients at norm 1 and
    updates by AdamW. The state is donated, and the step is data parallel over `mesh`.

    Args:
      checkout: folder with the project's checkout.
      option: arguments of the variant, from `Peer.options`.
      size: image size in pixels.
      batch: batch size on all devices.
    """
    model = PEERS[peer].make(checkout, name, dtype, **option)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))

    def initial():
        params = model.init(jax.random.key(0), jnp.zeros((1, size, size, 3)), train=False)["params"]
        return {"params": params, "optimizer": optimizer.init(params)}

    def loss_of(params, images, labels):
        images = images.astype(jnp.float32) / 127.5 - 1
        logits = PEERS[peer].logits(model.apply({"params": params}, images, train=True))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), labels
        ).mean()

    def step(state, images, labels):
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], images, labels)
        updates, kept = optimizer.update(gradient, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": kept}, loss

    everywhere, split = replicated(mesh), split_batch(mesh)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        jax.eval_shape(initial),
    )
    shardings = dict(in_shardings=(everywhere, split, split), out_shardings=everywhere)
    return Step(
        jax.jit(step, donate_argnums=0, **shardings),
        jax.jit(initial, out_shardings=everywhere),
        shapes,
        jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8, sharding=split),
        jax.ShapeDtypeStruct((batch,), np.int32, sharding=split),
    )


def _size(name: str) -> tuple[dict, int]:
    size, patch = name.removeprefix("ViT-").split("/")
    return SIZES[size], int(patch)


def _load(path: Path, name: str):
    """Loads a module from a file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: --checkouts must contain the project's checkout")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
