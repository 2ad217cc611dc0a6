"""Shared memory of batches is reused, but not while an array or a running step reads it."""

import contextlib
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.batch_memory import BatchMemory, BatchReader, Entry
from vit_jax.data.pipeline import training_batches
from vit_jax.data.preprocess import TrainCrop
from vit_jax.data.sources.in_memory import InMemory
from vit_jax.parallel.mesh import make_mesh, to_devices

ENTRIES = {"image": Entry((24, 24, 3), np.uint8), "labels": Entry((2,), np.int32, -1)}


def noise_batches():
    """Returns endless batches of noise images.

    Images of 24 pixels are large enough to be used in shared memory without a copy.
    """
    pixels = np.random.default_rng(0).integers(256, size=(100, 24, 24, 3), dtype=np.uint8)
    source = InMemory("noise", pixels, np.arange(100), tuple(map(str, range(100))))
    crop = TrainCrop(24, "random_resized", area=(0.3, 1.0))
    batches = training_batches(
        source, seed=0, batch_size=8, first_step=0, crop=crop, workers=0, threads=1
    )
    return contextlib.closing(batches)


def fill(memory: BatchMemory, step: int) -> None:
    memory.rows_to_write(step, 0, memory.rows)["image"][:] = step


def test_batches_keep_their_values_while_any_number_of_them_is_referenced():
    with noise_batches() as batches:
        held = [
            (batch, batch["image"].copy()) for batch, _ in zip(batches, range(40), strict=False)
        ]
    for batch, image in held:
        np.testing.assert_array_equal(batch["image"], image)


def test_part_of_a_batch_keeps_its_values():
    with noise_batches() as batches:
        rows = next(batches)["image"][2:4].reshape(2, -1)[:, ::2]
        before = rows.copy()
        for _ in range(40):
            next(batches)
    np.testing.assert_array_equal(rows, before)


def test_device_batch_keeps_its_values_until_the_step_that_reads_it_has_ended():
    @jax.jit
    def step(matrix, images):
        slow = jax.lax.fori_loop(0, 3000, lambda _, x: jnp.tanh(x @ matrix), matrix)
        return images + (0 * slow[0, 0]).astype(jnp.uint8)  # The step reads the images at its end.

    matrix = jnp.eye(128)
    with noise_batches() as batches:
        batch = next(batches)
        jax.block_until_ready(step(matrix, to_devices(batch, make_mesh())["image"]))
        batch = next(batches)
        before = batch["image"].copy()
        device = to_devices(batch, make_mesh())["image"]
        first = device.addressable_shards[0].data
        # The device array has the same address: no copy was made.
        assert first.unsafe_buffer_pointer() == batch["image"].ctypes.data
        result = step(matrix, device)
        del batch, device, first
        for _ in range(40):
            next(batches)
        assert not result.is_ready()
        np.testing.assert_array_equal(result, before)


def test_memory_of_images_is_reused_while_labels_are_referenced():
    addresses, labels = set(), []
    with noise_batches() as batches:
        for batch, _ in zip(batches, range(100), strict=False):
            addresses.add(batch["image"].ctypes.data)
            labels.append(batch["labels"])
            del batch
    assert len(addresses) < 20
    # A copy would have an arbitrary address.
    assert all(address % 64 == 0 for address in addresses)
    assert sorted(np.concatenate(labels)[:100, 0].tolist()) == list(range(100))


@pytest.mark.parametrize("in_memory", [True, False])
def test_other_process_writes_the_rows_that_are_read(in_memory, monkeypatch):
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    memory = BatchMemory(4, ENTRIES, ahead=2)
    reader = BatchReader(memory, step=5)
    other = pickle.loads(pickle.dumps(memory))
    for step in range(5, 30):
        for rows in ((0, 3), (3, 4)):
            other.rows_to_write(step, *rows)["image"][:] = step + rows[0]
        batch = reader.take()
        assert batch["image"][:, 0, 0, 0].tolist() == [step] * 3 + [step + 3]
        assert (batch["labels"] == -1).all()
        batch["labels"][:] = 7
    memory.close()


def test_writer_waits_for_memory():
    memory = BatchMemory(4, ENTRIES, ahead=1)
    reader = BatchReader(memory, step=0)
    fill(memory, 0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(fill, memory, 1)
        time.sleep(0.05)
        assert not waiting.done()
        assert (reader.take()["image"] == 0).all()
        waiting.result()
        assert (reader.take()["image"] == 1).all()
    memory.close()


def test_close_ends_the_waiting_of_writers():
    memory = BatchMemory(4, ENTRIES, ahead=1)
    BatchReader(memory, step=0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(memory.rows_to_write, 9, 0, 4)
        memory.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result()
