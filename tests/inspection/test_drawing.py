"""Figures are drawn for the models for which they are defined; otherwise a line states why not."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.image_files import find_images, read_images
from vit_jax.data.preprocess import TestCrop
from vit_jax.inspection.drawing import draw_all
from vit_jax.inspection.figures import heat_map
from vit_jax.models import create_model

SMALL = dict(num_classes=5, image_size=(16, 24), dim=16, depth=1, mlp_dim=32, heads=2)
ALL = {"rollout", "distance", "positions", "filters", "tokens"}
VARIANTS = {
    "of everything": (
        ("ViT-Ti/8", dict(position="2d", registers=2, distillation="heads", rope="eva02")),
        ALL,
        {},
    ),
    "axial": (
        ("ViT-Ti/8", dict(attention="axial", pooling="gap")),
        ALL - {"rollout", "distance"},
        {"Attention rollout": "axial attention", "Mean attention distance": "axial attention"},
    ),
    "hybrid": (
        ("R+ViT-Ti/16", dict(image_size=(32, 64), position="relative")),
        ALL - {"positions"},
        {"Similarity": "no position embedding"},
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(256, size=(40, 90, 3), dtype=np.uint8)
    for name in ("a.png", "b.jpg"):
        Image.fromarray(pixels).save(folder / name)
    Image.fromarray(pixels[:2, :3]).save(folder / "c.png")  # This image is smaller than a patch.
    return find_images([str(folder)])


@pytest.mark.one_variant
@pytest.mark.parametrize("variant", VARIANTS)
def test_figures_are_drawn_if_they_are_defined(variant, files, tmp_path, capsys):
    (name, options), drawn, undefined = VARIANTS[variant]
    model = create_model(name, **SMALL | options)
    names, images = read_images(files, TestCrop(model.image_size, resize=min(model.image_size)), 3)
    assert names == ["a.png", "b.jpg", "c.png"] and images.shape == (3, *model.image_size, 3)
    draw_all(
        model,
        names,
        images,
        tmp_path,
        "What it sees",
        "Its place",
        layers=True,
        heads=True,
        batch_size=2,
    )
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert {stem for stem in pictures if "_" not in stem} == drawn
    assert ({"layers_2", "heads_2"} <= pictures) == ("rollout" in drawn)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not defined" in line]
    assert len(lines) == len(undefined)
    for line, (caption, words) in zip(lines, undefined.items(), strict=True):
        assert line.startswith(caption) and words in line
        assert words in (tmp_path / "index.html").read_text()
    arrays = np.load(tmp_path / "arrays.npz")
    assert arrays["token_colours"].shape == (3, *model.grid, 3)
    if "rollout" in drawn:
        assert arrays["rollout"].shape == (3, *model.grid)


STAGED = {
    "BiT-R50x1": dict(resnet_blocks=(1, 1), resnet_width=1),
    "ConvNeXt-T": dict(blocks=(1, 1), widths=(8, 12)),
    "Swin-T": dict(dim=16, blocks=(2, 1), stage_heads=(2, 4), window=3, patch_size=2),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("name", STAGED)
def test_a_model_of_stages_is_drawn_by_stages(name, files, tmp_path, capsys):
    model = create_model(name, num_classes=5, image_size=(32, 40), **STAGED[name])
    names, images = read_images(files, TestCrop(model.image_size, resize=32), 3)
    draw_all(model, names, images, tmp_path, "What it sees", "Its place", batch_size=2)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"filters", "stage_1", "stage_2"}
    assert capsys.readouterr().out.count("not defined") == 3
    arrays, maps = np.load(tmp_path / "arrays.npz"), model.features(images, dense=True)
    for stage, features in enumerate(maps, start=1):
        assert arrays[f"stage_{stage}_colours"].shape == (*features.shape[:3], 3)
    page = (tmp_path / "index.html").read_text()
    assert ("places of a window attend" in page) == ('name="head"' in page) == (name == "Swin-T")
    assert ("attention_3" in arrays) == (name == "Swin-T")


def test_transparent_images_are_shown_on_white(tmp_path):
    Image.new("RGBA", (30, 30), (90, 10, 10, 0)).save(tmp_path / "clear.png")
    files = find_images([str(tmp_path / "clear.png")])
    assert read_images(files, TestCrop(8, resize=8), 1)[1].min() == 255


def test_only_the_requested_number_of_images_is_read(files, capsys):
    assert read_images(files, TestCrop(8, resize=8), 2)[1].shape == (2, 8, 8, 3)
    assert "2 of 3 images are shown" in capsys.readouterr().out


def test_heat_maps_are_visible_on_black_images_and_dark_without_attention():
    weights = np.array([[1.0, 0.0], [0.5, 0.0]])
    black, white = (
        heat_map(np.full((64, 64, 3), value, np.uint8), weights).astype(int) for value in (0, 255)
    )
    for drawn in (black, white):
        most, half, none = (drawn[place].sum() for place in ((2, 2), (61, 2), (2, 61)))
        assert most > half + 60 > none + 120
    assert (white >= black).all()
