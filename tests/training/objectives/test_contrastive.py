"""Tests of contrastive training: captions in files and batches, metrics, and trained runs."""

import csv
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict
from PIL import Image

import vit_jax
from configs.siglip import get_config
from vit_jax.config import base_config
from vit_jax.data.fields import TEXT, Field
from vit_jax.data.pipeline import evaluation_batches, training_batches
from vit_jax.data.preprocess import TestCrop, TrainCrop
from vit_jax.data.sources import open_handed_in, open_source
from vit_jax.errors import UserError
from vit_jax.interop.open import open_checkpoint
from vit_jax.models.text_tokens import open_tokenizer
from vit_jax.runs.choices.recognised import recognise
from vit_jax.save import write_checkpoint

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


def write_pairs(folder, rows: list[tuple[str, str]], header=("file", "caption"), name="train"):
    """Writes a folder with one image for each file name, and a list of captions."""
    folder.mkdir(exist_ok=True)
    for index, file in enumerate(dict.fromkeys(file for file, _ in rows)):
        Image.fromarray(np.full((12, 12, 3), 20 * index, np.uint8)).save(folder / file)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


ROWS = [("a.png", "a cat"), ("b.png", "two dogs, running"), ("a.png", "a small  cat ")]
ROWS += [("c.png", "café 猫")]


def captions(source) -> list[tuple[str, ...]]:
    return [source.fields_of(index)[TEXT] for index in range(len(source))]


def open_pairs(path, **options):
    return open_source("csv", "train", path=str(path), labels=False, fields=(TEXT,), **options)


EXPECTED = [("a cat", "a small  cat"), ("two dogs, running",), ("café 猫",)]


def test_rows_of_one_file_are_its_captions(tmp_path):
    write_pairs(tmp_path, ROWS)
    assert captions(open_pairs(tmp_path)) == EXPECTED


def test_json_lines_have_one_caption_or_a_list(tmp_path):
    write_pairs(tmp_path, ROWS)
    (tmp_path / "train.csv").unlink()
    lines = [
        dict(file_name="a.png", text=["a cat", "a small  cat"], width=12),
        dict(file_name="b.png", text="two dogs, running"),
        dict(file_name="c.png", text="café 猫", height=12),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert captions(open_pairs(tmp_path)) == EXPECTED


def test_the_column_of_captions_is_found_or_named(tmp_path):
    write_pairs(tmp_path, ROWS, header=("file", "description"))
    assert captions(open_pairs(tmp_path)) == EXPECTED  # The list has no other column.
    with open(tmp_path / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "alt", "title"), ("a.png", "x", "y")])
    with pytest.raises(UserError, match="no column 'caption'.*caption_key=NAME.*alt, title"):
        open_pairs(tmp_path)
    assert captions(open_pairs(tmp_path, caption_key="Title")) == [("y",)]
    write_pairs(tmp_path, ROWS)
    with pytest.raises(UserError, match="no column 'title'.* there are: caption"):
        open_pairs(tmp_path, caption_key="title")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*ROWS, ("b.png", " ")], "b.png in .* has an empty caption"),
        (
            [*ROWS, ("b.png", "two dogs", " running")],
            "row 6 has 3 cells, .* header has 2: .*quotes",
        ),
        ([*ROWS, ("b.png", "caf\udce9")], r"b.png in .* not valid UTF-8: caf.udce9; save"),
        ([*ROWS, ("lost.png", "x"), ("gone.png", "y")], "2 of 5 images do not exist: lost.png"),
    ],
)
def test_errors_about_captions_are_one_line(tmp_path, rows, words):
    write_pairs(tmp_path, [row for row in rows if row in ROWS])
    with open(tmp_path / "train.csv", "w", newline="", errors="surrogateescape") as file:
        csv.writer(file).writerows([("file", "caption"), *rows])
    with pytest.raises(UserError, match=words):
        open_pairs(tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [('b.png,"two dogs', "unexpected end of data, in row 3"), ('b.png,"A" is', "row 3; close")],
)
def test_a_quote_in_a_caption_does_not_swallow_rows(tmp_path, row, words):
    write_pairs(tmp_path, ROWS)
    (tmp_path / "train.csv").write_text(f"file,caption\na.png,a cat\n{row}\nc.png,a bird\n")
    with pytest.raises(UserError, match=f"train.csv cannot be read as CSV: .*{words}"):
        open_pairs(tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "splits"),
    [
        ("train.csv", "", ("train", "test")),
        ("metadata.jsonl", "", ("all[:80%]", "all[80%:]")),
        ("metadata.jsonl", "metadata.jsonl", ("all[:80%]", "all[80%:]")),
    ],
)
def test_a_list_of_captions_is_recognised_next_to_a_folder_of_images(tmp_path, name, path, splits):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    rows = "file,caption\nimages/a.png,x\n"
    if name == "train.csv":
        (tmp_path / "test.csv").write_text(rows)
    content = rows if name == "train.csv" else '{"file_name": "images/a.png", "text": "x"}\n'
    (tmp_path / name).write_text(content)
    config = get_config()
    config.data.path = str(tmp_path / path)
    recognise(config, {"data.path"})
    assert config.data.source == "csv"
    assert (config.data.train_split, config.data.test_split) == splits


def test_locked_image_tuning_starts_a_new_text_tower():
    assert get_config("tune=text,image=run").finetune.objective == "new"


def test_the_error_about_a_line_that_is_not_json_has_its_number(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n[1]\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        open_pairs(tmp_path)


@pytest.mark.parametrize("value", [{"en": "a cat"}, [{"text": "a cat"}], True])
def test_captions_in_json_that_are_not_texts_are_rejected(value, tmp_path):
    write_pairs(tmp_path, ROWS, name="other")
    lines = [dict(file_name="a.png", text="x"), dict(file_name="b.png", text=value, boxes=[[1]])]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match="train.jsonl, line 2: 'text' is .*, not a text or a list"):
        open_pairs(tmp_path)


IMAGES = np.zeros((3, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    "data",
    [
        (IMAGES, ["one", ["two", "zwei"], "three"]),
        (IMAGES, ("one", ("two", "zwei"), "three")),
        list(zip(IMAGES, ["one", ["two", "zwei"], "three"], strict=True)),
        [
            dict(image=image, caption=texts)
            for image, texts in zip(IMAGES, ["one", ["two", "zwei"], "three"], strict=True)
        ],
    ],
)
def test_passed_pairs_have_captions(data):
    source = open_handed_in({"train": data}, "train", labels=False, fields=(TEXT,))
    assert captions(source) == [("one",), ("two", "zwei"), ("three",)]


def test_passed_images_without_captions_are_an_error():
    with pytest.raises(UserError, match="no 'caption'"):
        open_handed_in({"train": IMAGES}, "train", labels=False, fields=(TEXT,))
    with pytest.raises(UserError, match="3 images and 2 captions"):
        open_handed_in({"train": (IMAGES, ["a", "b"])}, "train", labels=False, fields=(TEXT,))


@pytest.mark.parametrize(("value", "kind"), [(3, "int"), (None, "NoneType"), (b"x", "bytes")])
def test_passed_captions_of_another_type_are_an_error(value, kind):
    with pytest.raises(UserError, match=f"caption of .*example 0 has type {kind}, not str"):
        open_handed_in({"train": (IMAGES, [value] * 3)}, "train", labels=False, fields=(TEXT,))


def text_field(length: int = 8) -> Field:
    tokenizer = open_tokenizer(Path("bytes"), length, "clip")

    def encode(captions, rng):
        choice = 0 if rng is None else int(rng.integers(len(captions)))
        return tokenizer([captions[choice]])[0]

    return Field(TEXT, (length,), np.int32, encode)


def test_captions_are_drawn_reproducibly_and_do_not_change_images(tmp_path):
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which must be parsed.
    write_pairs(tmp_path, ROWS)
    source, field = open_pairs(tmp_path), text_field()
    options = dict(seed=3, batch_size=4, crop=TrainCrop(8, "random_resized"), workers=0)

    def first(count: int, step: int = 0, fields=(field,), **more):
        batches = training_batches(source, first_step=step, fields=fields, **options | more)
        return [next(batches) for _ in range(count)]

    with_text, without = first(40), first(40, fields=())
    for one, other in zip(with_text, without, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
    np.testing.assert_array_equal(first(1, step=7)[0][TEXT], with_text[7][TEXT])
    np.testing.assert_array_equal(first(2, workers=2)[1][TEXT], with_text[1][TEXT])
    drawn = np.concatenate([batch[TEXT] for batch in with_text])
    lengths = (drawn > 1).sum(1)
    of_cat = (drawn[:, 0] == ord("a") + 2) & (drawn[:, 1] == ord(" ") + 2)
    # How often "a cat" is drawn from its image's two captions.
    share = (lengths[of_cat] == 5).mean()
    assert 0.3 < share < 0.7


def test_evaluation_uses_the_first_caption(tmp_path):
    write_pairs(tmp_path, ROWS)
    crop = TestCrop(8, resize=8)
    (batch,) = evaluation_batches(
        open_pairs(tmp_path), batch_size=4, crop=crop, fields=(text_field(),), workers=0
    )
    assert batch["valid"].tolist() == [True, True, True, False]
    decoded = ["".join(chr(token - 2) for token in row if token > 1) for row in batch[TEXT][:2]]
    assert decoded == ["a cat", "two dog"]
    assert not batch[TEXT][3].any()


def pairs(count: int, seed: int):
    """Returns noisy images of one colour each, and two captions for each image."""
    rng = np.random.default_rng(seed)
    names = rng.choice([*COLOURS], count)
    noise = rng.normal(0, 20, (count, 16, 16, 3))
    images = np.clip(np.array([COLOURS[name] for name in names])[:, None, None] + noise, 0, 255)
    return images.astype(np.uint8), [[f"a {name} square", f"it is {name}"] for name in names]


def small_config(loss: str):
    config = base_config()
    config.model.update(dict(name="ViT-32x1/8", heads=2, pooling="map"))
    config.data.update(dict(source="handed_in", image_size=16, test_resize=16, crop="none"))
    config.objective.name = "contrastive"
    config.contrastive.update(dict(text_length=24, text_dim=32, text_depth=1, text_heads=2))
    config.contrastive.loss = loss
    if loss == "softmax":
        config.contrastive.update(dict(text_tower="clip", embedding_dim=16, max_scale=100.0))
        config.model.head_std = 0.1
    else:
        config.contrastive.initial_bias = -3.0
    config.batch_size, config.steps, config.evaluate_every = 16, 60, 60
    config.optimizer.update(dict(learning_rate=3e-3, warmup_steps=5))
    return config


@pytest.mark.parametrize("start", [100.0, 101.0])
@pytest.mark.slow
def test_a_scale_at_its_maximum_can_decrease(start, tmp_path):
    config = small_config("softmax")
    config.contrastive.initial_scale = start
    config.model.dtype, config.steps = "float32", 10
    vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))
    scale = np.exp(vit_jax.load_image_text(tmp_path / "run").logit_scale[...])
    assert 90 < scale < 99.9


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_a_run_learns_pairs_and_classifies_by_names(loss, tmp_path, capsys):
    config = small_config(loss)
    found = vit_jax.train(config, tmp_path / "run", train=pairs(96, 0), test=pairs(48, 1))
    assert found["recall@1_image_to_text"] > 0.9
    assert found["recall@1_text_to_image"] > 0.9
    model = vit_jax.load_image_text(tmp_path / "run")
    assert model.probabilities == loss
    images, texts = pairs(30, 2)
    predictions = vit_jax.zero_shot(model, list(images), [*COLOURS], ["a {} square"])
    right = [p.classes[0] in text[0] for p, text in zip(predictions, texts, strict=True)]
    assert np.mean(right) > 0.9
    np.testing.assert_allclose(
        np.linalg.norm(model.encode_text(["a red square"]), axis=1), 1, rtol=1e-5
    )


class TokenizerRun(NamedTuple):
    """A short run with its own tokenizer; the tokenizer's folder was deleted after the run.

    Attributes:
      workdir: workdir of the run.
      config: config of the run.
      tokens: the tokens of "a red square" before the folder was deleted.
    """

    workdir: Path
    config: ConfigDict
    tokens: np.ndarray


PAIRS = dict(train=pairs(32, 0), test=pairs(16, 1))


@pytest.fixture(scope="module")
def tokenizer_run(tmp_path_factory) -> TokenizerRun:
    """Trains the run once; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("tokenizer_run")
    config = small_config("sigmoid")
    config.steps = config.evaluate_every = 6
    write_tokenizer(folder / "tokenizer")
    config.contrastive.tokenizer = str(folder / "tokenizer")
    vit_jax.train(config, folder / "run", **PAIRS)
    tokens = vit_jax.load_image_text(folder / "run", log=str).tokenizer(["a red square"])
    shutil.rmtree(folder / "tokenizer")
    # The workdir in which the run was trained no longer exists.
    moved = (folder / "run").rename(folder / "moved")
    return TokenizerRun(moved, config, tokens)


def test_a_saved_run_contains_no_path_of_its_tokenizer(tokenizer_run, tmp_path, capsys):
    moved = shutil.copytree(tokenizer_run.workdir, tmp_path / "moved")
    model = vit_jax.load_image_text(moved, log=str)
    np.testing.assert_array_equal(model.tokenizer(["a red square"]), tokenizer_run.tokens)
    write_checkpoint(open_checkpoint(moved), tmp_path / "saved", "timm")
    written = "".join(file.read_text() for file in (tmp_path / "saved").glob("*.json"))
    assert "contrastive" in written
    assert str(tmp_path) not in written
    assert str(tokenizer_run.workdir.parent) not in written
    shutil.rmtree(moved / "objective")
    with pytest.raises(UserError, match="objective does not exist.*put back the files"):
        vit_jax.load_image_text(moved, log=str)


@pytest.mark.slow
def test_a_run_from_scratch_can_initialize_another_run(tokenizer_run, tmp_path):
    config = get_config(f"from={tokenizer_run.workdir}")
    config.data.source, config.batch_size, config.steps, config.epochs = "handed_in", 16, 1, None
    config.optimizer.update(dict(learning_rate=0.0, warmup_steps=0))
    vit_jax.train(config, tmp_path / "second", **PAIRS)
    first, second = (
        vit_jax.load_image_text(place, log=str)
        for place in (tokenizer_run.workdir, tmp_path / "second")
    )
    texts = ["a red square", "a blue square"]
    np.testing.assert_allclose(second.encode_text(texts), first.encode_text(texts), atol=1e-6)


def write_tokenizer(folder) -> None:
    """Writes a byte-pair tokenizer with a small vocabulary, in the format of Transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([f"a {name} square, it is {name}" for name in COLOURS], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", made.token_to_id("<eos>"))]
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "eos_token": "<eos>"}')


def test_a_run_of_another_objective_has_no_text_tower(tmp_path, capsys):
    config = small_config("sigmoid")
    config.objective.name = "mae"
    config.model.update(dict(pooling="gap", position="sincos2d_mae"))
    config.update_from_flattened_dict(
        {
            f"contrastive.{name}": getattr(base_config().contrastive, name)
            for name in base_config().contrastive
        }
    )
    config.mae.update(dict(decoder_dim=16, decoder_depth=1, decoder_heads=2))
    config.steps, config.evaluate_every = 6, 6
    vit_jax.train(config, tmp_path / "run", train=pairs(16, 0)[0], test=pairs(16, 1)[0])
    with pytest.raises(UserError, match="has no text tower.*objective.name='contrastive'"):
        vit_jax.load_image_text(tmp_path / "run")


def test_micro_batches_are_rejected(tmp_path):
    config = small_config("sigmoid")
    config.micro_batches = 2
    with pytest.raises(UserError, match="contrastive.loss.*micro_batches=1"):
        vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))


def test_heads_that_do_not_divide_the_text_tower_are_rejected(tmp_path):
    config = small_config("sigmoid")
    config.contrastive.update(dict(text_dim=32, text_heads=5))
    words = "contrastive.text_dim=32 must be divisible by config.contrastive.text_heads=5"
    with pytest.raises(UserError, match=words):
        vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))


def test_a_random_text_tower_is_not_frozen(tmp_path):
    config = small_config("sigmoid")
    config.contrastive.text_frozen = True
    data = dict(train=pairs(16, 0), test=pairs(16, 1))
    with pytest.raises(UserError, match="contrastive.text_frozen.*finetune.checkpoint"):
        vit_jax.train(config, tmp_path / "run", **data)
    model = vit_jax.create_model("ViT-32x1/8", heads=2, pooling="map", image_size=16, num_classes=0)
    vit_jax.save_model(model, tmp_path / "images", library="timm")
    config.finetune.checkpoint, config.model.name = str(tmp_path / "images"), ""
    with pytest.raises(UserError, match="has no text tower, and a random one would be frozen"):
        vit_jax.train(config, tmp_path / "run", **data)
    config.finetune.objective = "new"
    with pytest.raises(UserError, match="contrastive.text_frozen.*must be False"):
        vit_jax.train(config, tmp_path / "run", **data)


def test_a_run_resumes_with_the_tokenizer_of_its_workdir(tokenizer_run, tmp_path, capsys):
    shutil.copytree(tokenizer_run.workdir, tmp_path / "run")
    config = tokenizer_run.config.copy_and_resolve_references()
    copy = f"--config.contrastive.tokenizer={tmp_path}/run/objective"
    with pytest.raises(UserError, match=f"no files any more; the run has a copy of them: {copy}"):
        vit_jax.train(config, tmp_path / "run", **PAIRS)
    config.contrastive.tokenizer = str(tmp_path / "run" / "objective")
    vit_jax.train(config, tmp_path / "run", **PAIRS)
    vit_jax.load_image_text(tmp_path / "run", log=str)


def test_images_for_a_text_tower_have_the_checkpoints_preprocessing(tmp_path, capsys):
    model = vit_jax.create_model("ViT-32x1/8", heads=2, image_size=32, num_classes=3)
    vit_jax.save_model(model, tmp_path / "images", library="timm")
    file = tmp_path / "images" / "config.json"
    content = json.loads(file.read_text())
    for mode, crop, test_crop, resize in (
        ("center", "short_side", "short_side", 40),
        ("squash", "none", "square", 32),
    ):
        content["pretrained_cfg"] |= dict(crop_pct=0.8, crop_mode=mode)
        file.write_text(json.dumps(content))
        data = get_config(f"image={tmp_path}/images,tune=text").data
        assert (data.image_size, data.crop, data.test_crop) == (32, crop, test_crop)
        assert data.test_resize == resize
    assert get_config(f"image={tmp_path}/none,tune=text").data.image_size == 224


@pytest.mark.slow
def test_a_text_tower_is_trained_for_the_frozen_images_of_a_classifier(tmp_path, capsys):
    classes = small_config("sigmoid")
    classes.objective.name, classes.steps, classes.evaluate_every = "classification", 6, 6
    classes.update_from_flattened_dict(
        {f"contrastive.{name}": value for name, value in base_config().contrastive.items()}
    )
    images, texts = pairs(32, 0)
    labelled = images, [text[0] for text in texts]
    vit_jax.train(classes, tmp_path / "classes", train=labelled, test=labelled)
    config = small_config("sigmoid")
    config.steps, config.evaluate_every, config.model.name = 6, 6, ""
    config.finetune.checkpoint, config.finetune.train = str(tmp_path / "classes"), "head"
    vit_jax.train(config, tmp_path / "run", train=pairs(32, 0), test=pairs(16, 1))
    before, after = (vit_jax.load_model(tmp_path / name) for name in ("classes", "run"))
    np.testing.assert_array_equal(before.features(images), after.features(images))
