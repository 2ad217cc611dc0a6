"""Batches contain each image once per epoch, for any number of processes and from any step."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
from multiprocessing import spawn

import numpy as np
import pytest
from absl import flags

from vit_jax.data.pipeline import SkipLog, decoders, evaluation_batches, training_batches
from vit_jax.data.preprocess import TestCrop, TrainCrop
from vit_jax.data.sources.base import Example
from vit_jax.data.sources.in_memory import InMemory
from vit_jax.errors import UserError

SIZE = 37  # Not divisible by any batch size below.


def numbered(images: int = SIZE) -> InMemory:
    """Returns noise images whose labels are their indices."""
    pixels = np.random.default_rng(0).integers(256, size=(images, 8, 8, 3), dtype=np.uint8)
    return InMemory("numbered", pixels, np.arange(images), tuple(map(str, range(images))))


class WithBroken(InMemory):
    """The same images, but images 5 and 6 cannot be decoded."""

    def __getitem__(self, index):
        return Example(b"broken", (index,)) if index in (5, 6) else super().__getitem__(index)


class WithVanished(InMemory):
    """The same images, but the files of images 5 and 6 were deleted."""

    def __getitem__(self, index):
        if index in (5, 6):
            raise FileNotFoundError(2, "No such file or directory")
        return super().__getitem__(index)


def with_broken(kind=WithBroken) -> InMemory:
    source = numbered()
    return kind(source.name, source.images, source.labels, source.class_names)


def train(
    source=None,
    count=10,
    *,
    seed=0,
    first_step=0,
    workers=0,
    threads=1,
    batch_size=8,
    size=8,
    **process,
) -> list[dict]:
    batches = training_batches(
        source or numbered(),
        seed=seed,
        batch_size=batch_size,
        first_step=first_step,
        crop=TrainCrop(
            size, "random_resized", area=(0.3, 1.0)
        ),  # Few crops of the tiny images are equal with this kind of crop.
        workers=workers,
        threads=threads,
        **process,
    )
    return list(itertools.islice(batches, count))


def endless_training(**process):
    return training_batches(
        numbered(), seed=0, batch_size=8, first_step=0, crop=TrainCrop(8), threads=1, **process
    )


def long_evaluation(**process):
    return evaluation_batches(numbered(5000), batch_size=8, crop=TestCrop(8, resize=8), **process)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("make", "number", "words"),
    [
        (endless_training, signal.SIGKILL, "signal 9: out of memory"),
        (long_evaluation, signal.SIGBUS, "signal 7: out of memory"),
    ],
)
def test_worker_that_is_killed_ends_the_batches_with_one_line_and_the_other_workers(
    make, number, words
):
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags.
    before = {*multiprocessing.active_children()}
    batches = make(workers=2)
    workers = set()
    while len(workers) < 2:  # The first batch may arrive before the second worker has started.
        next(batches)
        workers = {*multiprocessing.active_children()} - before
    os.kill(min(process.pid for process in workers), number)
    with pytest.raises(UserError, match=f"a decoding process died .{words}.*data.workers"):
        for _ in range(600):
            next(batches)
    for process in workers:
        process.join()
    batches.close()


@pytest.fixture
def signalled_at_start(tmp_path):
    """Yields a function that makes each decoding process receive a signal before it runs Python."""

    def use(name: str) -> None:
        program = tmp_path / "python"
        command = f'case "$*" in *spawn_main*) kill -{name} $$;; esac\nexec {sys.executable} "$@"\n'
        program.write_text(f"#!/bin/sh\n{command}")
        program.chmod(0o755)
        multiprocessing.set_executable(str(program))

    before = os.fsdecode(spawn.get_executable())
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags.
    yield use
    multiprocessing.set_executable(before)


def test_worker_that_dies_before_it_reads_a_long_list_of_images_ends_the_batches(
    signalled_at_start,
):
    signalled_at_start("KILL")
    died = pytest.raises(UserError, match="a decoding process died .signal 9")
    with contextlib.closing(long_evaluation(workers=1)) as batches, died:
        next(batches)


def labels(batches: list[dict]) -> list[int]:
    return np.concatenate([batch["labels"][:, 0] for batch in batches]).tolist()


def assert_equal(batch: dict, other: dict) -> None:
    assert batch.keys() == other.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name])


def test_every_epoch_shows_every_image_once():
    seen = labels(train(count=15))
    for epoch in range(3):
        assert sorted(seen[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))


def test_epochs_come_in_different_orders():
    seen = labels(train(count=10))
    assert seen[:SIZE] != seen[SIZE : 2 * SIZE]


def test_seeds_give_different_orders():
    assert labels(train(seed=0)) != labels(train(seed=1))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_read_the_batch_of_one(processes):
    parts = [train(count=6, rows=rows) for rows in np.arange(8).reshape(processes, -1)]
    for step, whole in enumerate(train(count=6)):
        together = {name: np.concatenate([part[step][name] for part in parts]) for name in whole}
        assert_equal(together, whole)


@pytest.mark.parametrize("step", [1, 5, 9])
def test_starting_at_a_step_is_skipping_to_it(step):
    assert_equal(train(count=1, first_step=step)[0], train(count=10)[step])


def test_repeats_are_augmented_anew_and_the_same_from_any_step_for_any_process():
    batches = train(count=6, repeats=3)
    seen, images = labels(batches), np.concatenate([batch["image"] for batch in batches])
    assert seen[:36] == np.repeat(labels(train(count=2))[:12], 3).tolist()
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (images[one::3] != images[other::3]).any(axis=(1, 2, 3)).mean() > 0.8
    assert_equal(train(count=1, first_step=4, repeats=3)[0], batches[4])
    parts = [train(count=6, repeats=3, rows=rows) for rows in np.arange(8).reshape(2, -1)]
    joined = [np.concatenate([part[k]["image"] for part in parts]) for k in range(6)]
    np.testing.assert_array_equal(np.concatenate(joined), images)


def test_balanced_batches_are_the_same_from_any_step_for_any_process():
    whole = train(count=6, balance="full")
    assert_equal(train(count=1, first_step=4, balance="full")[0], whole[4])
    parts = [train(count=6, balance="full", rows=rows) for rows in np.arange(8).reshape(2, -1)]
    for step, batch in enumerate(whole):
        together = {name: np.concatenate([part[step][name] for part in parts]) for name in batch}
        assert_equal(together, batch)


def test_start_far_into_training_is_immediate():
    (batch,) = train(count=1, first_step=10**9)
    assert batch["image"].shape == (8, 8, 8, 3)


def test_image_is_cropped_anew_in_every_epoch():
    batches = train(count=10, batch_size=SIZE)
    crops = [batch["image"][batch["labels"][:, 0] == 3] for batch in batches]
    assert len({crop.tobytes() for crop in crops}) == 10


def test_worker_processes_give_the_same_batches_though_they_get_sigterm_while_they_start(
    signalled_at_start,
):
    signalled_at_start("TERM")
    # The images are in shared memory, in three chunks.
    options = dict(count=40, size=24, batch_size=150)
    for one, other in zip(train(**options), train(workers=2, **options), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    ("cores", "images", "chosen"),
    [
        (2, 500, (0, 2)),
        (2, 1_281_167, (0, 2)),
        (4, 1_281_167, (0, 4)),
        (16, 4_000, (0, 4)),
        (16, 1_281_167, (4, 4)),
        (240, 1_281_167, (8, 4)),
    ],
)
def test_decoders_suit_the_cores_and_the_images(cores, images, chosen, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert decoders(None, None, images) == chosen
    assert decoders(3, 1, images) == (3, 1)


def test_threads_give_the_same_batches():
    for one, other in zip(train(count=12), train(count=12, threads=3), strict=True):
        assert_equal(one, other)


def test_large_batch_of_many_chunks_is_the_same_for_any_number_of_processes():
    source = numbered(500)
    (whole,) = train(source, count=1, batch_size=202)
    parts = [
        train(source, count=1, batch_size=202, rows=rows)[0]
        for rows in np.arange(202).reshape(2, -1)
    ]
    assert_equal({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)


def evaluate(source=None, **process) -> list[dict]:
    return list(
        evaluation_batches(
            source or numbered(), batch_size=8, crop=TestCrop(8, resize=8), workers=0, **process
        )
    )


def test_evaluation_shows_every_image_once_in_order():
    batches = evaluate()
    kept = np.concatenate([batch["labels"][batch["valid"], 0] for batch in batches])
    assert kept.tolist() == list(range(SIZE))


def test_short_last_batch_is_padded_and_masked():
    *_, last = evaluate()
    assert last["image"].shape == (8, 8, 8, 3)
    assert last["valid"].tolist() == [True] * 5 + [False] * 3
    assert last["labels"][5:].tolist() == [[-1]] * 3


def test_evaluation_has_equally_many_batches_in_every_process():
    parts = [evaluate(rows=rows) for rows in np.arange(8).reshape(4, -1)]
    assert [len(part) for part in parts] == [5] * 4
    kept = [batch["labels"][batch["valid"], 0] for part in parts for batch in part]
    assert sorted(np.concatenate(kept).tolist()) == list(range(SIZE))


@pytest.mark.parametrize("kind", [WithBroken, WithVanished])
def test_unreadable_image_is_replaced_by_its_neighbour_in_training(kind):
    (batch,) = train(with_broken(kind), count=1, batch_size=SIZE)
    seen = batch["labels"][:, 0].tolist()
    assert sorted(seen) == sorted([*(i for i in range(SIZE) if i not in (5, 6)), 7, 7])
    assert sorted(batch["unreadable"][batch["unreadable"] >= 0].tolist()) == [5, 6]


@pytest.mark.parametrize("kind", [WithBroken, WithVanished])
def test_unreadable_image_is_masked_in_evaluation(kind):
    kept = np.concatenate(
        [batch["labels"][batch["valid"], 0] for batch in evaluate(with_broken(kind))]
    )
    assert kept.tolist() == [i for i in range(SIZE) if i not in (5, 6)]


def test_unreadable_image_is_named_once():
    said = []
    log = SkipLog(with_broken(), 10, said.append)
    for batch in train(with_broken(), count=20):
        assert "unreadable" not in log.check(batch)
    assert sorted(said)[0].startswith("unreadable image skipped (1): numbered image ")
    assert said[0].endswith("(not one of the formats JPEG, PNG, WEBP, GIF, BMP)")
    assert len(said) == 2


def test_more_unreadable_images_than_allowed_are_an_error():
    log = SkipLog(with_broken(), 1, print)
    with pytest.raises(UserError, match="more than 1 unreadable images.*numbered image"):
        for batch in train(with_broken(), count=20):
            log.check(batch)
