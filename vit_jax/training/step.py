"""The training step and the evaluation step: pure functions of plain pytrees, compiled once.

The train state is a dict:

- `params`: the model's parameters.
- `extra`: weights that only training uses, such as LoRA's or a decoder's. May be empty.
- `objective_state`: the objective's state, such as an EMA. May be empty.
- `frozen`: the constant parameters of a frozen model, such as a teacher. May be empty.
- `optimizer`: the optimizer's state.
- `step`: number of steps.
- `skipped`: numbers of skipped updates, in total and in a row.

The random key of step t is folded from the seed and t, so the state contains no random key.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data.randaugment import resolve
from vit_jax.data.views import flips_of
from vit_jax.errors import UserError
from vit_jax.models.image_model import PROBABILITIES
from vit_jax.models.layers import placing
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import BATCH, replicated, split_batch
from vit_jax.parallel.sharding import by_shard, place_activation
from vit_jax.training.lora import Weights, effective, objective_weights, trained, with_frozen
from vit_jax.training.mixing import augment
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.classification import probabilities_of
from vit_jax.training.objectives.objective import Loss, StepContext

# These numbers are folded into a step's random key, for augmentation and `Objective.prepare`. They
# are large, so that they differ from the small numbers that are folded into the key for dropout.
AUGMENT, PREPARE = 2**31, 2**31 + 1
EVALUATE = 2**32 - 1  # Folded into the seed in evaluation, in place of the step number.

State = dict
Metrics = dict[str, jax.Array]


class Evaluated(NamedTuple):
    """Parameters for evaluation, which are also exported at the end of a run.

    Attributes:
      params: the model's parameters: the trained ones, or an average in the objective's state.
      objective_params: the objective's parameters, including its frozen model's.
      objective_state: the objective's state.
      update: number of the last update.
    """

    params: dict
    objective_params: dict
    objective_state: dict
    update: jax.Array


def init_metrics(names: Sequence[str]) -> Metrics:
    """Returns metrics of zeros, as at the start of a run and after each log line.

    The metrics are sums over the steps since the last log line. The sums exclude steps with a loss
    or gradient that is not finite. The item `skipped` is a copy of the item `skipped` of the train
    state.

    Args:
      names: names of the objective's own metrics.
    """
    sums = {name: np.float32(0) for name in ("loss", *names, "gradient_norm", "steps")}
    return sums | {"skipped": _no_skips()}


def init_state(weights: Weights, objective_state: dict, frozen: dict, optimizer_state) -> State:
    """Returns the state before the first step.

    The item `skipped` counts skipped updates: `total` is the number since the start of the run, and
    `in_a_row` is the number of consecutive skipped updates up to now.
    """
    counts = {"step": np.int32(0), "skipped": _no_skips()}
    return (
        weights
        | {"objective_state": objective_state, "frozen": frozen, "optimizer": optimizer_state}
        | counts
    )


def weights_of(state: State) -> Weights:
    """Returns the weights in a train state: the items `params` and `extra`."""
    return {"params": state["params"], "extra": state["extra"]}


def _no_skips() -> dict[str, np.int32]:
    return {"total": np.int32(0), "in_a_row": np.int32(0)}


def make_gradients(
    graphdef: nnx.GraphDef, objective: nnx.GraphDef, config: RunOptions, mesh: Mesh
) -> Callable[..., tuple]:
    """Returns a function that computes a batch's mean loss, mean metrics and mean gradient.

    The function is `(weights, frozen, objective_state, update, batch, key) -> ((means, gradient),
    aux)`. `aux` contains the auxiliary outputs (`Loss.aux`) of each image, in batch order. With
    `config.micro_batches` above 1 the batch is split into micro-batches, and each micro-batch has
    its own dropout key.

    Raises:
      UserError: the mesh does not support `config.optimizer.sum_gradients`.
    """
    once = config.optimizer.sum_gradients == "float32_once"
    if once and (mesh.shape["fsdp"] > 1 or mesh.shape["tensor"] > 1):
        raise UserError(
            "config.optimizer.sum_gradients='float32_once' is for whole parameters on every "
            "device: mesh.fsdp=1 and mesh.tensor=1"
        )

    def loss_of(weights, frozen, objective_state, update, micro, key):
        # The backward pass skips frozen weights.
        weights = jax.tree.map(
            lambda x, changes: x if changes else jax.lax.stop_gradient(x),
            weights,
            trained(config.finetune, weights),
        )
        context = StepContext(
            nnx.Rngs(dropout=key), objective_state, update, None if once else mesh
        )
        with jax.named_scope("loss"):
            params = effective(weights)
            objective_params = with_frozen(objective_weights(weights), frozen)
            loss = _loss(
                graphdef, objective, mesh, params, objective_params, micro, context, alone=once
            )
            return loss.each.mean(), (jax.tree.map(jnp.mean, loss.metrics), loss.aux)

    gradient_of = jax.value_and_grad(loss_of, has_aux=True)

    def accumulate(weights, frozen, objective_state, update, batch, key):
        """Returns `((loss, metrics), gradient)`, averaged over the batch, and auxiliary outputs."""
        parts = config.micro_batches

        def micro_gradient(micro, key):
            (loss, (more, aux)), gradient = gradient_of(
                weights, frozen, objective_state, update, micro, key
            )
            return ((loss, more), gradient), aux

        if parts == 1:
            return micro_gradient(batch, key)

        def cut(array):
            # Micro-batch i contains every `parts`-th image, so no image moves to another device.
            array = array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)
            if once:
                return array
            return jax.lax.with_sharding_constraint(
                array, NamedSharding(mesh, PartitionSpec(None, BATCH))
            )

        def add(total, part):
            index, micro = part
            means, aux = micro_gradient(micro, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, means), aux

        micros = jnp.arange(parts), jax.tree.map(cut, batch)
        first = jax.tree.map(lambda x: x[0], micros[1])
        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(micro_gradient, first, key)[0])
        total, aux = jax.lax.scan(add, zero, micros)
        aux = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), aux)
        return jax.tree.map(lambda x: x / parts, total), aux

    def accumulate_alone(*arguments):
        means, aux = accumulate(*arguments)
        return jax.lax.pmean(means, BATCH), aux

    if once:
        # Each device first sums its own gradients of all micro-batches. Without `shard_map`, XLA
        # would all-reduce each matrix product immediately, in the product's dtype.
        same, divided = PartitionSpec(), PartitionSpec(BATCH)
        places = (same, same, same, same, divided, same)
        return jax.shard_map(
            accumulate_alone, mesh=mesh, in_specs=places, out_specs=(same, divided), check_vma=False
        )
    return accumulate


def make_train_step(
    graphdef: nnx.GraphDef,
    objective: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    config: RunOptions,
    mesh: Mesh,
    state_shardings: State,
) -> Callable[[State, Metrics, dict], tuple[State, Metrics]]:
    """Compiles `(state, metrics, batch) -> (state, metrics)`; the old state's buffers are donated.

    The whole batch is augmented first. With `config.micro_batches` above 1 the batch is then split
    into micro-batches, each with its own dropout key. Their gradients are averaged, so the update
    equals the update of the whole batch.

    If the loss or the gradient is not finite, the weights are not updated. The step counts as
    skipped, and the schedule continues.
    """
    values = config.augment
    _, mixup = resolve(values.level, values.randaugment, values.mixup)
    augmentations = dict(
        flip=config.data.flip,
        flips=flips_of(objective_of(config.objective.name).views(config)),
        spatial={
            field.name: field.spatial
            for field in objective_of(config.objective.name).fields(config)
            if field.spatial
        },
        erasing=values.erasing,
        mixup=mixup,
        cutmix=values.cutmix,
        cutmix_share=values.cutmix_share,
        repeats=config.data.repeats,
    )

    gradients = make_gradients(graphdef, objective, config, mesh)

    def train_step(state, metrics, batch):
        step = state["step"] + 1
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        old, frozen, drawing = weights_of(state), state["frozen"], jax.random.fold_in(key, PREPARE)
        with jax.named_scope("augmentation"):
            normalized = {}
            if values.erasing:
                model = nnx.merge(graphdef, state["params"])
                normalized = dict(mean=model.mean, std=model.std)
            batch = augment(batch, jax.random.fold_in(key, AUGMENT), **augmentations, **normalized)
            numbers = jnp.arange(config.batch_size)
            objective_params = with_frozen(objective_weights(old), frozen)
            batch = _prepare(objective, objective_params, mesh, batch, drawing, numbers)
        with jax.named_scope("gradients"):
            update = step - state["skipped"]["total"]
            ((loss, more), gradient), aux = gradients(
                old, frozen, state["objective_state"], update, batch, key
            )
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradient)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            updates, optimizer_state = optimizer.update(
                gradient, state["optimizer"], old, finite=finite
            )
            keep = partial(jax.tree.map, partial(jnp.where, finite))
            weights = keep(optax.apply_updates(old, updates), old)
            skipped = {
                "total": state["skipped"]["total"] + ~finite,
                "in_a_row": jnp.where(finite, 0, state["skipped"]["in_a_row"] + 1),
            }
            sums = {"loss": loss, **more, "gradient_norm": norm, "steps": 1.0}
            metrics = {
                name: metrics[name] + jnp.where(finite, value, 0) for name, value in sums.items()
            }
            metrics["skipped"] = skipped
        with jax.named_scope("objective_state"):
            objective_params = with_frozen(objective_weights(weights), frozen)
            objective_state = nnx.merge(objective, objective_params).update_state(
                state["objective_state"], effective(weights), aux, step - skipped["total"]
            )
            objective_state = keep(objective_state, state["objective_state"])
        new = {"objective_state": objective_state, "frozen": frozen, "optimizer": optimizer_state}
        return weights | new | {"step": step, "skipped": skipped}, metrics

    everywhere = replicated(mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_shardings, everywhere, split_batch(mesh)),
        out_shardings=(state_shardings, everywhere),
    )


def make_forward(
    graphdef: nnx.GraphDef, mesh: Mesh, params_shardings: dict
) -> Callable[[dict, dict], jax.Array]:
    """Compiles `(params, batch) -> logits`; the logits are replicated on all devices."""

    def forward(params, batch):
        with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
            return nnx.merge(graphdef, params)(batch["image"])

    return jax.jit(
        forward,
        in_shardings=(params_shardings, split_batch(mesh)),
        out_shardings=replicated(mesh),
    )


def make_eval_step(
    graphdef: nnx.GraphDef,
    objective: nnx.GraphDef,
    config: RunOptions,
    mesh: Mesh,
    places: Evaluated,
) -> Callable[[Evaluated, dict, jax.Array], tuple[Metrics, dict[str, jax.Array]]]:
    """Compiles `(evaluated, batch, first) -> ({loss, ..., images}, answers)`.

    The first result contains the sums of the loss and the metrics over the valid images of the
    batch, and the number of valid images. Padding and unreadable images are not valid.

    `answers` contains for each image the most likely class (`answer`), the `probability` of this
    class, and the batch's `labels` and `valid`. For objectives without labels, `answers` contains
    `Loss.outputs` and `valid`.

    `first` is the index of the batch's first image in the split. The random key of an image is
    folded from its index, so an image has the same random numbers in each evaluation. `objective`
    includes its frozen model, and `places` contains the shardings of `Evaluated`.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), EVALUATE)
    labelled = objective_of(config.objective.name).labels
    probabilities = PROBABILITIES[probabilities_of(config)]

    def eval_step(evaluated, batch, first):
        numbers = first + jnp.arange(len(batch["image"]))
        batch = _prepare(objective, evaluated.objective_params, mesh, batch, key, numbers)
        context = StepContext(None, evaluated.objective_state, evaluated.update, mesh)
        loss = _loss(
            graphdef, objective, mesh, evaluated.params, evaluated.objective_params, batch, context
        )
        keep = batch["valid"]
        values = {"loss": loss.each, **loss.metrics}
        sums = {name: jnp.where(keep, x, 0).sum() for name, x in values.items()}
        outputs = answers(evaluated, batch, loss.logits) if labelled else loss.outputs
        if outputs:
            outputs["valid"] = keep
        return sums | {"images": keep.sum()}, outputs

    def answers(evaluated, batch, logits):
        if logits is None:
            with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
                logits = nnx.merge(graphdef, evaluated.params)(batch["image"])
        outputs = {
            "answer": logits.argmax(-1),
            "probability": probabilities(logits.astype(jnp.float32)).max(-1),
        }
        return outputs | {"labels": batch["labels"]}

    everywhere = replicated(mesh)
    return jax.jit(
        eval_step,
        in_shardings=(places, split_batch(mesh), everywhere),
        out_shardings=everywhere,
    )


def make_pictures(
    graphdef: nnx.GraphDef,
    objective: nnx.GraphDef,
    config: RunOptions,
    mesh: Mesh,
    places: Evaluated,
) -> Callable[[Evaluated, dict], tuple[jax.Array, jax.Array]]:
    """Compiles `(evaluated, batch) -> (visible, predicted)`: `Objective.pictures` as uint8.

    The entry `numbers` of the batch contains the index of each image in its split. The random
    numbers of an image depend on this index, as in the evaluation.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), EVALUATE)

    def pictures(evaluated, batch):
        batch = _prepare(objective, evaluated.objective_params, mesh, batch, key, batch["numbers"])
        with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
            model = nnx.merge(graphdef, evaluated.params)
            context = StepContext(None, evaluated.objective_state, evaluated.update)
            drawn = nnx.merge(objective, evaluated.objective_params).pictures(model, batch, context)
        return tuple(jnp.round(jnp.clip(x, 0, 255)).astype(jnp.uint8) for x in drawn)

    return jax.jit(
        pictures, in_shardings=(places, split_batch(mesh)), out_shardings=replicated(mesh)
    )


def _prepare(objective, objective_params, mesh, batch, key, numbers) -> dict[str, jax.Array]:
    """Adds random values of each image, such as masks, to the batch (`Objective.prepare`).

    The random key of image i of the batch is `fold_in(key, numbers[i])`. `numbers` are the images'
    indices in the global batch or, in evaluation, in the split.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    drawn = nnx.merge(objective, objective_params).prepare(batch, keys)
    return jax.lax.with_sharding_constraint(drawn, split_batch(mesh))


def _loss(
    graphdef, objective, mesh, params, objective_params, batch, context: StepContext, alone=False
) -> Loss:
    """Computes the objective's loss, with activations sharded as in the table `ACTIVATIONS`.

    Args:
      alone: True if the call is inside a `shard_map`, and `batch` is only this device's part of the
        batch.
    """
    platform = mesh.devices.flat[0].platform
    kernels = by_shard(mesh, alone)
    if alone:
        where = placing(lambda _, x: x, platform, jax.lax.axis_index(BATCH), kernels)
    else:
        where = placing(partial(place_activation, mesh), platform, by_shard=kernels)
    with where:
        return nnx.merge(objective, objective_params)(nnx.merge(graphdef, params), batch, context)
