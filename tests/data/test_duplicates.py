"""Fingerprints, the two searches for near-duplicates, and the report of removed images."""

import base64
import csv
import functools
import io
import re
import tracemalloc

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.malformed import encode
from vit_jax.preparation.duplicates import (
    DISTANCE,
    NO_FINGERPRINT,
    Removed,
    find,
    fingerprint,
    mirrored,
    nearest,
    write_report,
)


@functools.cache
def scene(seed: int, height: int = 240, width: int = 320) -> np.ndarray:
    """Returns a random image whose amplitudes decrease with the frequency, as in photographs."""
    noise = np.fft.fft2(np.random.default_rng(seed).normal(size=(height, width, 3)), axes=(0, 1))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)) + 1 / width
    image = np.fft.ifft2(noise / frequency[..., None], axes=(0, 1)).real
    return np.clip(128 + 45 * image / image.std(), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def reencoded(image: np.ndarray, quality: int) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(jpeg(image, quality), np.uint8), cv2.IMREAD_COLOR)


def cropped(image: np.ndarray, share: float) -> np.ndarray:
    y, x = round(image.shape[0] * share), round(image.shape[1] * share)
    return image[y : image.shape[0] - y, x : image.shape[1] - x]


def bits(a, b) -> np.ndarray:
    return np.bitwise_count(np.asarray(a) ^ np.asarray(b))


EDITS = {
    "JPEG 30": lambda image: reencoded(image, 30),
    "JPEG 95": lambda image: reencoded(image, 95),
    "quarter": lambda image: cv2.resize(
        image, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA
    ),
    "double": lambda image: cv2.resize(image, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC),
    "square": lambda image: cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA),
    "brighter": lambda image: cv2.convertScaleAbs(image, alpha=1, beta=25),
    "more contrast": lambda image: cv2.convertScaleAbs(image, alpha=1.2, beta=-25),
    "cropped by 1 % a side": lambda image: cropped(image, 0.01),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_copy_has_a_near_fingerprint_but_for_one_in_thirty(edit):
    originals = [scene(seed) for seed in range(30)]
    distances = [bits(fingerprint(image), fingerprint(EDITS[edit](image))) for image in originals]
    assert sum(distance > DISTANCE for distance in distances) <= 1


@pytest.mark.parametrize("edit", EDITS)
def test_edited_photograph_has_a_near_fingerprint(edit):
    data = pytest.importorskip("skimage.data")
    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        image = getattr(data, name)()
        assert bits(fingerprint(image), fingerprint(EDITS[edit](image))) <= DISTANCE, name


def test_different_images_have_distant_fingerprints():
    prints = np.array([fingerprint(scene(seed, 48, 64)) for seed in range(300)])
    distances = bits(prints[:, None], prints)[np.triu_indices(300, 1)]
    assert distances.min() > DISTANCE
    assert 31 < distances.mean() < 33


def test_fingerprint_is_the_signs_of_the_lowest_cosine_waves():
    grey = scene(1, 96, 64)[..., 0]
    small = np.round(grey.reshape(32, 3, 32, 2).mean((1, 3)))
    positions = (np.arange(32) + 0.5) * np.pi / 32
    order = [(u, total - u) for total in range(1, 11) for u in range(total + 1)][:64]
    waves = [np.cos(u * positions) @ small @ np.cos(v * positions) for u, v in order]
    expected = int("".join("1" if wave > 0 else "0" for wave in waves), 2)
    assert int(fingerprint(np.repeat(grey[..., None], 3, axis=2))) == expected


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 255))
def test_image_of_one_colour_has_no_fingerprint(height, width, value):
    assert fingerprint(np.full((height, width, 3), value, np.uint8)) == NO_FINGERPRINT


def test_dark_image_with_sensor_noise_has_no_fingerprint():
    noise = np.random.default_rng(0).integers(0, 4, size=(240, 320, 3), dtype=np.uint8)
    assert fingerprint(reencoded(noise, 60)) == NO_FINGERPRINT


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 1000))
@settings(max_examples=50)
def test_image_of_any_size_and_layout_has_a_fingerprint(height, width, seed):
    image = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    strided = np.repeat(image, 2, axis=1)[:, ::2]
    assert fingerprint(strided) == fingerprint(image)
    assert fingerprint(image).dtype == np.uint64


def test_mirrored_fingerprint_is_that_of_the_mirrored_image():
    images = [scene(seed) for seed in range(20)]
    prints = np.array([fingerprint(image) for image in images])
    expected = [fingerprint(image[:, ::-1]) for image in images]
    assert bits(mirrored(prints), np.array(expected)).max() <= 1


def test_mirroring_keeps_no_fingerprint():
    assert mirrored(np.array([NO_FINGERPRINT])).tolist() == [0]


def found_by_comparing_all(candidates, references, distance):
    found = []
    for candidate in candidates:
        pairs = [(int(bits(candidate, r)), i) for i, r in enumerate(references) if candidate and r]
        near, index = min(pairs, default=(65, -1))
        found.append(index if near <= distance else -1)
    return found


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(0, 30), st.integers(0, 16))
@settings(max_examples=60, deadline=None)
def test_find_returns_what_comparing_all_pairs_does(seed, n, m, distance):
    rng = np.random.default_rng(seed)
    # Copies of a few fingerprints with some changed bits: all distances, ties and equal ones occur.
    bases = np.concatenate([[0], rng.integers(2**64, size=3, dtype=np.uint64)]).astype(np.uint64)

    def draw(count):
        changes = [
            np.bitwise_or.reduce(
                np.uint64(1) << rng.integers(64, size=k, dtype=np.uint64), initial=0
            )
            for k in rng.integers(0, 12, size=count)
        ]
        return bases[rng.integers(4, size=count)] ^ np.array(changes, np.uint64)

    candidates, references = draw(n), draw(m)
    found = find(candidates, references, distance)
    assert found.dtype == np.int64
    assert found.tolist() == found_by_comparing_all(candidates, references, distance)


@pytest.mark.parametrize("distance", [3, 7, 8, 11])
def test_find_misses_no_pair_for_any_distribution_of_changed_bits(distance):
    rng = np.random.default_rng(distance)
    references = rng.integers(1, 2**64, size=1000, dtype=np.uint64)
    flips = np.array([rng.permutation(64)[:distance] for _ in references], np.uint64)
    candidates = references ^ (np.uint64(1) << flips).sum(axis=1, dtype=np.uint64)
    found = find(candidates, references, distance)
    assert (found >= 0).all()
    assert bits(candidates, references[found]).max() <= distance
    assert (find(candidates, references, distance - 1) == -1).all()


def test_find_never_matches_images_without_a_fingerprint():
    none = np.array([NO_FINGERPRINT])
    near = np.array([1], np.uint64)
    assert (
        find(none, none).tolist() == find(none, near).tolist() == find(near, none).tolist() == [-1]
    )


def test_find_finds_mirrored_copies_as_documented():
    references = np.array([fingerprint(scene(seed)) for seed in range(5)])
    candidates = np.array(
        [fingerprint(scene(3)[:, ::-1]), fingerprint(scene(9)), fingerprint(scene(2))]
    )
    found = find(candidates, np.concatenate([references, mirrored(references)]))
    assert np.where(found < 0, -1, found % 5).tolist() == [3, -1, 2]


def test_find_is_bounded_in_memory_where_all_share_a_part():
    rng = np.random.default_rng(0)
    candidates, references = (
        rng.integers(1, 2**48, size=size, dtype=np.uint64) << np.uint64(16)
        for size in (5000, 20_000)
    )  # All 10^8 pairs would take 800 MB.
    tracemalloc.start()
    find(candidates, references, distance=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


def cosines(candidates, references):
    def unit(x):
        return x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)

    return unit(candidates) @ unit(references).T


@given(
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(2, 6),
    st.floats(0.1, 0.99),
)
def test_nearest_returns_the_most_similar_of_all(seed, n, m, dim, similarity):
    rng = np.random.default_rng(seed)
    candidates = rng.normal(size=(n, dim)).astype(np.float32) * rng.uniform(0.01, 100)
    references = rng.normal(size=(m, dim)).astype(np.float32)
    exact = cosines(candidates, references)
    most = exact.max(axis=1)
    # Rounding errors in float32 could decide these cases.
    assume(np.abs(most - similarity).min() > 1e-5)
    found = nearest(candidates, references, similarity)
    assert found.dtype == np.int64
    assert ((found >= 0) == (most >= similarity)).all()
    assert (exact[np.arange(n), found] > most - 1e-5)[found >= 0].all()


def test_nearest_finds_scaled_copies_in_every_block():
    rng = np.random.default_rng(0)
    references = rng.normal(size=(9000, 16)).astype(np.float32)
    chosen = rng.integers(9000, size=3000)
    assert (nearest(3 * references[chosen], references, 0.999) == chosen).all()


def test_nearest_never_matches_an_embedding_without_direction():
    bad = np.array([[0, 0], [np.nan, 1], [np.inf, 0]], np.float32)
    good = np.array([[1, 0]], np.float32)
    assert nearest(bad, np.concatenate([bad, good]), 0.1).tolist() == [-1, -1, -1]
    assert nearest(good, np.concatenate([bad, good]), 0.1).tolist() == [3]


def rows(values, images=None):
    return [
        Removed(f"train/{i}.jpg", f"test/{i % 2}.jpg", value, images)
        for i, value in enumerate(values)
    ]


def report(folder, removed, measure="distance"):
    return write_report(folder, removed, measure=measure, examples=1200, references=100)


@pytest.mark.parametrize(("measure", "order"), [("distance", "1 2 7"), ("similarity", "7 2 1")])
def test_csv_lists_all_removed_from_the_nearest(tmp_path, measure, order):
    report(tmp_path, rows([2, 7, 1]), measure)
    with open(tmp_path / "removed.csv", newline="", encoding="utf-8-sig") as file:
        header, *lines = csv.reader(file)
    assert header == ["example", "reference", measure]
    assert [value for _, _, value in lines] == order.split()


def test_csv_keeps_names_with_commas_quotes_and_any_letters(tmp_path):
    name = 'a, "b"\n猫.jpg'
    report(tmp_path, [Removed(name, "test/0.jpg", 3)])
    with open(tmp_path / "removed.csv", newline="", encoding="utf-8-sig") as file:
        assert list(csv.reader(file))[1] == [name, "test/0.jpg", "3"]


def test_name_that_is_no_utf8_can_be_reported(tmp_path):
    path = report(tmp_path, [Removed("caf\udce9.jpg", "b", 0, (b"", b""))])
    assert r"caf\udce9.jpg" in path.read_text()


def test_html_counts_what_was_removed_at_each_distance(tmp_path):
    text = report(tmp_path, rows([8, 0, 8])).read_text()
    assert "3 of 1,200 training examples removed" in text
    assert "0.25%, near-duplicates of 2 of the 100 references" in text
    assert re.findall(r"<tr><td>(\d+)<td>(\d+)", text) == [("0", "1"), ("8", "2")]


def test_html_shows_pairs_from_the_nearest(tmp_path):
    pair = jpeg(scene(0)), jpeg(scene(1))
    text = report(tmp_path, rows([5, 0, 3], pair) + rows([1])).read_text()
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["distance 0", "distance 3", "distance 5"]
    assert text.count("<img") == 6


def test_html_needs_no_other_file(tmp_path):
    text = report(tmp_path, rows([0], (jpeg(scene(0)),) * 2)).read_text()
    assert set(re.findall(r'src="(.{23})', text)) == {"data:image/jpeg;base64,"}
    assert not any(word in text for word in ("http:", "https:", "url("))


def test_thumbnails_are_small(tmp_path):
    path = report(tmp_path, rows([0], (jpeg(cv2.resize(scene(0), (2000, 1500)), 95),) * 2))
    assert path.stat().st_size < 60_000


def test_thumbnail_of_a_transparent_picture_lies_on_white(tmp_path):
    """The colours of transparent pixels are not displayed, as they could hide the similar parts."""
    data = encode(Image.new("RGBA", (40, 40), (0, 200, 0, 0)), "PNG", "RGBA")
    text = report(tmp_path, rows([0], (data, data))).read_text()
    for shown in re.findall(r"base64,([^\"]+)", text):
        assert np.asarray(Image.open(io.BytesIO(base64.b64decode(shown)))).min() > 250


def test_names_are_escaped(tmp_path):
    name = '<script>alert("&")</script>'
    text = report(tmp_path, [Removed(name, name, 0, (b"", b""))]).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 2


@pytest.mark.parametrize("image", [b"", b"no image", jpeg(scene(0))[:50]])
def test_image_that_cannot_be_read_leaves_an_empty_box(tmp_path, image):
    text = report(tmp_path, rows([0], (image, jpeg(scene(0))))).read_text()
    assert text.count("<img") == 1


def test_report_without_duplicates_has_no_table(tmp_path):
    text = report(tmp_path, []).read_text()
    assert "0 of 1,200 training examples removed" in text
    assert "<table" not in text
