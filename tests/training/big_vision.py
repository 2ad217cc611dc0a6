"""Compares losses with big_vision's: python -m tests.training.big_vision --big_vision=DIR [--write]

DIR is a checkout of github.com/google-research/big_vision. The checkout's own `update_fn`,
optimizer, model and losses train from the same parameters on the same batches as this project's
training step (curves.py). For each case, big_vision also trains from parameters that are perturbed
by a relative 1e-7, with three random seeds. The command prints a line for each case. It fails if
our losses differ from big_vision's by more than three times the largest difference that a
perturbation makes. --write saves big_vision's losses in big_vision.json; the tests compare with
this file and need no checkout.
"""

import argparse
import ast
import functools
import importlib
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import traverse_util

from tests.training import curves, pair_curves

GOLDEN = Path(__file__).with_name("big_vision.json")
PERTURBED = 3  # Number of runs with perturbed parameters; the largest difference counts.


def use(checkout: Path) -> None:
    """Makes the checkout's modules importable without TensorFlow, which only reads files."""
    if not (checkout / "big_vision" / "train.py").is_file():
        raise SystemExit(
            f"{checkout} is no checkout of google-research/big_vision: it has no "
            "big_vision/train.py"
        )
    importlib.import_module(
        "flax.training.checkpoints"
    )  # This module imports TensorFlow if it can, so it is imported before TensorFlow is replaced.
    sys.path.insert(0, str(checkout))
    tensorflow, io, gfile = (
        types.ModuleType(f"tensorflow{rest}") for rest in ("", ".io", ".io.gfile")
    )
    tensorflow.io, io.gfile = io, gfile
    sys.modules |= {module.__name__: module for module in (tensorflow, io, gfile)}


PAIRS = "siglip"  # Name of the case that trains on images and captions.


def update_function(checkout: Path, names: dict, file: str = "train.py"):
    """Returns `update_fn`, which a trainer's `main` defines; `names` are the variables it uses."""
    tree = ast.parse((checkout / "big_vision" / file).read_text())
    (found,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "update_fn"
    ]
    exec(compile(ast.Module([found], []), f"big_vision/{file}", "exec"), names)
    return names["update_fn"]


def their_losses(checkout: Path, case: curves.Case, perturbed: int = 0) -> tuple[list[float], dict]:
    """Returns the loss of each update, and the shapes of the parameters by name."""
    utils, bv_optax, vit = (
        importlib.import_module(f"big_vision.{name}") for name in ("utils", "optax", "models.vit")
    )
    config = ml_collections.ConfigDict(case.theirs | dict(loss=f"{case.loss}_xent"))
    model = vit.Model(
        num_classes=curves.CLASSES,
        patch_size=(curves.PATCH, curves.PATCH),
        width=curves.DIM,
        depth=curves.DEPTH,
        mlp_dim=curves.HIDDEN,
        num_heads=curves.HEADS,
        pool_type=case.pooling,
    )
    image = jnp.zeros((1, curves.SIZE, curves.SIZE, 3))
    made = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    shapes = {name: x.shape for name, x in traverse_util.flatten_dict(made, sep="/").items()}
    params = traverse_util.unflatten_dict(curves.draw(shapes, perturbed), sep="/")
    params = jax.tree.map(jnp.asarray, params)
    run = dict(total_steps=curves.STEPS, batch_size=curves.BATCH, data_size=10_000)
    tx, _ = bv_optax.make(config, params, sched_kw=run)
    around = dict(functools=functools, jax=jax, jnp=jnp, optax=optax, u=utils, bv_optax=bv_optax)
    around |= dict(config=config, model=model, tx=tx, train_state_sharding=None, repl_sharding=None)
    update, state, losses = (
        update_function(checkout, around),
        {"params": params, "opt": tx.init(params)},
        [],
    )
    for step in range(curves.STEPS):
        batch = curves.batch(step)
        images = batch["image"].astype(np.float32) / 127.5 - 1
        labels = np.eye(curves.CLASSES, dtype=np.float32)[batch["labels"][:, 0]]
        state, measured = update(state, jax.random.PRNGKey(0), {"image": images, "labels": labels})
        losses.append(float(measured["training_loss"]))
    return losses, shapes


def their_pair_losses(checkout: Path, perturbed: int = 0) -> tuple[list[float], dict]:
    """Returns the same as `their_losses`, for big_vision's trainer on images and captions."""
    utils, bv_optax, towers = (
        importlib.import_module(f"big_vision.{name}")
        for name in ("utils", "optax", "models.proj.image_text.two_towers")
    )
    config = ml_collections.ConfigDict(pair_curves.THEIRS)
    size = dict(width=curves.DIM, depth=curves.DEPTH, mlp_dim=curves.HIDDEN, num_heads=curves.HEADS)
    model = towers.Model(
        image=size | dict(patch_size=(curves.PATCH, curves.PATCH), pool_type="map"),
        text=size | dict(vocab_size=pair_curves.VOCABULARY),
        out_dim=(None, curves.DIM),
        temperature_init=10.0,
        bias_init=-2.71,
    )
    image = jnp.zeros((1, curves.SIZE, curves.SIZE, 3))
    text = jnp.zeros((1, pair_curves.LENGTH), jnp.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), image, text)["params"]
    shapes = {name: x.shape for name, x in traverse_util.flatten_dict(made, sep="/").items()}
    params = traverse_util.unflatten_dict(pair_curves.draw(shapes, perturbed), sep="/")
    params = jax.tree.map(jnp.asarray, params)
    run = dict(total_steps=curves.STEPS, batch_size=curves.BATCH, data_size=10_000)
    tx, _ = bv_optax.make(config, params, sched_kw=run)
    # This trainer uses a function of JAX that newer versions do not have.
    older = types.SimpleNamespace(**vars(jax), tree_leaves=jax.tree.leaves)
    around = dict(functools=functools, jax=older, jnp=jnp, optax=optax, u=utils, bv_optax=bv_optax)
    around |= dict(config=config, model=model, tx=tx, train_state_sharding=None, repl_sharding=None)
    update = update_function(checkout, around, "trainers/proj/image_text/siglip.py")
    state, losses = {"params": params, "opt": tx.init(params)}, []
    for step in range(curves.STEPS):
        batch = pair_curves.batch(step)
        images = batch["image"].astype(np.float32) / 127.5 - 1
        pairs = {"image": images, "labels": batch["text"]}
        state, measured = update(state, jax.random.PRNGKey(0), pairs)
        losses.append(float(measured["training_loss"]))
    return losses, shapes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--big_vision", type=Path, required=True, help="the checkout")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name}")
    arguments = parser.parse_args()
    use(arguments.big_vision)
    kept, failed = {}, []
    print(f"furthest relative difference of the losses of {curves.STEPS} updates")
    for name in (*curves.CASES, PAIRS):
        if name == PAIRS:
            theirs, module, ours = their_pair_losses, pair_curves, pair_curves.our_losses
        else:
            case = curves.CASES[name]
            theirs = functools.partial(their_losses, case=case)
            module, ours = curves, functools.partial(curves.our_losses, case)
        losses, shapes = theirs(arguments.big_vision)
        others = [theirs(arguments.big_vision, perturbed=seed + 1)[0] for seed in range(PERTURBED)]
        allowed = 3 * max(curves.furthest(other, losses) for other in others)
        found = curves.furthest(ours(module.draw(shapes)), losses)
        print(
            f"{name:10} {losses[0]:.4f} -> {losses[-1]:.4f}   ours {found:.1e}, allowed "
            f"{allowed:.1e}"
        )
        kept[name] = dict(shapes=shapes, allowed=allowed, losses=losses)
        failed += [name] if found > allowed else []
    if arguments.write:
        command = "python -m tests.training.big_vision --big_vision=DIR --write"
        GOLDEN.write_text(json.dumps(dict(command=command, cases=kept), indent=1) + "\n")
    if failed:
        sys.exit(
            f"further from big_vision than a change of a part in 10^7 explains: {', '.join(failed)}"
        )


if __name__ == "__main__":
    main()
