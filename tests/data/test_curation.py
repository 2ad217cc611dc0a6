"""Curation retrieves images that are similar to a curated set from a larger set, each once."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.data.decode import Unreadable
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.parallel import process_settings
from vit_jax.preparation import index, readers, similarity_index, writer
from vit_jax.preparation.kept_embeddings import Embedder
from vit_jax.preparation.similarity_index import SimilarityIndex, lists_for, need_faiss

CROP = TestCrop(4, "square", 4)
SIMILARITY = 0.9


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(index, "CHUNK", 16)


def vector(image: bytes) -> np.ndarray:
    """Returns the embedding of an image in these tests: its 4x4 pixels minus their mean."""
    pixels = CROP(image).astype(np.float32).ravel()
    return pixels - pixels.mean()


class Counting:
    """An embedder that counts the images that it received."""

    def __init__(self, key: str = "pixels"):
        self.shown = 0
        self.embedder = Embedder(key, 48, self._embed)

    def _embed(self, source):
        indices, vectors = [], []
        for i in range(len(source)):
            self.shown += 1
            try:
                vectors.append(vector(source[i].image))
            except Unreadable:
                continue
            indices.append(i)
        return np.array(indices, np.int64), np.array(vectors, np.float32).reshape(-1, 48)


def scene(rng: np.random.Generator) -> Image.Image:
    return Image.fromarray(rng.integers(256, size=(4, 4, 3), dtype=np.uint8)).resize((24, 20))


def write(image: Image.Image, path: Path, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def sets(tmp_path) -> tuple[Path, Path]:
    """Returns an uncurated and a curated folder.

    The uncurated folder has 50 images, copies of 10 of them, 21 broken files and an image of one
    colour. The curated folder has 7 images.
    """
    rng = np.random.default_rng(0)
    pool, curated = tmp_path / "pool", tmp_path / "curated"
    for i in range(50):
        image = scene(rng)
        write(image, pool / "b" / f"{i:02d}.png")
        if i < 10:
            write(image, pool / "abc"[i % 3] / f"{i:02d}-copy.jpg", quality=80)
    (pool / "b" / "broken.jpg").write_bytes(b"no image")
    for i in range(20):  # More broken images than one chunk contains.
        (pool / "a" / f"broken-{i}.jpg").write_bytes(b"")
    write(Image.new("RGB", (8, 8), (9, 9, 9)), pool / "b" / "flat.png")
    for i in range(7):
        write(scene(rng), curated / f"{i}.png")
    return pool, curated


def run(tasks, what, unit):
    for task in tasks:
        if not task.result.exists():
            task.function(*task.arguments)


def retrieve(sets, out, model=None, run=run, **options) -> writer.Prepared:
    pool, curated = sets
    given = dict(
        retrieve_for=(str(curated),), embeddings="pixels", similarity=SIMILARITY, neighbours=3
    )
    source = readers.find(str(pool), "images", None)
    model = model or Counting()
    return writer.prepare(
        source, out, writer.Options(**given | options), run, run, (model.embedder, run)
    )


@pytest.mark.parametrize("option", [{"retrieve_for": ("set",)}, {"embeddings": "model"}])
def test_options_that_need_embeddings_are_rejected_without(option, sets, tmp_path):
    source = readers.find(str(sets[0]), "images", None)
    with pytest.raises(
        UserError, match=f"{next(iter(option))}=.*: give prepare an embedding, such"
    ):
        writer.prepare(source, tmp_path / "out", writer.Options(**option), run, run)


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))[1:]


def unit(paths: list[Path]) -> np.ndarray:
    vectors = np.array([vector(path.read_bytes()) for path in paths], np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def brute_force(sets, similarity: float) -> tuple[list[Path], list[Path]]:
    """Returns the kept images of the uncurated folder, sorted by path, and the removed ones."""
    paths = [
        path
        for path in sorted(sets[0].rglob("*.*"))
        if path.stat().st_size > 9 and path.stem != "flat"
    ]
    vectors, kept = unit(paths), []
    for i in range(len(paths)):
        if not (vectors[kept] @ vectors[i] >= similarity).any():
            kept.append(i)
    return [paths[i] for i in kept], [path for i, path in enumerate(paths) if i not in kept]


def content(done: writer.Prepared) -> list[bytes]:
    source = open_source("tfds", "train", path=done.path, labels=False)
    return [bytes(source[i].image) for i in range(len(source))]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_retrieved_images_are_the_result_of_comparing_all(sets, tmp_path):
    done = retrieve(sets, tmp_path / "out")
    kept, removed = brute_force(sets, SIMILARITY)
    curated = sorted(sets[1].iterdir())
    cosines = unit(curated) @ unit(kept).T
    expected = [
        [str(curated[i]), str(kept[j]), f"{cosines[i, j]:.4f}"]
        for i in range(7)
        for j in np.argsort(-cosines[i])[:3]
    ]
    found = read_csv(done.folder / "retrieved.csv")
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert np.allclose(
        [float(row[2]) for row in found], [float(row[2]) for row in expected], atol=2e-4
    )
    retrieved = {Path(example).read_bytes() for _, example, _ in expected}
    # Some images are near to several curated images, but are contained only once.
    assert len(retrieved) < 21
    assert set(content(done)) == retrieved and len(content(done)) == len(retrieved)
    assert done.splits == {"train": len(retrieved)} and done.duplicates == len(removed) == 10


def test_copies_are_removed_and_listed_with_the_image_that_is_kept(sets, tmp_path):
    # 50 neighbours: all images are retrieved.
    done = retrieve(sets, tmp_path / "out", neighbours=50)
    found = read_csv(done.folder / "duplicates.csv")
    assert {example for example, *_ in found} == {
        str(path) for path in brute_force(sets, SIMILARITY)[1]
    }
    for example, kept, similarity in found:
        assert Path(example).name[:2] == Path(kept).name[:2] and float(similarity) >= SIMILARITY
    images = content(done)
    cosines = np.corrcoef([vector(image) for image in images]) - np.eye(len(images))
    assert len(images) == 50 and cosines.max() < SIMILARITY


@pytest.mark.parametrize("lists", [0, 4])
def test_killed_anywhere_and_started_again_it_writes_the_same_bytes(
    lists, sets, tmp_path, monkeypatch
):
    if lists:
        monkeypatch.setattr(similarity_index, "EXACT", 30)
        monkeypatch.setattr(similarity_index, "LISTS", 0.5)
    undisturbed = retrieve(sets, tmp_path / "undisturbed")

    class Killed(BaseException):
        pass

    def one_task(tasks, what, unit):
        """Runs the first unfinished task, and raises the exception."""
        for task in tasks:
            if not task.result.exists():
                task.function(*task.arguments)
                raise Killed

    model, kills, done = Counting(), 0, None
    while done is None:
        try:
            done = retrieve(sets, tmp_path / "out", model, one_task)
        except Killed:
            kills += 1
    assert kills == 16 and model.shown == 82 + 7
    assert files(done.folder).keys() == files(undisturbed.folder).keys()
    for name, found in files(done.folder).items():
        assert name == writer.SUMMARY or found == files(undisturbed.folder)[name], name


def test_embeddings_are_of_a_model_and_a_source(sets, tmp_path):
    model = Counting()
    retrieve(sets, tmp_path / "out", model, name="first")
    retrieve(sets, tmp_path / "out", model, name="second", similarity=0.99, neighbours=1)
    assert model.shown == 82 + 7
    other = Counting("other")
    retrieve(sets, tmp_path / "out", other, name="third")
    assert other.shown == 82 + 7
    write(scene(np.random.default_rng(9)), sets[1] / "9.png")
    retrieve(sets, tmp_path / "out", model, name="fourth")
    assert model.shown == 82 + 7 + 8
    with pytest.raises(UserError, match="was started with other images in --retrieve_for"):
        retrieve(sets, tmp_path / "out", model, name="first")
    with pytest.raises(UserError, match="was started with another model in --embeddings"):
        retrieve(sets, tmp_path / "out", Counting("other"), name="fourth")


def test_several_sets_and_near_duplicates_of_test_images(sets, tmp_path):
    pool, curated = sets
    for name in ("05.png", "20.png"):
        write(
            Image.open(pool / "b" / name),
            tmp_path / "tests" / "test" / "a" / name.replace("png", "jpg"),
        )
    tests = writer.prepare(
        readers.find(str(tmp_path / "tests")), tmp_path / "prepared", writer.Options(), run, run
    )
    options = dict(
        retrieve_for=(str(curated), f"folder:{curated}@all[:5],all"),
        deduplicate_against=(f"tests:{tmp_path / 'prepared'}/test",),
        neighbours=47,
    )
    done = retrieve(sets, tmp_path / "out", **options)
    assert tests.splits == {"test": 2}
    assert done.removed == 3 and done.duplicates == 9 and done.splits == {"train": 48}
    left = {
        path.name
        for path in pool.rglob("*")
        if path.is_file() and path.read_bytes() in content(done)
    }
    assert not left & {"05.png", "05-copy.jpg", "20.png"}
    assert len(read_csv(done.folder / "retrieved.csv")) == (7 + 5) * 47
    with pytest.raises(
        UserError, match="--neighbours=49: only 48 different images can be retrieved"
    ):
        retrieve(sets, tmp_path / "out", **options | dict(neighbours=49, name="more"))


def test_page_shows_curated_images_neighbours_and_near_duplicates(sets, tmp_path):
    done = retrieve(sets, tmp_path / "out")
    page = (done.folder / "curated.html").read_text()
    assert page.count('class="row"') == 7 and page.count('class="pair"') == 10 + 12
    assert page.count("<img") == 7 * 4 + 22 * 2 and "://" not in page
    assert "removed as near-duplicates of others (similarity 0.9 or above)" in page


def test_index_of_lists_finds_nearly_all_neighbours(monkeypatch):
    monkeypatch.setattr(similarity_index, "EXACT", 1000)
    assert lists_for(1000) == 0 and lists_for(2500) == 200
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(100, 16))
    vectors = centres[rng.integers(100, size=2500)] + 0.5 * rng.normal(size=(2500, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    exact, lists = SimilarityIndex(16), SimilarityIndex(16, 50, vectors)
    for made in (exact, lists):
        made.add(vectors[:2000])
        made.add(vectors[2000:])
        assert len(made) == 2500
    cosines, numbers = exact.nearest(vectors, 5)
    assert (numbers[:, 0] == np.arange(2500)).all() and np.allclose(cosines[:, 0], 1, atol=1e-5)
    assert np.array_equal(np.sort(numbers), np.sort(np.argsort(-(vectors @ vectors.T))[:, :5]))
    monkeypatch.setattr(similarity_index, "PROBED", 8)
    few = SimilarityIndex(16, 50, vectors)
    few.add(vectors)
    found = few.nearest(vectors, 5)[1]
    assert (found[:, :, None] == numbers[:, None]).any(axis=2).mean() > 0.9
    assert np.array_equal(lists.nearest(vectors, 5)[1], numbers)  # All lists are searched.


def test_missing_faiss_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        UserError, match=r'--retrieve_for needs faiss: pip install -e "\.\[curate\]"'
    ):
        need_faiss()


def test_index_larger_than_the_memory_is_refused_before_anything_is_embedded(
    sets, tmp_path, monkeypatch
):
    monkeypatch.setattr(process_settings, "host_memory", lambda: (2**30, 10_000))
    model = Counting()
    with pytest.raises(UserError, match="82 images need an index of .* GiB"):
        retrieve(sets, tmp_path / "out", model)
    assert model.shown == 0


@pytest.mark.parametrize(
    ("curated", "message"),
    [
        ("nowhere", "cannot read the data set 'nowhere'"),
        ("folder:/nowhere", "no folder /nowhere/train"),
        ("{tmp}/empty", "no images in {tmp}/empty: it must hold "),
        ("{tmp}/broken", "--retrieve_for={tmp}/broken: none of the 1 images can be read"),
    ],
)
def test_a_wrong_curated_set_is_named(curated, message, sets, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.jpg").write_bytes(b"")
    with pytest.raises(UserError) as error:
        retrieve(sets, tmp_path / "out", retrieve_for=(curated.format(tmp=tmp_path),))
    assert message.format(tmp=tmp_path) in str(error.value)


def test_loose_images_are_a_data_set_without_labels(sets, tmp_path):
    source = readers.find(str(sets[1]))
    done = writer.prepare(source, tmp_path / "out", writer.Options(), run, run)
    assert done.splits == {"train": 7}
    assert set(content(done)) == {path.read_bytes() for path in sets[1].iterdir()}


def test_command_compares_by_the_features_of_a_checkpoint(sets, tmp_path):
    pool, curated = sets
    arguments = dict(dim=16, depth=1, heads=2, mlp_dim=32, image_size=32)
    model = vit_jax.create_model("ViT-mu/16", num_classes=3, **arguments)
    vit_jax.save_model(model, tmp_path / "model.npz", log=str)
    given = (
        pool,
        "--kind=images",
        f"--out={tmp_path / 'out'}",
        f"--retrieve_for={curated}",
        "--workers=1",
    )
    given = (
        *given,
        f"--embeddings={tmp_path / 'model.npz'}",
        "--similarity=0.9999",
        "--neighbours=2",
    )
    result = subprocess.run(
        [sys.executable, "-m", "vit_jax.prepare", *map(str, given)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    *_, made, flags = result.stdout.splitlines()
    assert "as near-duplicates of other images; see curated.html" in made
    assert flags.endswith(f"--config.data.path=pool:1.0.0:{tmp_path / 'out'}")
    crop, found = (
        TestCrop(32, "square", 32),
        read_csv(tmp_path / "out" / "pool" / "1.0.0" / "retrieved.csv"),
    )
    assert len(found) == 14
    for example, near, similarity in found:
        pixels = np.stack([crop(Path(path).read_bytes()) for path in (example, near)])
        ours, theirs = np.asarray(model.features(pixels), np.float64)
        cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert abs(cosine - float(similarity)) < 1e-3
