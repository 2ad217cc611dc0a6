"""Measures this machine: python -m vit_jax.benchmark overhead

overhead: host time of a training step of --config, outside the compiled program.
load: time and memory of `load_model` for a ViT-L/16 of 1.2 GB in each format, beside reading the file.
input: images/s that a core turns into training crops, beside tf.data, Pillow and a plain decode.
memory: memory of the input pipeline over 100,000 batches, drawn to input_memory.png.
"""

from ml_collections import config_flags

from vit_jax import command
from vit_jax.config import check
from vit_jax.errors import UserError, nearest

CONFIG = config_flags.DEFINE_config_file("config", "configs/quickstart.py", "The job that is measured.")


def overhead() -> None:
    from vit_jax.benchmarks import overhead

    check(CONFIG.value)
    overhead.measure(CONFIG.value)


def load() -> None:
    from vit_jax.benchmarks import load

    load.measure()


def input() -> None:
    from vit_jax.benchmarks import input

    input.measure()


def memory() -> None:
    from vit_jax.benchmarks import memory

    memory.measure()


BENCHMARKS = {"overhead": overhead, "load": load, "input": input, "memory": memory}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        given = arguments[0] if arguments else ""
        raise UserError(f"unknown benchmark {given!r}; {nearest(given, BENCHMARKS)}")
    command.use_compilation_cache()
    BENCHMARKS[arguments[0]]()


if __name__ == "__main__":
    command.run(main)
