"""Training steps by objective: what they cost beside the supervised one, by the compiler and by the clock."""

import statistics
from collections.abc import Sequence

import jax

from vit_jax.benchmarks import other_projects
from vit_jax.benchmarks.bench_train import fast_dtype, make_ours, take_turns
from vit_jax.parallel.process_settings import keep_freed_memory, share_interpreter

OBJECTIVES = {
    "supervised": {},
    "masked patches": {"name": "masked_patch"},
    "masked autoencoder": {"name": "mae"},
    "with a decoder of 4 layers": {"name": "mae", "decoder_depth": 4},
    "with a decoder of 1 layer": {"name": "mae", "decoder_depth": 1},
}


def measure(
    models: Sequence[str],
    images: int,
    image_size: int,
    dtype: str | None = None,
    turns: int = 5,
    seconds: float = 4.0,
) -> None:
    """Prints, for each model, FLOPs and time of the objectives' steps, which take turns.

    Args:
      images: on each device.
      dtype: of the computation; None for float32 on a CPU and bfloat16 elsewhere.
    """
    share_interpreter()
    keep_freed_memory()
    dtype, batch = dtype or fast_dtype(), images * jax.device_count()
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {images} images on each, {dtype}\n")
    print("| step | compiled GFLOPs an image | to supervised | ms a step | images/s to supervised |")
    print("|---|---|---|---|---|")
    for model in models:
        runners, flops = [], []
        for name, values in OBJECTIVES.items():
            config = other_projects.our_config(model, image_size, dtype)
            config.batch_size = batch
            config.objective.update(values)
            runner, compiled = make_ours(f"{model} {image_size}, {name}", config)
            runners.append(runner)
            flops.append(compiled.cost_analysis()["flops"])
        times = take_turns(runners, turns, seconds)
        for runner, found in zip(runners, flops, strict=True):
            pairs = zip(times[runners[0].name], times[runner.name], strict=True)
            faster = statistics.median(supervised / own for supervised, own in pairs)
            milliseconds = 1e3 * statistics.median(times[runner.name])
            gigaflops, ratio = found / images / 1e9, found / flops[0]
            print(f"| {runner.name} | {gigaflops:,.1f} | {ratio:.2f} | {milliseconds:,.1f} | {faster:.2f} |")
