"""Times predictions and features of JPEG files, compared with timm and ONNX Runtime."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from flax import nnx
from PIL import Image

from vit_jax.benchmarks.bench_inference import export_to_onnxruntime, timm_device
from vit_jax.benchmarks.bench_input import make_photographs
from vit_jax.benchmarks.bench_train import Runner, fast_dtype, program_table, race, timm_model
from vit_jax.data.image_files import find_images
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Subset
from vit_jax.evaluation.features import extractor_of, likeliest, representation
from vit_jax.models import create_model, model_card
from vit_jax.parallel.mesh import make_mesh
from vit_jax.parallel.process_settings import keep_freed_memory

SIZE, BATCH, BATCHES, TURNS = 224, 32, 4, 8  # Batches in a turn.
RESIZE = SIZE / 0.9  # timm's evaluation transform of ViTs: the short side, bicubic.
READERS = 2  # Threads or processes that decode, as in `vit_jax.predict`.
OUTPUTS = {"top five": likeliest(5), "features": representation}


def measure(
    models: Sequence[str], images: int | None, against: Sequence[str] = (), turns: int = TURNS
) -> dict[str, dict[str, Any]]:
    """Prints and returns images/s from JPEG files to the five likeliest classes, and to features.

    Each program reads and crops the same files as its users do. It is compared with our model alone
    on a batch in memory, and with other libraries. The programs run in turns; the results are
    medians.

    Args:
      images: batch size; None: 32.
      against: libraries in `PEERS` to compare with.
    """
    keep_freed_memory()
    batch = images or BATCH
    count = batch * BATCHES
    table = program_table(batch, fast_dtype(), f"turn of {count} images")
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), count * turns)
        files = sorted(map(str, Path(folder).rglob("*.jpg")))
        for name in models:
            card = model_card(name, image_size=SIZE, num_classes=1000)
            for output in OUTPUTS:
                runners = make_ours(name, output, files, batch)
                for peer in against:
                    with table.skipping(peer):
                        runners.append(PEERS[peer](name, output, files, batch))
                race(table, runners, count, 2 * count * card.multiply_adds, turns, seconds=0)
    return table.figures


def turns_of(files: Sequence[str], batch: int) -> Iterator[range]:
    """Yields the indices of the files of each turn, again and again."""
    count = batch * BATCHES
    return cycle(range(start, start + count) for start in range(0, len(files), count))


def make_ours(name: str, output: str, files: Sequence[str], batch: int) -> list[Runner]:
    """Prepares our prediction from files, and our model alone on a batch in memory."""
    started, source, turns = time.perf_counter(), find_images(files), turns_of(files, batch)
    model = create_model(name, num_classes=1000, image_size=SIZE, dtype=fast_dtype())
    crop = TestCrop(SIZE, resize=RESIZE, interpolation="bicubic")
    extractor, params = extractor_of(
        model, make_mesh(), crop, compute=OUTPUTS[output], batch_size=batch, threads=READERS
    )
    graphdef, plain_params = nnx.split(model)
    plain = jax.jit(lambda params, x: OUTPUTS[output](nnx.merge(graphdef, params), x))
    pixels = np.random.default_rng(0).integers(256, size=(batch, SIZE, SIZE, 3), dtype=np.uint8)

    def from_files() -> None:
        for _ in extractor.stream(params, Subset(source, next(turns))):
            pass

    def from_memory() -> None:
        for _ in range(BATCHES):
            jax.block_until_ready(plain(plain_params, pixels))

    from_files()
    ready = time.perf_counter() - started
    return [
        Runner(f"{name}, {output}", ready, None, from_files),
        Runner(f"{name}, {output}, images in memory", 0, None, from_memory),
    ]


class TimmFiles:
    """A PyTorch data set of image files with timm's transform."""

    def __init__(self, files: Sequence[str], transform: Callable[[Image.Image], Any]):
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB"))


def make_timm(name: str, output: str, files: Sequence[str], batch: int) -> Runner:
    """Prepares timm's model, with timm's evaluation transform in the processes of a DataLoader."""
    started, turns = time.perf_counter(), turns_of(files, batch)
    torch, title, module = timm_model(name, SIZE)
    from timm.data import create_transform, resolve_data_config

    if output == "features":
        module.reset_classifier(0)
    transform = create_transform(**resolve_data_config({}, model=module), is_training=False)
    device, dtype = timm_device(torch)
    module = module.eval().to(device, dtype)
    indices: list[int] = []  # Those of the current turn.
    loader = torch.utils.data.DataLoader(
        TimmFiles(files, transform),
        batch,
        sampler=indices,
        num_workers=READERS,
        persistent_workers=True,
        multiprocessing_context="spawn",  # JAX has threads in this process.
    )

    def step() -> None:
        indices[:] = next(turns)
        with torch.inference_mode():
            for images in loader:
                values = module(images.to(device, dtype))
                if output != "features":
                    values = values.softmax(-1).topk(5)[0]
                values.cpu()

    step()
    return Runner(f"{title}, {output}", time.perf_counter() - started, None, step)


def pillow_crop(file: str | BinaryIO, size: int = SIZE) -> np.ndarray:
    """Reads an image with Pillow, crops it like timm, and returns uint8 `[3, size, size]`."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    scale = int(size / 0.9) / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def make_onnxruntime(name: str, output: str, files: Sequence[str], batch: int) -> Runner:
    """Prepares timm's model in ONNX Runtime; threads read the files with Pillow and NumPy."""
    started, turns = time.perf_counter(), turns_of(files, batch)
    title, run = export_to_onnxruntime(name, batch, SIZE, features=output == "features")
    pool = ThreadPoolExecutor(READERS)

    def step() -> None:
        images = pool.map(pillow_crop, [files[index] for index in next(turns)])
        for _ in range(BATCHES):
            values = run(np.stack([next(images) for _ in range(batch)]))
            if output != "features":
                np.sort(values)[:, -5:]

    step()
    return Runner(f"{title}, {output}", time.perf_counter() - started, None, step)


PEERS = {"onnxruntime": make_onnxruntime, "timm": make_timm}
