"""Speed and memory of inference: by the clock here, and by the TPU compiler's estimate (figure
12).
"""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.ledger.study import Study

IMAGES = 8  # On a device at once.


def kept(
    study: Study, how: Callable[..., dict[str, float]], models: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """The figures of each model and image size; those in the study's folder are not measured again.

    Args:
      how: `timed` or `on_tpu`; called with the model, the size and the turns.
    """
    file = study.out / "measured.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["model"], row["size"]) for row in rows}
    for model in models:
        for size in sizes:
            if (model, size) not in known and fits(model, size):
                rows.append(
                    {"model": model, "size": size} | how(model, size, 1 if study.steps else 5)
                )
                study.say(f"{model} {size}: {rows[-1]['speed']:,.1f} images/s")
                with file.open("a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
    return rows


def fits(model: str, size: int) -> bool:
    """True where the patches divide the image."""
    _, _, patch = model.partition("/")
    return not patch or size % int(patch) == 0


def timed(model: str, size: int, turns: int) -> dict[str, float]:
    """Images/s here, the median of turns of a second, and MB that an image more takes."""
    from vit_jax.benchmarks.bench_inference import compile_ours, make_ours
    from vit_jax.benchmarks.bench_train import fast_dtype, take_turns
    from vit_jax.runs.memory_check import program_memory

    dtype = fast_dtype()
    runner = make_ours(model, IMAGES, size, dtype)
    seconds = statistics.median(take_turns([runner], turns, 1.0 if turns > 1 else 0.0)[runner.name])
    # Some memory does not grow with the images, such as standardised kernels.
    more = (runner.memory - program_memory(compile_ours(model, 1, size, dtype))) / (IMAGES - 1)
    return {"speed": IMAGES / seconds, "memory": more / 1e6}


def on_tpu(model: str, size: int, turns: int) -> dict[str, float]:
    """The TPU compiler's estimate for a core of TPU v3: images/s, and MB that an image more
    takes.
    """
    import jax

    from vit_jax.benchmarks.bench_inference import lower_ours
    from vit_jax.planning.compile import compile_lowered, find_slice, topology_devices
    from vit_jax.planning.hlo import total

    jax.config.update("jax_platforms", "cpu")  # The compiler's library would look for a TPU.
    where = find_slice("v3", "2x2")

    def compiled(images: int):
        devices = topology_devices(where)
        program, lowered = lower_ours(model, images * where.devices, size, "bfloat16", devices)
        return compile_lowered(lowered, where, program.state["params"], {})

    many = compiled(IMAGES)
    more = (many.memory.total - compiled(1).memory.total) / (IMAGES - 1)
    speed = IMAGES * where.chip.clock / total(many.operations, "cycles")
    return {"speed": speed, "memory": more / 1e6}
