"""Measures the speed of the input pipeline on one core, compared with other implementations."""

import contextlib
import functools
import io
import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from vit_jax.benchmarks.figures import Table
from vit_jax.data import decode
from vit_jax.data.decode import Box
from vit_jax.data.order import Order
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop, inception_box, random_resized_box
from vit_jax.data.sources import open_source
from vit_jax.data.views import View, view_specs
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh, to_devices

SIZE, BATCH = 224, 64
IMAGES = 512
PHOTOGRAPHS = (  # Colour photographs in scikit-image's package.
    *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png"),
    *("motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg"),
)


def measure(
    rounds: int = 5, rates: tuple[int, ...] = (1_000, 5_000, 20_000), host: bool = False
) -> dict:
    """Prints and returns images/s of each input pipeline on one core.

    It also measures how much crops of the mode `fast` differ from crops of the mode `exact`.

    Each pipeline runs in a separate process, which is bound to one core, and reads the same files.
    After a warm-up the pipelines take turns of `IMAGES` images. The speed is measured by CPU time,
    summed over threads, because other processes disturb wall-clock time more than CPU time. Only
    the comparison of one and two threads or workers is by wall-clock time. If a pipeline's library
    is missing, the pipeline is skipped and the reason is printed.

    Args:
      rates: images/s for which the required number of cores is printed.
      host: measure only the main process's share of the work, with `measure_host`.
    """
    if host:
        return measure_host(max(rates))
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder))
        files = sorted(Path(folder).rglob("*.jpg"))
        kilobytes = sum(file.stat().st_size for file in files) / len(files) / 1000
        sizes = f"about 500x375 pixels and {kilobytes:.0f} kB"
        print(f"{len(files)} JPEGs of {sizes}, crops to {SIZE}, one core")
        if not decode.is_fast():
            lacking = "vit_jax has no JPEG decoder of its own here, so Pillow decodes"
            print(f"{lacking}: apt install libjpeg-dev")
        columns = {"images/s": ",.0f", "relative to the full decode": ".2f"}
        table = Table("pipeline", columns | {"vit_jax relative to it": ".2f"})
        speeds = take_turns(table, WAYS, folder, rounds, one_core=True)
        for name, speed in speeds.items():
            table.row(name, speed, speed / speeds["full decode"], speeds["vit_jax"] / speed)

        print()
        table = Table("by the clock", {"images/s": ",.0f", "relative to one": ".2f"}, table.figures)
        shared = take_turns(table, SHARED, folder, rounds, one_core=False)
        for name, speed in shared.items():
            table.row(name, speed, speed / shared["1 " + name[2:].removesuffix("s")])
        table.row("2 processes, full decode", None, two_processes(folder, rounds))

        print()
        table = Table("other figures", {"value": ".3f"}, table.figures)
        for name, value in (draws() | quality(files)).items():
            table.row(name, value)
        for rate in rates:
            table.row(f"cores for {rate:,} images/s", math.ceil(rate / speeds["vit_jax"]))
        return table.figures


def measure_host(
    rate: int, batch_sizes: tuple[int, ...] = (64, 256, 1024), images: int = 8192, workers: int = 2
) -> dict:
    """Prints and returns the processor time of the main process for each image, in microseconds.

    Worker processes decode the images and write them to shared memory; their time is not included.
    The main process waits for the chunks of a batch, and copies the batch to the devices.

    Args:
      rate: images/s for which the required number of cores is printed.
      batch_sizes: images in a batch.
      images: number of images in a measurement. Before it, two batches per worker are read as a
        warm-up.
    """
    mesh = make_mesh()
    columns = {"receive, us an image": ".1f", "with the copy to the device": ".1f"}
    columns |= {f"cores for {rate:,} images/s": ".1f", "cores with the copy": ".1f"}
    table = Table("batch size", columns)
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder))
        for size in batch_sizes:
            with contextlib.closing(_vit_jax(folder, 0, workers, batch_size=size)) as stream:
                for _ in range(2 * workers):
                    next(stream)
                batches = max(1, images // size)
                received = _microseconds(lambda: next(stream), batches) / size
                copied = _microseconds(
                    lambda: jax.block_until_ready(to_devices(next(stream), mesh)), batches
                )
            times = received, copied / size
            table.row(f"{size:,}", *times, *(time * rate / 1e6 for time in times))
    return table.figures


def _microseconds(function: Callable[[], Any], calls: int) -> float:
    """Returns the processor time of a call in microseconds, summed over the process's threads."""
    started = time.process_time()
    for _ in range(calls):
        function()
    return 1e6 * (time.process_time() - started) / calls


def make_photographs(folder: Path, images: int = IMAGES) -> None:
    """Writes JPEGs of random crops of photographs.

    The width is 500 pixels and the height 375 pixels, each changed randomly by up to 25 %.
    """
    try:
        import skimage
    except ImportError as error:
        raise UserError("the photographs are scikit-image's: pip install scikit-image") from error
    at = Path(skimage.__file__).parent / "data"
    photographs = [Image.open(at / name).convert("RGB") for name in PHOTOGRAPHS]
    rng = np.random.default_rng(0)
    for i in range(images):
        photograph = photographs[i % len(photographs)]
        width, height = (round(side * rng.uniform(0.75, 1.25)) for side in (500, 375))
        scale = rng.uniform(0.7, 1) * min(photograph.width / width, photograph.height / height)
        left = rng.uniform(0, photograph.width - width * scale)
        top = rng.uniform(0, photograph.height - height * scale)
        box = (left, top, left + width * scale, top + height * scale)
        path = folder / "train" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph.resize((width, height), Image.Resampling.LANCZOS, box=box).save(path, quality=92)


def take_turns(
    table: Table, ways: dict, folder: str, rounds: int, one_core: bool
) -> dict[str, float]:
    """Returns the median images/s of each pipeline; in each round every pipeline has one turn.

    If a pipeline's library is missing, the reason is added to the table.
    """
    context = multiprocessing.get_context("spawn")
    core = max(os.sched_getaffinity(0))
    rates = {}
    with contextlib.ExitStack() as stack:
        ends = {}
        for name, way in ways.items():
            ours, theirs = context.Pipe()
            arguments = (way, folder, core if one_core else None, theirs)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, None)
            ready = ours.recv()
            if ready is True:
                ends[name] = ours
            else:
                table.skip(name, ready)
        for turn, (name, end) in itertools.product(range(rounds), ends.items()):
            end.send(turn)
            rates.setdefault(name, []).append(end.recv())
    return {name: statistics.median(turns) for name, turns in rates.items()}


def two_processes(folder: str, rounds: int) -> float:
    """Returns how much faster two independent processes decode JPEGs than one process.

    The result is a ratio of images/s; 2 means that the processes do not slow each other down.
    """
    ratios = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for _ in range(rounds):
            (alone,) = pool.map(_decode_all, [folder], chunksize=1)
            both = pool.map(_decode_all, [folder] * 2, chunksize=1)
            ratios.append(sum(both) / alone)
    return statistics.median(ratios)


def _decode_all(folder: str) -> float:
    """Returns the images/s of decoding whole JPEGs, by wall-clock time."""
    batches = _plain(folder, 0, _decode_whole)
    started = time.perf_counter()
    for _ in range(IMAGES // BATCH):
        next(batches)
    return IMAGES / (time.perf_counter() - started)


def _serve(way, folder: str, core: int | None, end) -> None:
    """Main function of a pipeline's process: runs a turn for each request, and sends its images/s.

    `way` yields batches. The process is bound to `core`, if it is not None.
    """
    from absl import flags

    flags.FLAGS(["benchmark"], known_only=True)  # Grain's workers require parsed flags.
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        with contextlib.closing(way(folder, 1_000)) as batches:  # Warm-up of imports and caches.
            next(batches)
    except ImportError as error:
        end.send(f"{error} (pip install {error.name})")
        end.recv()
        return
    end.send(True)
    while (turn := end.recv()) is not None:
        with contextlib.closing(way(folder, turn)) as batches:
            for _ in range(IMAGES // BATCH // 4 + 2):
                next(batches)
            clock = time.perf_counter if core is None else time.process_time
            started = clock()
            for _ in range(IMAGES // BATCH):
                next(batches)
            end.send(IMAGES / (clock() - started))


def _vit_jax(
    folder: str, turn: int, workers=0, threads=1, batch_size=BATCH, views=(), **crop: str
) -> Iterator:
    return training_batches(
        open_source("folder", "train", path=folder),
        seed=turn,
        batch_size=batch_size,
        first_step=0,
        crop=TrainCrop(SIZE, **crop),
        workers=workers,
        threads=threads,
        views=views,
    )


def _views(folder: str, turn: int, small: int = 0, **crop: str) -> Iterator:
    """Yields batches with two global views of each image and `small` local views, as for DINO."""
    views = [View(count=2, crop=dict(area=(0.4, 1.0)))]
    if small:
        views.append(View("local", small, 96, crop=dict(area=(0.05, 0.4))))
    make = functools.partial(TrainCrop, kind="random_resized", **crop)
    return _vit_jax(folder, turn, views=view_specs(views, make, SIZE, None))


def _tf_data(folder: str, turn: int) -> Iterator:
    """Yields batches of random crops from tf.data. TensorFlow decodes only the pixels of a crop."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    def load(file):
        data = tf.io.read_file(file)
        start, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([0, 0, 4], tf.float32),
            area_range=(0.05, 1),
            aspect_ratio_range=(3 / 4, 4 / 3),
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([start[:2], size[:2]], 0)
        pixels = tf.image.resize(
            tf.image.decode_and_crop_jpeg(data, window, channels=3), (SIZE, SIZE)
        )
        return tf.cast(pixels, tf.uint8)

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    files = [str(path) for path in sorted(Path(folder).rglob("*.jpg"))]
    data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), seed=turn).repeat()
    data = data.map(load, num_parallel_calls=1).batch(BATCH, num_parallel_calls=1).prefetch(2)
    batches = data.with_options(options).as_numpy_iterator()
    return (batch for batch in batches)  # A generator, because it can be closed.


def _plain(folder: str, turn: int, crop) -> Iterator:
    """Crops images in a Python loop without vit_jax's pipeline; yields None after each batch."""
    source = open_source("folder", "train", path=folder)
    order = Order(turn, (len(source),))
    rng = np.random.default_rng(turn)
    for step in itertools.count():
        for index in order(np.arange(step * BATCH, (step + 1) * BATCH)).tolist():
            crop(source[index].image, rng)
        yield


def _pillow_crop(data: bytes, rng: np.random.Generator) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    box = inception_box(rng, image.height, image.width)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))


def _decode_whole(data: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decodes the whole image without a resize, with libjpeg-turbo if available."""
    image = decode.open_image(data)
    return image.region(Box(0, 0, image.width, image.height), max(image.height, image.width))


WAYS = {
    "vit_jax": _vit_jax,
    "vit_jax, random_resized": functools.partial(_vit_jax, kind="random_resized"),
    "vit_jax, random_resized, bicubic": functools.partial(
        _vit_jax, kind="random_resized", interpolation="bicubic"
    ),
    "vit_jax, 2 views": _views,
    "vit_jax, 2 + 8 views": functools.partial(_views, small=8),
    "vit_jax, 2 + 8 views, bicubic": functools.partial(_views, small=8, interpolation="bicubic"),
    "full decode": functools.partial(_plain, crop=_decode_whole),
    "tf.data, fused decode and crop": _tf_data,
    "Pillow": functools.partial(_plain, crop=_pillow_crop),
}


SHARED = {
    "1 thread": _vit_jax,
    "2 threads": functools.partial(_vit_jax, threads=2),
    "1 worker": functools.partial(_vit_jax, workers=1),
    "2 workers": functools.partial(_vit_jax, workers=2),
}


def draws() -> dict[str, float]:
    """Measures two functions that sample random crop boxes in images of 500x375 pixels.

    The values are the time per box in the fastest round, and the mean area of a box as a share of
    the image.
    """
    values, count = {}, 10_000
    for draw in (inception_box, random_resized_box):
        seconds = []
        for _ in range(5):
            rng = np.random.default_rng(0)
            started = time.process_time()
            boxes = [draw(rng, 375, 500) for _ in range(count)]
            seconds.append(time.process_time() - started)
        share = sum(box.width * box.height for box in boxes) / count / (375 * 500)
        values[f"{draw.__name__}, us"] = min(seconds) / count * 1e6
        values[f"{draw.__name__}, share of the image"] = share
    return values


def quality(files: list[Path]) -> dict[str, float]:
    """Returns mean absolute differences of pixel values (0 to 255) between crops.

    Crops of the mode `exact`, for which the whole JPEG is decoded, are compared with two other
    kinds: crops of the mode `fast`, which decodes only the cropped rectangle and at a reduced size
    where possible; and crops that Pillow resizes with antialiasing.
    """

    def crop(data: bytes, i: int, mode: str, size: int) -> np.ndarray:
        area = (0.05, 1.0) if size == SIZE else (0.6, 1.0)
        return TrainCrop(size, mode=mode, area=area)(data, np.random.default_rng(i)).astype(int)

    def difference(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.abs(one - other).mean())

    rows = []
    for i, file in enumerate(files[:100]):
        data = file.read_bytes()
        exact, pillow = crop(data, i, "exact", SIZE), _pillow_crop(data, np.random.default_rng(i))
        at_size = difference(crop(data, i, "fast", SIZE), exact)
        at_96 = difference(crop(data, i, "fast", 96), crop(data, i, "exact", 96))
        rows.append((at_size, at_96, difference(pillow.astype(int), exact)))
    names = (f"fast at {SIZE} pixels", "fast at 96 pixels (decoded at 1/2 or 1/4)", "Pillow")
    return {
        f"mean difference of pixels from exact: {name}": value
        for name, value in zip(names, np.mean(rows, axis=0), strict=True)
    }
