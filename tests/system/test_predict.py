"""The command `vit_jax.predict` on image files, with predictions as lines or files."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors.numpy import load_file

import vit_jax
from tests.conftest import HANG
from tests.system.conftest import ROOT
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.digits import digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of ten test digits and of files that are skipped.

    Half of the digits are in a subfolder. One has a transparent background, one an unusual name.
    """
    folder = tmp_path_factory.mktemp("images")
    source = digits("test")
    (folder / "more").mkdir()
    for index in range(10):
        image = Image.fromarray(source[index].image)
        if index == 4:
            image.putalpha(image.convert("L").point(lambda level: 255 * (level > 60)))
        image.save(folder / ("more" if index % 2 else "") / f"{index}.png")
    os.rename(folder / "8.png", os.fsencode(folder) + b"/\xe9\n8.png")
    Image.new("RGB", (8, 8)).save(folder / "scan.tif")
    (folder / "broken.jpg").write_bytes(b"not an image")
    (folder / "notes.txt").write_text("not named as an image")
    return folder


@pytest.fixture(scope="module")
def predict(run, finished, no_tensorflow):
    def predict(*arguments, **options):
        command = [
            sys.executable,
            "-m",
            "vit_jax.predict",
            f"--checkpoint={finished}",
            *map(str, arguments),
        ]
        environment = run.environment | {"PYTHONPATH": no_tensorflow.python_path}
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, timeout=HANG, **options
        )

    return predict


@pytest.fixture(scope="module")
def lines(predict, folder):
    """Returns the output of --json for the folder, by path, and the process."""
    process = predict("--json", "--top=10", "--batch_size=4", folder)
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    return {row["path"]: row["predictions"] for row in rows}, process


def test_every_image_of_a_folder_is_a_line(lines, folder):
    assert sorted(lines[0]) == sorted(map(str, folder.rglob("*.png")))


def test_probabilities_are_the_models_own(lines, finished):
    model = vit_jax.load_model(finished, log=str)
    crop = TestCrop(16, "short_side", 16)
    for path, predictions in lines[0].items():
        rgba = Image.open(path).convert("RGBA")
        on_white = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
        image = crop(np.asarray(on_white))
        wanted = np.asarray(jax.nn.softmax(model(image[None].astype(np.float32) / 127.5 - 1)))[0]
        assert [p["class"] for p in predictions] == [
            str(label) for label in np.argsort(-wanted, kind="stable")
        ]
        np.testing.assert_allclose(
            [p["probability"] for p in predictions], -np.sort(-wanted), rtol=1e-4
        )


@pytest.mark.slow
def test_threshold_names_the_classes_that_reach_it(predict, folder, lines):
    path = str(folder / "2.png")
    limit = lines[0][path][1]["probability"] * 0.999
    process = predict("--json", f"--threshold={limit}", path)
    assert json.loads(process.stdout)["predictions"] == lines[0][path][:2]
    assert predict("--threshold=1", path).stdout.decode() == f"{path}  (no class)\n"


@pytest.mark.slow
def test_model_of_wide_images_receives_wide_crops(predict, folder, finished):
    process = predict("--image_size=16x24", "--json", "--top=10", folder / "2.png")
    (line,) = map(json.loads, process.stdout.splitlines())
    model = vit_jax.load_model(finished, log=str, image_size=(16, 24))
    image = TestCrop((16, 24), "short_side", 16)(np.asarray(Image.open(folder / "2.png")))
    wanted = np.asarray(jax.nn.softmax(model(image[None].astype(np.float32) / 127.5 - 1)))[0]
    found = {int(p["class"]): p["probability"] for p in line["predictions"]}
    np.testing.assert_allclose([found[label] for label in range(10)], wanted, rtol=1e-4)


def test_unreadable_images_are_named_and_change_the_exit_code(lines, folder):
    _, process = lines
    assert process.returncode == 3
    said = process.stderr.decode()
    assert (
        f"unreadable image skipped (1): {folder / 'broken.jpg'} (not one of the formats JPEG"
        in said
    )
    assert "note: skipped: 1 .tif images (unsupported format), 1 .txt files" in said


@pytest.mark.slow
def test_line_has_the_name_of_a_file_as_it_is(predict, folder):
    process = predict("--top=1", folder / "*8.png", folder / "scan.tif")
    assert (
        process.stdout.startswith(os.fsencode(folder) + b"/\xe9\\n8.png  ")
        and process.stdout.count(b"\n") == 1
    )
    assert process.returncode == 3


def test_predicting_imports_no_tensorflow(lines, no_tensorflow):
    assert lines[0]
    no_tensorflow.check()


@pytest.mark.slow
def test_features_are_written_with_their_paths(predict, folder, finished, tmp_path):
    images = sorted(map(str, (folder / "more").glob("*.png")))
    for file in (tmp_path / "f.safetensors", tmp_path / "f.parquet"):
        process = predict(f"--embed={file}", os.path.join(folder, "more", "*.png"))
        assert process.returncode == 0, process.stderr
    table = pyarrow.parquet.read_table(tmp_path / "f.parquet").to_pydict()
    features = load_file(tmp_path / "f.safetensors")["features"]
    assert table["path"] == images and features.shape == (5, 16)
    np.testing.assert_array_equal(table["features"], features)
    model = vit_jax.load_model(finished, log=str)
    model.head = None
    batch = np.stack(
        [TestCrop(16, "short_side", 16)(np.asarray(Image.open(path))) for path in images]
    )
    np.testing.assert_allclose(
        features, model(batch.astype(np.float32) / 127.5 - 1), rtol=1e-4, atol=1e-5
    )
    again = predict(f"--embed={tmp_path / 'f.parquet'}", folder)
    assert again.returncode == 2 and "f.parquet exists; give --overwrite" in again.stderr.decode()


@pytest.mark.slow
def test_predictions_go_to_a_new_file(predict, folder, lines, tmp_path):
    process = predict(f"--out={tmp_path / 'p.csv'}", "--top=10", folder)
    assert process.returncode == 3 and not process.stdout, process.stderr
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    rows = pyarrow.csv.read_csv(tmp_path / "p.csv", parse_options=options).to_pylist()
    assert len(rows) == 10 and {*map(len, rows)} == {21}
    for row in rows:
        best, *_ = lines[0][os.fsdecode(row["file"].encode().replace(rb"\udce9", b"\xe9"))]
        assert str(row["class"]) == best["class"]
        assert row["probability"] == pytest.approx(best["probability"], rel=1e-4)
    again = predict(f"--out={tmp_path / 'p.csv'}", folder)
    assert again.returncode == 2 and "p.csv exists; give --overwrite" in again.stderr.decode()


@pytest.mark.slow
def test_standard_input_is_paths_or_an_image(predict, folder, lines):
    path = str(folder / "2.png")
    (best, *_) = lines[0][path]
    for content, name in ((f"{path}\n".encode(), path), ((folder / "2.png").read_bytes(), "-")):
        process = predict("--top=1", "-", input=content)
        assert process.stdout.decode() == f"{name}  {best['class']} {best['probability']:.1%}\n"


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "at least one image"),
        (["nowhere.jpg"], "there is no nowhere.jpg"),
        (["{empty}"], "no images (.jpg, .jpeg, "),
        (["{folder}/broken.jpg"], "none of the 1 files is an image"),
        (["--embed=f.npy", "{folder}"], ".safetensors or .parquet"),
        (["--embed=nowhere/f.parquet", "{folder}"], "there is no folder nowhere"),
        (["--out=p.xlsx", "{folder}"], "the suffix is the format, one of .csv, .jsonl"),
        (["--csv", "--out=p.jsonl", "{folder}"], "are two formats: remove --csv"),
        (
            ["--csv", "--embed=f.parquet", "{folder}"],
            "features, not predictions: give it without --csv",
        ),
        (["--top=2", "--embed=f.parquet", "{folder}"], "give it without --top"),
        (["--resize=8", "{folder}"], "--resize=8 is less than the 16 pixels"),
    ],
)
def test_mistake_is_one_line(predict, folder, tmp_path, paths, words):
    process = predict(*(path.format(empty=tmp_path, folder=folder) for path in paths))
    assert process.returncode == 2
    assert process.stderr.decode().splitlines()[-1].startswith("error: ")
    assert words in process.stderr.decode().splitlines()[-1]
