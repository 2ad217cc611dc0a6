"""`vit-jax pretrain PHOTOS` makes a checkpoint for `finetune` from unlabelled images."""

import re

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vit_jax

FEW = (
    "--config.data.workers=0",
    "--config.batch_size=16",
    "--config.steps=4",
    "--config.dino.head_hidden=32",
    "--config.dino.bottleneck=16",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Returns a folder with 60 images in a subfolder for each of three digits."""
    root = tmp_path_factory.mktemp("photos") / "digits"
    images, labels = load_digits(n_class=3, return_X_y=True)
    for number, (image, label) in enumerate(zip(images[:60], labels[:60], strict=True)):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        pixels = (image.reshape(8, 8) * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(root / str(label) / f"{number:03}.png")
    return root


@pytest.mark.slow
def test_a_folder_is_trained_on_without_labels_and_fine_tuned(run, finished, photos, tmp_path):
    workdir = tmp_path / "run"
    arguments = (photos, f"--from={finished}", f"--workdir={workdir}", *FEW)
    result = run(*arguments, module="vit_jax.pretrain_photos")
    assert result.returncode == 0, result.stderr
    assert "3 classes, which are not trained on" in result.stdout
    shares = re.search(
        r"k-NN accuracy on digits/10: ([\d.]+)% before, ([\d.]+)% after", result.stdout
    )
    before, after = map(float, shares.groups())
    assert after >= before > 40  # A checkpoint with a worse result is not kept.
    model = vit_jax.load_model(workdir)
    assert model.num_classes == 0
    few = ("--config.data.workers=0", "--config.steps=2")
    tuned = run(
        photos,
        f"--from={workdir}",
        f"--workdir={tmp_path / 'tuned'}",
        *few,
        module="vit_jax.finetune_photos",
    )
    assert tuned.returncode == 0, tuned.stderr
    assert vit_jax.load_model(tmp_path / "tuned").num_classes == 3
