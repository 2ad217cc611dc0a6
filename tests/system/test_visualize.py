"""The page of figures, as written by the command and as rendered by a browser."""

import base64
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import HANG
from tests.system import browser
from tests.system.conftest import ROOT
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.digits import digits
from vit_jax.inspection.attention_maps import attention_distance, of_patches, rollout

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    for index in range(3):
        Image.fromarray(digits("test")[index].image).resize((48, 48)).save(folder / f"{index}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def visualize(run, no_tensorflow, *arguments):
    command = [sys.executable, "-m", "vit_jax.visualize", *map(str, arguments)]
    environment = run.environment | {"PYTHONPATH": no_tensorflow.python_path}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )


@pytest.fixture(scope="module")
def shown(run, no_tensorflow, finished, images, tmp_path_factory):
    """Returns the folder of figures and the output of the command."""
    out = tmp_path_factory.mktemp("figures") / "out"
    flags = (
        f"--checkpoint={finished}",
        f"--images={images}",
        f"--out={out}",
        "--layers",
        "--heads",
    )
    result = visualize(run, no_tensorflow, *flags)
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_every_figure_is_on_the_page(shown):
    out, printed = shown
    pictures = sorted(path.name for path in out.glob("*.png"))
    assert {"rollout.png", "distance.png", "positions.png", "filters.png", "tokens.png"} < {
        *pictures
    }
    assert {"layers_2.png", "heads_2.png"} < {*pictures}
    page = (out / "index.html").read_text()
    # These are drawn over images, or are SVG on the page.
    elsewhere = {"rollout.png", "tokens.png", "distance.png"}
    for name in {*pictures} - elsewhere:
        assert base64.b64encode((out / name).read_bytes()).decode() in page
    assert page.index('class="attention"') < page.index("Checkpoint: ") < page.index("<h2>")
    assert "<h1>What ViT-16x1 (MLP 32, 2 heads)/4 trained on digits sees</h1>" in page
    assert "unreadable image skipped" in printed


def test_arrays_are_the_attention_of_the_model(shown, finished):
    arrays = np.load(shown[0] / "arrays.npz")
    model = vit_jax.load_model(finished, log=str)
    pixels = arrays["images"].astype(np.float32) / 127.5 - 1
    _, found = jax.device_get(model(pixels, capture=("attention",)))
    np.testing.assert_allclose(
        arrays["rollout"], of_patches(model, rollout(found["attention"])[-1]), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        arrays["distance"], attention_distance(model, found["attention"]), rtol=1e-4
    )


@pytest.mark.slow
def test_run_shows_its_own_test_images(run, no_tensorflow, finished, tmp_path):
    out = tmp_path / "out"
    result = visualize(run, no_tensorflow, f"--checkpoint={finished}", f"--out={out}", "--most=2")
    assert result.returncode == 0, result.stderr
    expected = [TestCrop(16, resize=16)(digits("test")[index].image) for index in range(2)]
    np.testing.assert_array_equal(np.load(out / "arrays.npz")["images"], expected)


@browser.needed
def test_sliders_draw_the_attention_of_layer_and_head(shown, tmp_path):
    """The canvas displays the stored arrays, in wide and narrow windows, in light and dark mode."""
    probe = f"""page => {{
        const at = name => page.querySelector(name), found = {{}};
        const drawn = () => {{
            const canvas = at('.stage canvas'), {{width, height}} = canvas;
            const copy = new OffscreenCanvas(width, height).getContext('2d', {{willReadFrequently: true}});
            copy.drawImage(canvas, 0, 0);
            const pixels = copy.getImageData(0, 0, width, height).data;
            return [...pixels].filter((value, index) => index % 4 == 3);  // Opacities.
        }};
        const move = (name, value) => {{
            at(`[name=${{name}}]`).value = value;
            at(`[name=${{name}}]`).dispatchEvent(new page.defaultView.Event('input', {{bubbles: true}}));
        }};
        const opacities = () => ['photograph', 'over'].map(
            name => +page.defaultView.getComputedStyle(at(`.stage .${{name}}`)).opacity);
        found.mean = drawn();
        for (const head of [1, 2]) {{ move('head', head); found[`head ${{head}}`] = drawn(); }}
        found.words = at('.stage figcaption').textContent;
        found.view = at('[name=view]:checked').value;
        at('[value=rollout]').click();
        found.rollout = drawn();
        page.querySelectorAll('.card')[2].click();
        found['rollout of 2'] = drawn();
        found.strengths = [0, 25, 50, 75, 100].map(value => (move('strength', value), opacities()));
        at('[value=colours]').click();
        found.opaque = drawn().every(value => value == 255);
        const images = [...page.images];
        found.loaded = images.every(image => image.complete && image.naturalWidth > 0);
        found.wide = at('.stage').offsetWidth;
        found.faults = ({browser.FAULTS})(page);
        return JSON.stringify(found);
    }}"""
    out = shown[0]
    arrays = np.load(out / "arrays.npz")
    heads, rollouts = arrays["attention_1"], arrays["rollout"]
    maps = {"head 1": heads[0, 0], "head 2": heads[0, 1], "mean": heads[0].mean(axis=0)}
    maps |= {"rollout": rollouts[0], "rollout of 2": rollouts[2]}
    windows = browser.looked_at((out / "index.html").read_text(), probe, tmp_path)
    for (width, _), text in zip(browser.WINDOWS, windows, strict=True):
        found = json.loads(text)
        for name, values in maps.items():
            # Opacities are rounded, so two values may have the same opacity.
            shares = (np.array(found[name]) / 255) ** 2
            np.testing.assert_allclose(255 * shares, 255 * values.ravel() / values.max(), atol=1.5)
        assert "Layer 1, head 2; brightest: " in found["words"] and found["view"] == "head"
        assert found["strengths"] == [[1, 0], [1, 0.3125], [1, 0.625], [0.5, 0.9375], [0, 1]]
        assert found["opaque"] and found["loaded"] and found["faults"] == ""
        assert found["wide"] > (350 if width == 400 else 600)


def test_drawing_imports_no_tensorflow(shown, no_tensorflow):
    assert shown[1]
    no_tensorflow.check()


def test_folder_with_files_is_left_alone(shown, run, no_tensorflow, finished, images):
    out, _ = shown
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    result = visualize(
        run, no_tensorflow, f"--checkpoint={finished}", f"--images={images}", f"--out={out}"
    )
    assert result.returncode == 2 and "contains files; give --overwrite" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_file_in_place_of_the_folder_is_an_error(run, no_tensorflow, finished, images):
    file = images / "0.png"
    result = visualize(
        run, no_tensorflow, f"--checkpoint={finished}", f"--images={images}", f"--out={file}"
    )
    assert result.returncode == 2 and f"{file} is a file" in result.stderr
