"""Fine-tuning from a checkpoint, and the sweep over learning rates."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.interop.helpers import random_model, write
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.config import from_json
from vit_jax.interop.open import open_checkpoint
from vit_jax.runs.evaluator import test_crop as evaluation_crop

# Fine-tunes the checkpoint of `finished` at twice its resolution.
FINETUNE = (
    "--config=configs/finetune.py:dataset=folder,size=32",
    "--config.data.source=digits",
    "--config.data.workers=0",
    "--config.data.flip=False",
    "--config.model.dtype=float32",
    "--config.batch_size=64",
    "--config.steps=6",
    "--config.optimizer.warmup_steps=1",
    "--config.checkpoint.every=3",
)


def figures(workdir) -> dict:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "test/accuracy" in row][-1]


def arrays(workdir) -> dict[str, np.ndarray]:
    model = vit_jax.load_model(workdir, log=str)
    return {"/".join(path): np.asarray(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.fixture(scope="module")
def tuned(run, finished, tmp_path_factory):
    """Returns workdir and output of a run with LoRA and a parameter average."""
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    options = ("--config.finetune.train=lora", "--config.optimizer.average=0.9")
    result = run(
        *FINETUNE, *options, f"--config.finetune.checkpoint={finished}", f"--workdir={workdir}"
    )
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout


def test_run_starts_from_the_checkpoint_with_a_new_head_and_resized_positions(tuned, finished):
    workdir, printed = tuned
    assert f"of a run ({finished}, step 40)" in printed
    assert "resized: position_embedding/table 4x4 -> 8x8" in printed
    assert "head/kernel [16, 10] -> [16, 10], zero" in printed
    old, new = arrays(finished), arrays(workdir)
    np.testing.assert_array_equal(new["blocks/00/mlp/fc1/kernel"], old["blocks/00/mlp/fc1/kernel"])
    assert not np.array_equal(
        new["blocks/00/attention/qkv/kernel"], old["blocks/00/attention/qkv/kernel"]
    )
    assert not np.array_equal(new["head/kernel"], old["head/kernel"])


def test_the_checkpoints_crop_is_the_runs_evaluation_crop(tuned, finished):
    for workdir, kind in ((tuned[0], "square"), (finished, "short_side")):
        config = from_json((workdir / "config.json").read_text())
        size = config.data.image_size
        crop = checkpoint_crop(open_checkpoint(workdir), size)
        assert crop == dataclasses.replace(evaluation_crop(config), size=(size, size))
        assert crop.kind == kind
    assert (
        json.loads((tuned[0] / "manifest.json").read_text())["interpolation"] == crop.interpolation
    )


def test_model_that_is_loaded_is_the_one_that_was_evaluated(tuned):
    workdir, _ = tuned
    model = vit_jax.load_model(workdir, log=str)
    from vit_jax.data.preprocess import TestCrop
    from vit_jax.data.sources.digits import digits

    source, crop = digits("test"), TestCrop(32, "square", 32)
    images = np.stack([crop(source[i].image) for i in range(len(source))])
    logits = model(images.astype(np.float32) / 127.5 - 1)
    losses = -jax.nn.log_softmax(logits)[np.arange(len(source)), source.labels]
    assert float(losses.mean()) == pytest.approx(figures(workdir)["test/loss"], abs=1e-5)


@pytest.mark.slow
def test_fine_tuning_that_was_stopped_ends_with_the_same_bits(tuned, run, finished, tmp_path):
    whole, _ = tuned
    options = ("--config.finetune.train=lora", "--config.optimizer.average=0.9")
    arguments = (
        *FINETUNE,
        *options,
        f"--config.finetune.checkpoint={finished}",
        f"--workdir={tmp_path / 'r'}",
    )
    process = run.start(*arguments)
    for line in process.stdout:
        if line.startswith("first step done"):
            process.terminate()
    process.wait()
    assert run(*arguments).returncode == 0
    for path, value in arrays(tmp_path / "r").items():
        np.testing.assert_array_equal(value, arrays(whole)[path])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.model.name=ViT-B/16"], "config.model.name means ViT-B/16, but .* is ViT-16x1"),
        (["--config.finetune.checkpoint=nowhere"], "there is no .*/nowhere"),
        (
            ["--config.data.train_split=train[:0%]"],
            r"the split 'train\[:0%\]' of 1437 images is empty",
        ),
        (["--config.model.dim=32"], "but the requested model has"),
    ],
)
def test_checkpoint_or_split_that_does_not_fit_is_one_line(flags, words, finished, tmp_path):
    from vit_jax.config import base_config, check
    from vit_jax.errors import UserError
    from vit_jax.runs.loop import train

    config = base_config()
    values = {"model.name": "", "data.image_size": 16, "data.test_resize": 16, "steps": 2}
    values |= {"finetune.checkpoint": str(finished), "batch_size": 32, "optimizer.warmup_steps": 1}
    for flag in flags:
        key, value = flag.removeprefix("--config.").split("=")
        values[key] = int(value) if value.isdigit() else value
    config.update_from_flattened_dict(values)
    options = check(config)
    with pytest.raises(UserError, match=words):
        train(options, tmp_path / "run")


def test_sweep_has_the_rates_of_resnets_for_a_resnet_checkpoint(run, tmp_path):
    small = dict(image_size=32, num_classes=2, resnet_blocks=(1, 1))
    model = write(
        random_model("BiT-R50x1", **small), tmp_path / "model.npz", "google", "BiT-R50x1", **small
    )
    config = (
        "--config=configs/finetune.py:dataset=imagenet2012",
        f"--config.finetune.checkpoint={model}",
    )
    listed = run(
        *config, f"--workdir={tmp_path / 'sweep'}", "--list", module="vit_jax.sweep"
    ).stdout
    assert re.findall(r"--only=rate-(\S+)", listed) == ["0.003", "0.01", "0.03", "0.06"]


@pytest.mark.slow
def test_sweep_keeps_what_finished_and_trains_at_the_best_rate(run, finished, tmp_path):
    folder = tmp_path / "sweep"
    arguments = (
        *FINETUNE,
        f"--config.finetune.checkpoint={finished}",
        "--config.sweep.rates=(0.01,1e38)",  # The run with the second learning rate fails.
        "--config.sweep.seeds=(3,4)",
        "--config.max_skipped_steps=0",
        "--config.data.train_split=train[:80%]",
        "--config.data.test_split=train[80%:]",
        f"--workdir={folder}",
    )
    process = run(*arguments, module="vit_jax.sweep")
    assert process.returncode == 0, process.stderr
    results = json.loads((folder / "results.json").read_text())
    assert results["best_rate"] == 0.01
    assert results["rates"]["0.01"]["figures"]["images"] == 115  # A tenth of the training images.
    assert "not finite" in results["rates"]["1e+38"]["failure"]
    assert [results["seeds"][seed]["figures"]["images"] for seed in "34"] == [287, 287]
    accuracies = [figures(folder / f"seed-{seed}")["test/accuracy"] for seed in (3, 4)]
    assert f"{np.mean(accuracies):.2%} ± {100 * np.std(accuracies, ddof=1):.2f}" in process.stdout
    config = json.loads((folder / "seed-3" / "config.json").read_text())
    assert (
        config["optimizer"]["learning_rate"] == 0.01
        and config["data"]["train_split"] == "train[:80%]"
    )
    config = json.loads((folder / "rate-0.01" / "config.json").read_text())
    assert config["data"]["train_split"] == "train[:80%][:90%]"
    assert (
        config["data"]["test_split"] == "train[:80%][90%:]" and config["data"]["dev_split"] is None
    )
    assert (folder / "results.png").stat().st_size > 5000
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/report.html")}
    assert len(times) == 3
    again = run(*arguments, "--only=seed-3", module="vit_jax.sweep")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/report.html")} == times


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.data.source=folder", "--config.data.path=nowhere"], "no folder nowhere/train"),
        (["--config.sweep.dev_split=test"], "config.data.test_split has images of it: 'test'"),
    ],
)
def test_mistake_in_a_sweeps_splits_is_an_error_before_any_run(flags, words, run, tmp_path):
    flags = (*FINETUNE, *flags, "--config.finetune.checkpoint=of_no_matter")
    process = run(*flags, f"--workdir={tmp_path / 'sweep'}", module="vit_jax.sweep")
    assert (process.returncode, process.stdout) == (2, "")
    assert words in process.stderr.splitlines()[-1]
    assert not (tmp_path / "sweep").exists()
