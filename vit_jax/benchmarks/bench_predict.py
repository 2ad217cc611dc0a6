"""Times a model's predictions for JPEG files, and for images that are already decoded in memory."""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.benchmarks.bench_input import make_photographs
from vit_jax.data.image_files import find_images
from vit_jax.data.sources.base import Subset
from vit_jax.evaluation.features import extractor_of, likeliest, transfer_crop
from vit_jax.models import create_model
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.process_settings import keep_freed_memory

FILES, BATCH, TURNS = 2000, 32, 16


def measure(models: list[str], images: int) -> None:
    """Prints images/s of prediction from files, and of the model alone on a batch in memory.

    The two measurements alternate. Each result is the median over all turns.

    Args:
      models: names of models.
      images: batch size; None: 32.
    """
    keep_freed_memory()
    batch = images or BATCH
    print("| model | plain model, images/s | from files, images/s | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), FILES)
        files = find_images([folder])
        for name in models:
            model = create_model(name, num_classes=1000, image_size=224)
            compute, crop = likeliest(5), transfer_crop(224)
            mesh = make_mesh()
            extractor, params = extractor_of(
                model, mesh, crop, compute=compute, batch_size=batch, threads=2
            )
            graphdef, plain_params = nnx.split(model)
            plain = jax.jit(lambda p, x, g=graphdef, c=compute: c(nnx.merge(g, p), x))
            pixels = np.random.default_rng(0).integers(
                256, size=(batch, 224, 224, 3), dtype=np.uint8
            )
            jax.block_until_ready(plain(plain_params, pixels))
            list(extractor.stream(params, Subset(files, range(batch))))  # Compiles.
            seconds = {"plain": [], "files": []}
            for turn in range(TURNS):
                part = Subset(files, range(turn * FILES // TURNS, (turn + 1) * FILES // TURNS))
                started = time.perf_counter()
                for _ in range(0, len(part), batch):
                    jax.block_until_ready(plain(plain_params, pixels))
                between = time.perf_counter()
                for _ in extractor.stream(params, part):
                    pass
                seconds["plain"].append(between - started)
                seconds["files"].append(time.perf_counter() - between)
            # Both measurements compute full batches: the last batch of a turn is padded. The
            # padding is not counted in the images/s of either measurement.
            rate = {way: FILES / TURNS / statistics.median(spent) for way, spent in seconds.items()}
            ratio = statistics.median(
                a / b for a, b in zip(seconds["plain"], seconds["files"], strict=True)
            )
            print(
                f"| {name} | {rate['plain']:,.1f} | {rate['files']:,.1f} | {ratio:.3f} |",
                flush=True,
            )
