"""The training step of a config, with the shapes and shardings of the train state."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.models import abstract, family_of, model_factory
from vit_jax.models.host_rngs import host_rngs
from vit_jax.models.model_card import training_flops
from vit_jax.options.model import ModelOptions
from vit_jax.options.option import options_of
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import check_batch, place, replicated, split_batch
from vit_jax.parallel.sharding import optimizer_shardings, parameter_shardings
from vit_jax.training.lora import (
    Weights,
    effective,
    init_extra,
    objective_weights,
    trained,
    with_frozen,
)
from vit_jax.training.objectives import abstract_objective, make_objective, objective_of
from vit_jax.training.objectives.objective import Objective
from vit_jax.training.optimizer import below, check_first, make_optimizer
from vit_jax.training.schedule import make_backbone_schedule, make_schedule, make_weight_decay
from vit_jax.training.step import (
    Evaluated,
    Metrics,
    State,
    init_metrics,
    init_state,
    make_train_step,
    weights_of,
)

OBJECTIVE = 2**31  # Folded into the seed to draw the objective's parameters.


class Program(NamedTuple):
    """A run's training step, with the shapes and shardings of its arguments.

    A program allocates no memory on the devices. `initial_state` creates the arrays.
    """

    build: Callable[..., nnx.Module]  # Creates the model; its argument is `rngs=`.
    # Function from the model's parameters to the train state's item `extra`, weights that only
    # training uses.
    init_extra: Callable[[dict], dict]
    graphdef: nnx.GraphDef  # Graph definition of the model.
    objective: nnx.GraphDef  # Graph definition of the objective, including its frozen model.
    # Key of the parameters for evaluation in the objective's state, such as an EMA. None: the
    # trained parameters are evaluated.
    eval_params: str | None
    optimizer: optax.GradientTransformation
    # Function that raises UserError if the optimizer cannot start from the given initial weights.
    check_first: Callable[[Weights], None]
    schedule: Callable[[jax.Array], jax.Array]
    mesh: Mesh
    # `state` and `metrics` contain `jax.ShapeDtypeStruct`s with shardings in place of arrays.
    state: State
    metrics: Metrics
    train_step: Callable[[State, Metrics, dict], tuple[State, Metrics]]
    one_image: dict[str, jax.ShapeDtypeStruct]  # A batch of one image.

    def initial_state(
        self,
        seed: int,
        params: dict | None = None,
        frozen: dict | None = None,
        objective: dict | None = None,
        objective_state: dict | None = None,
    ) -> State:
        """Returns the state before the first step; each process creates its devices' shards.

        Args:
          seed: random seed for parameters that are initialized at random.
          params: the model's parameters, on the host; None: random initialization.
          frozen: the frozen model's parameters, on the host; None: there is no frozen model.
          objective: some of the objective's own parameters, on the host, such as the subtree
            `{"decoder": ...}`. All other own parameters are initialized at random.
          objective_state: some items of the objective's state, on the host. They replace items of
            the objective's initial state.

        Raises:
          UserError: the optimizer cannot start from these parameters.
        """
        weights = self._on_host(lambda: self._first_weights(seed, params, objective))
        self.check_first(weights)
        weights = jax.tree.map(
            lambda x, like: place(x, like.sharding), weights, weights_of(self.state)
        )
        frozen = self.placed_frozen(frozen or {})
        whole = nnx.merge(self.objective, with_frozen(objective_weights(weights), frozen))
        objective_state = whole.initial_state(effective(weights)) | (objective_state or {})
        objective_state = jax.tree.map(
            lambda x, like: _copy(x, like.sharding), objective_state, self.state["objective_state"]
        )
        places = jax.tree.map(lambda x: x.sharding, self.state["optimizer"])
        moments = jax.jit(self.optimizer.init, out_shardings=places)(weights)
        state = init_state(weights, objective_state, frozen, moments)
        counts = jax.device_put(
            {name: state[name] for name in ("step", "skipped")}, replicated(self.mesh)
        )
        return state | counts

    def placed_frozen(self, params: dict) -> dict:
        """Copies the frozen model's parameters from the host to the devices."""
        return jax.tree.map(lambda x, like: place(x, like.sharding), params, self.state["frozen"])

    def evaluated(self, state: State) -> Evaluated:
        """Returns the parameters for evaluation, which are also exported at the end of a run."""
        objective_state = state["objective_state"]
        if self.eval_params:
            params = objective_state[self.eval_params]
        else:
            params = effective(weights_of(state)) if state["extra"] else state["params"]
        update = state["step"] - state["skipped"]["total"]
        return Evaluated(
            params, with_frozen(objective_weights(state), state["frozen"]), objective_state, update
        )

    def evaluated_places(self) -> Evaluated:
        """Returns the shardings of the result of `evaluated`."""
        objective_params = with_frozen(objective_weights(self.state), self.state["frozen"])
        evaluated = Evaluated(
            self.state["params"],
            objective_params,
            self.state["objective_state"],
            self.state["step"],
        )
        return jax.tree.map(lambda x: x.sharding, evaluated)

    def abstract_objective(self) -> Objective:
        """Returns the objective with shapes in place of parameters."""
        objective_params = with_frozen(objective_weights(self.state), self.state["frozen"])
        return nnx.merge(self.objective, objective_params)

    def flops(self) -> float:
        """Returns a lower bound of the FLOPs of a training step per image."""
        model = nnx.merge(self.graphdef, self.state["params"])
        return training_flops(self.abstract_objective().multiply_adds(model, self.one_image))

    def initial_metrics(self) -> Metrics:
        """Returns metrics of zeros on the devices."""
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.metrics)
        return jax.device_put(zeros, replicated(self.mesh))

    def _first_weights(self, seed: int, params: dict | None, objective: dict | None) -> Weights:
        params = params or nnx.to_pure_dict(nnx.state(self.build(rngs=host_rngs(seed))))
        extra = self.init_extra(params)
        objective_params = extra.get("objective", {}) | (objective or {})
        return {
            "params": params,
            "extra": extra | ({"objective": objective_params} if objective_params else {}),
        }

    def _on_host(self, make: Callable[[], Weights]) -> Weights:
        # `make` initializes the weights on the host, because a model may be larger than a device's
        # memory. `make` is not compiled, because compilation would take longer than the
        # initialization.
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU.
            host = None
        with jax.default_device(host):
            return make()


def model_arguments(config: RunOptions) -> dict:
    """Returns the arguments of `model_factory` for a config.

    Arguments that the config does not set are omitted. `model_factory` derives them from the
    model's name.
    """
    values = {name: getattr(config.model, name) for name in options_of(ModelOptions)}
    chosen = {name: value for name, value in values.items() if value is not None}
    return chosen | {"image_size": config.data.image_size}


def make_program(
    config: RunOptions,
    *,
    num_classes: int,
    steps: int,
    mesh: Mesh,
    build: Callable[..., nnx.Module] | None = None,
    frozen: nnx.Module | None = None,
    class_weights: tuple[float, ...] = (),
) -> Program:
    """Returns the `Program` of a run: its training step, with shapes in place of arrays.

    Args:
      num_classes: outputs of the model's head.
      mesh: mesh of devices; they need not exist on this machine (ahead-of-time compilation).
      build: function that creates the model, called with `rngs=`; None: the config's model.
      frozen: the frozen model that `Objective.teacher_spec` requests, with shapes in place of
        arrays.
      class_weights: weight of each class in the classification loss; empty: all are 1.

    Raises:
      UserError: the model, the schedule or the batch size is incompatible with the config or the
        mesh.
    """
    check_batch(mesh, config.batch_size, config.micro_batches)
    schedule = make_schedule(config.optimizer, steps)
    build = build or model_factory(num_classes=num_classes, **model_arguments(config))
    model = abstract(build)
    layers, embedding = family_of(model).layer, family_of(model).embedding
    _check_layers(config, model)
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    held = {} if frozen is None else nnx.to_pure_dict(nnx.state(frozen))
    whole = abstract_objective(
        config, model, steps=steps, frozen=frozen, class_weights=class_weights
    )
    objective = nnx.graphdef(whole)

    def make_extra(params):
        key = jax.random.fold_in(jax.random.key(config.seed), OBJECTIVE)
        objective_params = nnx.state(
            make_objective(config, model, steps=steps, frozen=frozen, rngs=nnx.Rngs(params=key))
        )
        return init_extra(config.finetune, config.seed, params) | (
            {"objective": nnx.to_pure_dict(objective_params)} if objective_params else {}
        )

    weights = {"params": params, "extra": jax.eval_shape(make_extra, params)}
    _check_frozen_prefixes(config, whole, objective_weights(weights))
    changes = None if config.finetune.train == "all" else partial(trained, config.finetune)
    optimizer = make_optimizer(
        config.optimizer,
        schedule,
        weight_decay=make_weight_decay(config.optimizer, steps),
        trained=changes,
        layer=layers and layers(model),
        embedding=embedding,
        frozen_prefixes=whole.frozen_prefixes(),
        stem=whole.stem,
        frozen_steps=config.finetune.frozen_steps,
        backbone_schedule=make_backbone_schedule(
            config.optimizer, steps, config.finetune.frozen_steps, config.finetune.warmup_steps
        ),
    )

    def first_state(weights, frozen):
        objective_params = with_frozen(objective_weights(weights), frozen)
        return nnx.merge(objective, objective_params).initial_state(effective(weights))

    objective_state = jax.eval_shape(first_state, weights, held)
    optimizer_state = jax.eval_shape(optimizer.init, weights)
    state = jax.tree.map(_shape, init_state(weights, objective_state, held, optimizer_state))
    everywhere = replicated(mesh)
    shardings = jax.tree.map(lambda _: everywhere, state) | {
        "params": parameter_shardings(mesh, params),
        "extra": parameter_shardings(mesh, weights["extra"]),
        "objective_state": parameter_shardings(mesh, objective_state),
        "frozen": parameter_shardings(mesh, held),
        "optimizer": optimizer_shardings(mesh, weights, optimizer_state),
    }
    return Program(
        build,
        make_extra,
        graphdef,
        objective,
        objective_of(config.objective.name).eval_params(config),
        optimizer,
        partial(check_first, config.optimizer, changes),
        schedule,
        mesh,
        jax.tree.map(_shape, state, shardings),
        jax.tree.map(lambda x: _shape(x, everywhere), init_metrics(whole.metrics)),
        make_train_step(graphdef, objective, optimizer, config, mesh, shardings),
        shapes_of_batch(config, 1),
    )


def _check_layers(config: RunOptions, model: nnx.Module) -> None:
    """Raises UserError if a learning rate option does not apply to the model.

    `layer_decay` requires a model with encoder layers, and `embedding_rate` requires a model with a
    patch embedding.
    """
    layers, embedding = family_of(model).layer, family_of(model).embedding
    if config.optimizer.layer_decay < 1 and layers is None:
        raise UserError(
            f"config.optimizer.layer_decay = {config.optimizer.layer_decay} lowers the rate of "
            f"each encoder layer, and a {type(model).__name__} has none; use 1"
        )
    if config.optimizer.embedding_rate != 1 and not embedding:
        raise UserError(
            f"config.optimizer.embedding_rate = {config.optimizer.embedding_rate} is of the patch "
            f"embedding, and a {type(model).__name__} has none; use 1"
        )


def _check_frozen_prefixes(
    config: RunOptions, objective: Objective, objective_params: dict
) -> None:
    """Raises UserError if a prefix of `Objective.frozen_prefixes` matches no parameter."""
    for start in objective.frozen_prefixes():
        if not any(jax.tree.leaves(below([start], objective_params))):
            raise UserError(
                f"config.objective.name={config.objective.name!r} freezes {start!r}, which is not "
                f"a part of its parameters: {', '.join(objective_params) or 'it has none'}"
            )


def abstract_batch(
    config: RunOptions, mesh: Mesh, max_labels: int = 1
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a training batch."""
    shapes = shapes_of_batch(config, config.batch_size, max_labels)
    return {name: _shape(x, split_batch(mesh)) for name, x in shapes.items()}


def shapes_of_batch(
    config: RunOptions, images: int, max_labels: int = 1
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a training batch of `images` images, without shardings."""
    shapes = {"labels": jax.ShapeDtypeStruct((images, max_labels), jnp.int32)}
    objective = objective_of(config.objective.name)
    for view in objective.views(config):
        shape = images, *view.shape(config.data.image_size)
        shapes[view.name] = jax.ShapeDtypeStruct(shape, jnp.uint8)
    for field in objective.fields(config):
        shapes[field.name] = jax.ShapeDtypeStruct((images, *field.shape), field.dtype)
    return shapes


def _copy(x, sharding) -> jax.Array:
    """Copies an array to the devices of `sharding`, even if the array is there already.

    The step donates its state's buffers, so the state must not share them with other arrays.
    """
    same = isinstance(x, jax.Array) and x.sharding == sharding
    return jnp.copy(x) if same else place(np.asarray(x), sharding)


def _shape(x, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
