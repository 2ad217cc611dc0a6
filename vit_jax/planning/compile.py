"""Compilation of a config's training step for TPUs that this machine does not have."""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from vit_jax.errors import UserError
from vit_jax.libtpu import ENVIRONMENT
from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import GIB, Chip, find_chip
from vit_jax.parallel.mesh import make_mesh
from vit_jax.planning.hlo import Operation, read_operations
from vit_jax.planning.schedule import take_schedules, with_schedules
from vit_jax.runs.frozen_model import frozen_shapes
from vit_jax.runs.memory_check import held
from vit_jax.training.program import abstract_batch, make_program

VERSION = "6"  # Version of the cache's format, and of the operations that are read.


@dataclass(frozen=True)
class Slice:
    """Devices of one kind that train together, such as a TPU slice."""

    chip: Chip
    topology: str
    devices: int

    def __str__(self):
        if not self.topology:
            return f"{self.devices:,} {self.chip.name} device(s)"
        cores = " cores" if self.chip.devices_per_chip > 1 else ""
        return f"{self.devices:,} TPU {self.chip.name}{cores} ({self.topology})"


@dataclass(frozen=True)
class Memory:
    """Memory of a step on each device in bytes. The outputs reuse the memory of the arguments."""

    parameters: int
    optimizer: int
    batch: int  # The batch, and the padding of all arguments (memory layouts).
    temporaries: int  # Activations and gradients.
    code: int

    @property
    def total(self) -> int:
        """The total memory in bytes."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Compiled:
    """Results of compiling a training step: memory, operations and compilation time."""

    memory: Memory
    fits: bool
    operations: tuple[Operation, ...] = ()  # Empty if the step does not fit into memory.
    seconds: float = 0.0  # CPU time of the compilation.
    cached: bool = False


def find_slice(name: str, topology: str | None) -> Slice:
    """Returns a slice of TPUs by chip and topology, such as `v5e` and `16x16`.

    Raises:
      UserError: the chip or the topology does not exist.
    """
    chip = find_chip(name)
    if topology not in chip.topologies:
        raise UserError(
            f"no topology {topology or ''!r} of TPU {name} (--topology, in chips); there are: "
            + ", ".join(chip.topologies)
        )
    return Slice(chip, topology, math.prod(map(int, topology.split("x"))) * chip.devices_per_chip)


def topology_devices(where: Slice) -> list[jax.Device]:
    """Returns abstract devices of a TPU slice, for ahead-of-time compilation.

    Raises:
      UserError: the compiler is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"the compiler for TPU {where.chip.name} is not installed; "
            'pip install -e ".[plan]" brings it'
        )
    os.environ.update(ENVIRONMENT)
    # libtpu ends the process if XLA_FLAGS contains a flag that libtpu does not have, such as some
    # flags for CPUs.
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in given if not flag.startswith("--xla_cpu_"))
    from jax.experimental import topologies

    # On v4 and v5p, two cores work as one device (megacore).
    options = {"chip_config_name": "megacore"} if where.chip.name in ("v4", "v5p") else {}
    if where.topology in ("1x1", "2x4"):
        options["chips_per_host_bounds"] = [*map(int, where.topology.split("x")), 1]
    name = f"{where.chip.name}:{where.topology}"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def compile_step(
    config: RunOptions, where: Slice, num_classes: int, steps: int, dump: Path | None = None
) -> Compiled:
    """Compiles a config's training step, or returns the result of an earlier call from the cache.

    Args:
      steps: number of steps of the learning rate schedule.
      dump: see `compile_lowered`.

    Raises:
      UserError: the config is incompatible with the devices.
    """
    mesh = make_mesh(config.mesh, topology_devices(where))
    frozen = frozen_shapes(config)
    program = make_program(config, num_classes=num_classes, steps=steps, mesh=mesh, frozen=frozen)
    batch = abstract_batch(config, mesh)
    state = program.state
    lowered = program.train_step.lower(state, program.metrics, batch)
    params = [state[name] for name in ("params", "extra", "objective_state", "frozen")]
    return compile_lowered(lowered, where, params, state["optimizer"], dump)


def compile_lowered(
    lowered: jax.stages.Lowered,
    where: Slice,
    params,
    optimizer_state,
    dump: Path | None = None,
) -> Compiled:
    """Compiles a lowered training step, or returns the result of an earlier call from the cache.

    Args:
      params: shapes and shardings of the parameters, which are arguments and results of the step.
      optimizer_state: shapes and shardings of the optimizer's state.
      dump: the folder of `dumped_schedules`; the operations then have schedules.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    more = [flag for flag in flags if not flag.startswith("--xla_jf_dump")]
    described = "\n".join([lowered.as_text(), str(where), *versions, VERSION, *more])
    if dump:
        described += "\nschedules"
    known = _cache() / f"{hashlib.sha256(described.encode()).hexdigest()}.json"
    if known.exists():
        return replace(_from_json(known.read_text()), cached=True)
    started = time.process_time()
    state = {"parameters": held(params), "optimizer": held(optimizer_state)}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        rest = _needed(str(error)) - sum(state.values())
        result = Compiled(Memory(**state, batch=0, temporaries=rest, code=0), fits=False)
    else:
        sizes = compiled.memory_analysis()
        memory = Memory(
            **state,
            batch=sizes.argument_size_in_bytes - sum(state.values()),
            temporaries=sizes.temp_size_in_bytes
            + sizes.output_size_in_bytes
            - sizes.alias_size_in_bytes,
            code=sizes.generated_code_size_in_bytes,
        )
        result = Compiled(memory, True, _operations(compiled.as_text(), dump))
    result = replace(result, seconds=time.process_time() - started)
    _cache().mkdir(parents=True, exist_ok=True)
    temporary = known.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(result)))
    temporary.replace(known)
    return result


def _operations(text: str, dump: Path | None) -> tuple[Operation, ...]:
    if dump is None:
        return tuple(read_operations(text))
    if not (schedules := take_schedules(dump)):
        raise UserError(
            "the TPU compiler wrote no schedules, because the program is in JAX's compilation "
            "cache or libtpu was loaded before: unset JAX_COMPILATION_CACHE_DIR, and start a new "
            "process"
        )
    return tuple(with_schedules(read_operations(text, every=True), schedules))


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "vit_jax" / "plan"


def _from_json(text: str) -> Compiled:
    values = json.loads(text)
    operations = tuple(Operation(**operation) for operation in values.pop("operations"))
    return Compiled(**values | dict(memory=Memory(**values["memory"]), operations=operations))


def _needed(message: str) -> int:
    """Parses the required memory in bytes, including arguments, from an out-of-memory error."""
    amount, unit = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT])", message).groups()
    return int(float(amount) * {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}[unit])
