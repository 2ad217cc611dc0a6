"""Speed and memory of inference (figure 12): measured, and estimated with the TPU compiler."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.ledger.study import Study

IMAGES = 8  # Batch size per device.


def kept(
    study: Study, how: Callable[..., dict[str, float]], models: Sequence[str], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the results of `how(model, size, turns)` for each model and image size.

    They are stored in the study's folder, so that a later call need not repeat the measurements.
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
                study.log(f"{model} {size}: {rows[-1]['speed']:,.1f} images/s")
                with file.open("a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
    return rows


def fits(model: str, size: int) -> bool:
    """Returns True if the patch size divides the image size."""
    _, _, patch = model.partition("/")
    return not patch or size % int(patch) == 0


def timed(model: str, size: int, turns: int) -> dict[str, float]:
    """Measures inference: images/s, and the memory for each additional image in MB.

    The speed is the median of `turns` measurements of one second.
    """
    from vit_jax.benchmarks.bench_inference import compile_ours, make_ours
    from vit_jax.benchmarks.bench_train import fast_dtype, take_turns
    from vit_jax.runs.memory_check import program_memory

    dtype = fast_dtype()
    runner = make_ours(model, IMAGES, size, dtype)
    seconds = statistics.median(take_turns([runner], turns, 1.0 if turns > 1 else 0.0)[runner.name])
    # Memory of a batch minus memory of a single image. The difference excludes memory that does not
    # depend on the batch size, such as the parameters.
    more = (runner.memory - program_memory(compile_ours(model, 1, size, dtype))) / (IMAGES - 1)
    return {"speed": IMAGES / seconds, "memory": more / 1e6}


def on_tpu(model: str, size: int, turns: int) -> dict[str, float]:
    """Estimates `speed` (images/s) and `memory` (MB per image) on a v3 core by its compiler."""
    import jax

    from vit_jax.benchmarks.bench_inference import lower_ours
    from vit_jax.planning.compile import compile_lowered, find_slice, topology_devices
    from vit_jax.planning.hlo import total

    jax.config.update("jax_platforms", "cpu")  # Without this the library would search for TPUs.
    where = find_slice("v3", "2x2")

    def compiled(images: int):
        devices = topology_devices(where)
        program, lowered = lower_ours(model, images * where.devices, size, "bfloat16", devices)
        return compile_lowered(lowered, where, program.state["params"], {})

    many = compiled(IMAGES)
    more = (many.memory.total - compiled(1).memory.total) / (IMAGES - 1)
    speed = IMAGES * where.chip.clock / total(many.operations, "cycles")
    return {"speed": speed, "memory": more / 1e6}
