"""Tests of the suite `imagenet` on a model of 1,000 classes, and of invalid flags.

Other tests of suites are in tests/system.
"""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from tests.data.prepared import png, prepare
from tests.evaluation.test_imagenet import SYNSETS, write_map
from tests.interop.helpers import described, logits_of, random_model, write
from vit_jax import evaluate
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.evaluation.imagenet import IMAGENET_V2
from vit_jax.evaluation.suite_fewshot import parse_sets
from vit_jax.evaluation.suites import SUITES
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.writing import save

TINY = dict(image_size=16, patch_size=4, dim=16, depth=1, mlp_dim=32, heads=2)
SIZES = {"val": 12, "v2": 4, "objectnet": 114}


def pixels(kind: str, number: int) -> np.ndarray:
    rng = np.random.default_rng((SIZES[kind], number))
    return rng.integers(256, size=(20 + number % 3, 24, 3), dtype=np.uint8)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns a function that runs the command in this process.

    The function returns the rows of results.json by name.
    """
    monkeypatch.setattr(evaluate.command, "use_compilation_cache", lambda: None)

    def run(*arguments: str) -> dict[str, dict]:
        with flagsaver.flagsaver():
            evaluate.main(flags.FLAGS(["evaluate", f"--out={tmp_path / 'out'}", *arguments])[1:])
        rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
        return {row["name"]: row for row in rows}

    return run


def score(logits: np.ndarray, right: list[tuple[int, ...]]) -> tuple[float, float, int]:
    """Returns top-1 and top-5 accuracy by counting, and the number of images with a right class."""
    ranked = np.argsort(-logits, axis=1).tolist()
    pairs = [(row, set(classes)) for row, classes in zip(ranked, right, strict=True) if classes]
    top1, top5 = (np.mean([bool(classes & set(row[:k])) for row, classes in pairs]) for k in (1, 5))
    return top1, top5, len(pairs)


def test_accuracies_on_imagenets_sets_equal_counting_on_the_logits(command, tmp_path):
    model = random_model("ViT-B/16", **TINY)
    checkpoint = write(model, tmp_path / "tiny.npz", "google", "ViT-B/16", **TINY)
    images, v2, inside = ([pixels(kind, n) for n in range(size)] for kind, size in SIZES.items())
    squeezed, central = TestCrop(16, "square", 16), TestCrop(16, "short_side", 17)
    seen = [squeezed(image) for image in images + v2] + [central(image) for image in inside]
    logits = logits_of(model, np.stack(seen).astype(np.float32) / 127.5 - 1)
    val_logits, v2_logits, inside_logits, _ = np.split(logits, np.cumsum([12, 4, 113]))
    ranked = np.argsort(-logits, axis=1)

    # Each class is the likeliest, among the first five, or neither.
    own = [int(ranked[i, (0, 3, 500)[i % 3]]) for i in range(12)]
    real = [[[], [own[i]], [own[i], int(ranked[i, 0])]][i % 3] for i in range(12)]
    for synset in SYNSETS:
        (tmp_path / "val" / synset).mkdir(parents=True)
    for i, (image, label) in enumerate(zip(images, own, strict=True)):
        path = tmp_path / "val" / SYNSETS[label] / f"ILSVRC2012_val_{4 * i + 1:08}.JPEG"
        Image.fromarray(image).save(path, "PNG")
    entries = [[] for _ in range(50_000)]
    for i, classes in enumerate(real):
        entries[4 * i] = classes
    (tmp_path / "real.json").write_text(json.dumps(entries))

    v2_labels = [int(ranked[12 + i, (0, 2, 9, 0)[i]]) for i in range(4)]

    def example(number: int) -> dict:
        return dict(image=png(v2[number]), label=v2_labels[number])

    prepare(IMAGENET_V2, tmp_path / "tfds", {"test": 4}, example)

    right = write_map(tmp_path)
    for n, image in enumerate(inside):
        path = tmp_path / "images" / f"folder_{n}" / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=255)).save(path)

    common = (f"--checkpoint={checkpoint}", "--suite=imagenet", "--batch_size=16")
    arguments = (*common, f"--imagenet={tmp_path / 'val'}", f"--data_dir={tmp_path / 'tfds'}")
    rows = command(*arguments, f"--objectnet={tmp_path}")
    assert (
        rows["ReaL"]["accuracy"] is None
        and "give --real=real.json, from https" in rows["ReaL"]["note"]
    )

    def check(name: str, top1: float, top5: float, images: int) -> None:
        assert (rows[name]["accuracy"], rows[name]["images"]) == (pytest.approx(top1), images)
        if f"{name}, top-5" in rows:
            assert rows[f"{name}, top-5"]["accuracy"] == pytest.approx(top5)

    check("ImageNet", *score(val_logits, [(label,) for label in own]))
    assert 0 < rows["ImageNet"]["accuracy"] < rows["ImageNet, top-5"]["accuracy"] < 1
    check("ImageNet-v2", *score(v2_logits, [(label,) for label in v2_labels]))
    check("ObjectNet", *score(inside_logits, [right[f"folder_{n}"] for n in range(113)]))

    # With ReaL's file, only the missing result is computed. The data of other rows are not needed.
    again = command(*common, f"--imagenet={tmp_path / 'val'}", f"--real={tmp_path / 'real.json'}")
    assert {name for name in rows if rows[name] != again[name]} == {"ReaL"}
    rows = again
    check("ReaL", *score(val_logits, real))
    assert rows["ReaL"]["images"] == 8
    assert command(*common) == rows
    with pytest.raises(UserError, match="test_resize: None -> 20.*another --out"):
        command(*common, "--test_resize=20")


def test_results_are_reused_only_for_the_same_parameters_and_images(command, tmp_path, capsys):
    def colours(root, first):
        for split, shift in (("train", 0), ("test", 1)):
            for k, name in enumerate(("a", "b")):
                (root / split / name).mkdir(parents=True, exist_ok=True)
                for n in range(3):
                    shade = np.full((16, 16, 3), first + 100 * k + 2 * n + shift, np.uint8)
                    Image.fromarray(shade).save(root / split / name / f"{n}.png")
        return root

    arguments = TINY | dict(num_classes=2)
    checkpoint = tmp_path / "tiny.npz"

    def written(scale):
        model = random_model("ViT-B/16", **arguments)
        params = {path: scale * x for path, x in params_of(model).items()}
        checkpoint.unlink(missing_ok=True)
        save(checkpoint, "google", described("ViT-B/16", **arguments), params.get)

    def found(*more) -> str:
        capsys.readouterr()
        flagged = (
            f"--set=folder:{root}",
            "--neighbours=1",
            "--suite=knn",
            "--batch_size=8",
            "--workers=0",
        )
        command(f"--checkpoint={checkpoint}", *flagged, *more)
        return capsys.readouterr().out

    written(1.0)
    root = colours(tmp_path / "one" / "pets", 10)
    assert ": reused" not in found() and "knn: pets, 1-NN: reused from" in found()
    root = colours(tmp_path / "two" / "pets", 40)  # The last part of the path is the same.
    assert "knn: pets, 1-NN: recomputed, since the data have changed" in found()
    written(2.0)
    assert "figures of another content of it, which are removed: knn pets, 1-NN" in found()
    shutil.rmtree(root)
    assert "reused from" in (said := found()) and "with no data to compare: " in said


def test_a_replaced_file_of_the_same_name_and_size_changes_the_data_identity(tmp_path):
    def draw(split, number, shade):
        file = tmp_path / split / "ab"[number % 2] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), shade).save(file)
        return file.stat().st_size

    def identity():
        suite = SUITES["knn"]
        values = suite.defaults() | {"set": parse_sets([f"folder:{tmp_path}"]), "image_size": 8}
        (measurement,) = suite.measurements(SimpleNamespace(log=print), values)
        return measurement.identify(measurement.names[0])

    sizes = {draw(split, number, number) for split in ("train", "test") for number in range(100)}
    before = identity()
    assert before == identity() and len(sizes) == 1
    for split in ("train", "test"):
        draw(split, 37, 200)
        after = identity()
        assert {name.split()[0] for name in after if after[name] != before[name]} == {
            {"train": "training"}.get(split, split)
        }
        before = after


def test_imagenet_is_evaluated_with_the_checkpoints_crop_which_the_row_contains(command, tmp_path):
    arguments = TINY | dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    model = random_model("ViT-B/16", **arguments)
    seen = Preprocessing("short_side", 0.8, "bicubic")
    place = tmp_path / "model"
    save(place, "timm", described("ViT-B/16", **arguments), params_of(model).get, seen)
    images = [pixels("val", n) for n in range(SIZES["val"])]
    ways = [TestCrop(16, "short_side", 20, "fast", "bicubic"), TestCrop(16, "square", 16)]
    by_crop, by_squeezing = (
        logits_of(model, np.stack([crop(image) for image in images])).argmax(1) for crop in ways
    )
    assert not np.array_equal(by_crop, by_squeezing)
    for synset in SYNSETS:
        (tmp_path / "val" / synset).mkdir(parents=True)
    for i, (image, label) in enumerate(zip(images, by_crop, strict=True)):
        path = tmp_path / "val" / SYNSETS[label] / f"ILSVRC2012_val_{i + 1:08}.JPEG"
        Image.fromarray(image).save(path, "PNG")
    rows = command(f"--checkpoint={place}", "--suite=imagenet", f"--imagenet={tmp_path / 'val'}")
    assert rows["ImageNet"]["accuracy"] == 1
    assert rows["ImageNet"]["note"] == "the short side to 20, the centre 16x16, bicubic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=vtap"], "unknown suite 'vtap'; did you mean 'vtab'"),
        (
            ["--suite=every"],
            "there are: all, depth, detection, fewshot, imagenet, knn, probe, retrieval, segmentation, sgd_probe, vtab",
        ),
        (
            ["--suite=fewshot", "--set=tfds:dtd", "--set=folder:/a/dtd"],
            "names, which must differ: dtd, dtd",
        ),
        (["--suite=fewshot", "--shots=1,0"], "--shots=1,0: give whole numbers, 1 or above"),
        (
            ["--suite=sgd_probe", "--probe_steps=0"],
            "--probe_steps=0: give a whole number, 1 or above",
        ),
        (["--suite=fewshot", "--seeds=a"], "--seeds=a: give whole numbers, 0 or above"),
        (
            ["--suite=vtab", "--value=batchsize=1"],
            "unknown config key 'batchsize'; did you mean 'batch_size'",
        ),
        (["--suite=vtab", "--value=steps=few"], "--value=steps=few: .*a whole number"),
        (["--suite=fewshot", "--checkpoint=nowhere"], "there is no .*nowhere"),
        (["--suite=fewshot", "more"], "unexpected argument 'more'"),
        ([], "give --checkpoint=WORKDIR, --suite=fewshot and --out=DIR"),
    ],
)
def test_errors_about_flags_are_one_line_before_any_computation(
    arguments, message, command, tmp_path
):
    with pytest.raises(UserError, match=message):
        command("--checkpoint=checkpoint", *arguments)
    assert not (tmp_path / "out").exists()
