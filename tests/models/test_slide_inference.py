"""Sliding windows have the class maps of mmsegmentation's slide inference."""

import math
import tracemalloc

import numpy as np
import pytest

from vit_jax.models.dense.windows import LONGEST, bilinear, sliding, whole

WINDOW, PLACES, CLASSES = 24, 6, 5
# Height and width: square, wide, high, smaller than a window, very wide, one pixel, as wide as a
# window.
SIDES = [(24, 24), (30, 47), (200, 61), (9, 13), (7, 100), (1, 1), (11, 24)]


def resize(torch, scores, sides):
    return torch.nn.functional.interpolate(scores, size=sides, mode="bilinear", align_corners=False)


def slide_inference(torch, scores, starts, resized, sides):
    """Averages the scores of windows as mmsegmentation does, at the original image's pixels.

    Args:
      scores: `[windows, rows, columns, classes]`.
      starts: top and left of each window in the resized image.
    """
    total = torch.zeros(1, scores.shape[-1], *resized)
    count = torch.zeros(1, 1, *resized)
    for window, (top, left) in zip(scores, starts, strict=True):
        here = np.s_[:, :, top : top + WINDOW, left : left + WINDOW]
        upscaled = resize(torch, torch.from_numpy(window).permute(2, 0, 1)[None], (WINDOW, WINDOW))
        total[here] += upscaled
        count[here] += 1
    assert (count > 0).all()
    return resize(torch, total / count, sides)[0].numpy()


@pytest.mark.parametrize("sides", SIDES)
def test_class_maps_are_those_of_slide_inference(torch, sides):
    windows = sliding(sides, (WINDOW, WINDOW))
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(windows.count, PLACES, PLACES, CLASSES)).astype(np.float32)
    starts = [(y, x) for y in windows.rows.starts for x in windows.columns.starts]
    expected = slide_inference(torch, scores, starts, windows.resized, sides)
    found = windows.class_map(scores)
    assert found.shape == sides and found.dtype == np.uint8
    second, first = np.sort(expected, axis=0)[-2:]
    clear = first - second > 1e-4
    assert clear.mean() > 0.99
    assert (found == expected.argmax(axis=0))[clear].all()


@pytest.mark.parametrize("sides", SIDES)
def test_windows_cover_the_image_in_dinov3s_steps(sides):
    windows = sliding(sides, (WINDOW, WINDOW))
    assert min(windows.resized) == WINDOW  # The short side is resized to the window.
    ratio = max(windows.resized) / WINDOW
    assert math.isclose(ratio, max(sides) / min(sides), abs_tol=1 / WINDOW)
    for axis in (windows.rows, windows.columns):
        # DINOv3's formula for the number of windows, with a stride of two thirds.
        stride = 2 * WINDOW // 3
        number = max(axis.resized - WINDOW + stride - 1, 0) // stride + 1
        starts = [min(index * stride, axis.resized - WINDOW) for index in range(number)]
        assert list(axis.starts) == starts


def test_windows_are_cut_in_the_order_of_their_scores():
    windows = sliding((24, 60), (WINDOW, WINDOW))
    image = np.random.default_rng(1).integers(0, 256, (*windows.resized, 3), np.uint8)
    for cut, left in zip(windows.cut(image), windows.columns.starts, strict=True):
        assert (cut == image[:, left : left + WINDOW]).all()


def test_an_image_with_an_extreme_aspect_ratio_is_squeezed():
    windows = sliding((1, 100_000), (WINDOW, WINDOW))
    assert windows.resized == (WINDOW, LONGEST * WINDOW)
    scores = np.zeros((windows.count, PLACES, PLACES, CLASSES), np.float32)
    assert windows.class_map(scores).shape == (1, 100_000)


def test_one_window_of_a_whole_image_is_resized(torch):
    scores = np.random.default_rng(2).normal(size=(1, PLACES, PLACES, CLASSES)).astype(np.float32)
    inside = resize(torch, torch.from_numpy(scores).permute(0, 3, 1, 2), (WINDOW, WINDOW))
    expected = resize(torch, inside, (31, 50))[0].argmax(dim=0).numpy()
    assert (whole((31, 50), (WINDOW, WINDOW)).class_map(scores) == expected).mean() > 0.999


def test_windows_may_be_rectangular():
    windows = sliding((100, 100), (16, 32))
    assert windows.resized == (32, 32) and windows.rows.starts == (0, 10, 16)
    assert windows.columns.starts == (0,)


def test_class_maps_of_more_than_255_classes_have_a_wider_dtype():
    scores = np.zeros((1, 2, 2, 300), np.float32)
    scores[..., 299] = 1
    found = whole((3, 3), (WINDOW, WINDOW)).class_map(scores)
    assert found.dtype == np.uint16 and (found == 299).all()


def test_scores_of_all_pixels_are_never_in_memory():
    windows = sliding((1500, 2000), (512, 512))
    scores = np.random.default_rng(3).random((windows.count, 32, 32, 150), np.float32)
    tracemalloc.start()
    windows.class_map(scores)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6  # The scores of all pixels would be 1.8 GB.


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_resizing_is_pytorchs(torch, size):
    values = np.random.default_rng(4).normal(size=(7, 2)).astype(np.float32)
    expected = resize(torch, torch.from_numpy(values)[None, None], (size, 2))[0, 0].numpy()
    np.testing.assert_allclose(bilinear(values, size), expected, atol=1e-6)


def test_value_maps_are_blended_in_overlaps_of_windows():
    """Values change gradually from one window to the next, unlike in a mean."""
    windows = sliding((WINDOW, 3 * WINDOW), (WINDOW, WINDOW))
    values = np.arange(windows.count, dtype=np.float32)[:, None, None, None]
    values = np.broadcast_to(values, (windows.count, PLACES, PLACES, 1))
    (row, *others) = windows.value_map(values)
    assert all(np.array_equal(row, other) for other in others) and row.dtype == np.float32
    assert row[0] == 0 and row[-1] == windows.count - 1
    assert (np.diff(row) >= 0).all() and np.diff(row).max() < 2 / (WINDOW // 3)
    np.testing.assert_allclose(windows.value_map(np.full_like(values, 7)), 7, rtol=1e-6)
