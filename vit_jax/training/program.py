"""The compiled parts of a run, made from its config: what trains, what plans, and what measures share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.models import abstract, count_multiply_adds, model_factory
from vit_jax.parallel.mesh import check_batch, replicated, split_batch
from vit_jax.parallel.rules import optimizer_shardings, parameter_shardings
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.step import Metrics, State, init_metrics, init_state, make_train_step
from vit_jax.training.workdir import model_arguments


class Program(NamedTuple):
    """A training step, and the shape and place of all that it takes; nothing is allocated yet."""

    build: Callable[..., nnx.Module]  # Makes the model from `rngs=`.
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]
    mesh: Mesh
    state: State  # Of `jax.ShapeDtypeStruct`s with shardings, as are the metrics.
    metrics: Metrics
    train_step: Callable[[State, Metrics, dict], tuple[State, Metrics]]

    def initial_state(self, seed: int) -> State:
        """The state before the first step, each process making what its devices hold."""
        params = nnx.to_pure_dict(nnx.state(self._build_on_host(seed)))
        params = jax.tree.map(_place, params, self.state["params"])
        places = jax.tree.map(lambda x: x.sharding, self.state["optimizer"])
        state = init_state(params, jax.jit(self.optimizer.init, out_shardings=places)(params))
        counts = jax.device_put({name: state[name] for name in ("step", "skipped")}, replicated(self.mesh))
        return state | counts

    def flops(self) -> float:
        """Operations of a training step for each image, at least: a multiply-add is two, and the backward
        pass takes twice the forward's."""
        return 6.0 * count_multiply_adds(nnx.merge(self.graphdef, self.state["params"]))

    def initial_metrics(self) -> Metrics:
        """Zeros."""
        return jax.device_put(init_metrics(), replicated(self.mesh))

    def _build_on_host(self, seed: int) -> nnx.Module:
        # Eagerly: to compile it takes longer. On the host, where a model fits that no device could hold.
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS leaves it out.
            host = None
        with jax.default_device(host):
            return self.build(rngs=nnx.Rngs(seed))


def make_program(config: ConfigDict, *, num_classes: int, steps: int, mesh: Mesh) -> Program:
    """The program of a run of so many steps, for the devices of `mesh`, which need not exist here.

    Raises:
      UserError: the model, the schedule or the batch does not fit the config or the mesh.
    """
    check_batch(mesh, config.batch_size, config.micro_batches)
    schedule = make_schedule(config.optimizer, steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    build = model_factory(num_classes=num_classes, **model_arguments(config))
    graphdef, params = nnx.split(abstract(build))
    params = nnx.to_pure_dict(params)
    optimizer_state = jax.eval_shape(optimizer.init, params)
    state = jax.tree.map(_shape, init_state(params, optimizer_state))
    everywhere = replicated(mesh)
    shardings = jax.tree.map(lambda _: everywhere, state) | {
        "params": parameter_shardings(mesh, params),
        "optimizer": optimizer_shardings(mesh, params, optimizer_state),
    }
    return Program(
        build,
        graphdef,
        optimizer,
        schedule,
        mesh,
        jax.tree.map(_shape, state, shardings),
        jax.tree.map(lambda x: _shape(x, everywhere), init_metrics()),
        make_train_step(graphdef, optimizer, config, mesh, shardings),
    )


def abstract_batch(config: ConfigDict, mesh: Mesh, max_labels: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and place of a training batch."""
    size, images, batch = config.data.image_size, config.batch_size, split_batch(mesh)
    return {
        "image": jax.ShapeDtypeStruct((images, size, size, 3), jnp.uint8, sharding=batch),
        "labels": jax.ShapeDtypeStruct((images, max_labels), jnp.int32, sharding=batch),
    }


def _shape(x, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _place(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A global array from one that every process has whole."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])
