"""CLIP, SigLIP and SigLIP 2 have the embeddings and probabilities of Transformers."""

import json
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from helpers import randomise
from PIL import Image

import vit_jax
from configs.siglip import get_config
from vit_jax.classifier import open_classifier
from vit_jax.data.sources import data_set
from vit_jax.errors import UserError
from vit_jax.models.text_tokens import canonical
from vit_jax.run_suites import run_suites

IMAGE = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=80)
IMAGE |= dict(image_size=32, patch_size=8)
TEXT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
CORPUS = [
    "a photo of a cat on a mat",
    "two dogs run along the beach at night",
    "an aerial photo of a solar cell, cracked and dark",
    "naïve café owners don't sell 12 cups",
    "the quick brown fox jumps over the lazy dog",
]
TEXTS = (
    "a photo of a cat",
    "A PHOTO of a  Dog!",
    "",
    "naïve café, 12 cups: 猫 🐈",
    "it's don't \n new\tline",
    "a very long text about cats and dogs " * 12,
)
NAMES = ("cat", "dog", "a red car")
KINDS = ("clip", "early clip", "siglip", "siglip2")


def byte_pairs(suffix: str, special: list[str], kind) -> tuple[dict[str, int], list]:
    """Returns vocabulary and merges of a byte-pair encoding trained on `CORPUS`."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix=suffix))
    made.pre_tokenizer = kind(tokenizers)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        end_of_word_suffix=suffix,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([text.lower() for text in CORPUS], trainer)
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def clip_tokenizer(transformers):
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary, merges = byte_pairs(
        "</w>",
        [],
        lambda library: library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.Whitespace(),
                library.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
    )
    alone = {name + "</w>" for name in vocabulary if len(name) == 1}
    for name in (*sorted(alone - vocabulary.keys()), start, end):
        vocabulary[name] = len(vocabulary)
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=20)


def siglip_tokenizer(transformers, folder):
    import sentencepiece

    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text("\n".join(canonical(text) for text in CORPUS * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=90,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    return transformers.SiglipTokenizer(str(folder / "spiece.model"), model_max_length=20)


def siglip2_tokenizer(transformers):
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary, merges = byte_pairs(
        "", special, lambda library: library.pre_tokenizers.Split(" ", "merged_with_previous")
    )
    made = transformers.Siglip2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=20)
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])]
    )
    made.padding_side = "right"
    return made


@pytest.fixture(scope="module")
def models(torch, transformers, tmp_path_factory):
    """Writes small random models; returns folder, model, tokenizer and image processor by kind."""
    pytest.importorskip("sentencepiece")
    folders, found = tmp_path_factory.mktemp("models"), {}
    for kind in KINDS:
        folder = folders / kind.replace(" ", "_")
        if "clip" in kind:
            tokenizer = clip_tokenizer(transformers)
            end = 2 if kind == "early clip" else tokenizer.eos_token_id
            ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=end)
        elif kind == "siglip":
            tokenizer, ids = siglip_tokenizer(transformers, folders / "spiece"), {}
        else:
            tokenizer, ids = siglip2_tokenizer(transformers), {}
        text = TEXT | ids | dict(vocab_size=len(tokenizer), max_position_embeddings=20)
        config, model, processor = (
            (transformers.CLIPConfig, transformers.CLIPModel, transformers.CLIPImageProcessor)
            if "clip" in kind
            else (
                transformers.SiglipConfig,
                transformers.SiglipModel,
                transformers.SiglipImageProcessor,
            )
        )
        if "clip" in kind:
            values = dict(projection_dim=24)
            size = dict(size={"shortest_edge": 32}, crop_size=dict(height=32, width=32))
        else:
            text |= dict(projection_size=48)
            values, size = {}, dict(size=dict(height=32, width=32))
        theirs = model(config(vision_config=IMAGE, text_config=text, **values))
        randomise(torch, theirs)
        if "siglip" in kind:
            theirs.logit_bias.data[:] = -1.5
        theirs.logit_scale.data.fill_(1.2)
        theirs.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        images = processor(**size)
        images.save_pretrained(folder)
        found[kind] = folder, theirs.double().eval(), tokenizer, images
    return found


def their_tokens(tokenizer, texts) -> np.ndarray:
    return tokenizer(
        list(texts), padding="max_length", truncation=True, max_length=20, return_tensors="np"
    )["input_ids"]


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """Writes a smooth image that is not square."""
    rows, columns = np.mgrid[:60, :90] / 90
    pixels = np.stack([rows, columns, (rows + columns) / 2], -1) * 255
    path = tmp_path_factory.mktemp("photographs") / "photograph.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(kind, models):
    folder, _, tokenizer, _ = models[kind]
    ours = vit_jax.load_image_text(folder, log=str).tokenizer(TEXTS)
    np.testing.assert_array_equal(ours, their_tokens(tokenizer, TEXTS))


@pytest.mark.parametrize("kind", KINDS)
def test_text_embeddings_are_those_of_the_library(kind, torch, models):
    folder, theirs, tokenizer, _ = models[kind]
    with torch.no_grad():
        tokens = torch.from_numpy(their_tokens(tokenizer, TEXTS))
        expected = theirs.get_text_features(input_ids=tokens)
    expected = getattr(expected, "pooler_output", expected).numpy()
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    ours = vit_jax.load_image_text(folder, log=str).encode_text(TEXTS)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_shot_probabilities_from_a_file_are_those_of_the_library(
    kind, torch, models, photograph
):
    folder, theirs, tokenizer, processor = models[kind]
    texts = [f"a {name}" for name in NAMES]  # These texts have less than 20 tokens.
    pixels = processor(Image.open(photograph), return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        tokens = torch.from_numpy(their_tokens(tokenizer, texts))
        logits = theirs(input_ids=tokens, pixel_values=pixels).logits_per_image[0]
    expected = (logits.softmax(-1) if kind[-4:] == "clip" else logits.sigmoid()).numpy()
    model = vit_jax.load_image_text(folder, log=str)
    (found,) = vit_jax.zero_shot(model, photograph, NAMES, ["a {}"])
    order = np.argsort(-expected)
    assert found.classes == tuple(NAMES[i] for i in order)
    # The pixels differ slightly, because Pillow and torchvision round at different places.
    np.testing.assert_allclose(found.probabilities, expected[order], rtol=5e-3)


def test_a_class_is_the_mean_of_its_templates(models, photograph):
    model = vit_jax.load_image_text(models["clip"][0], log=str)
    templates = ("a photo of a {}.", "the {} at night")
    classifier = model.classifier(NAMES, templates)
    expected = []
    for name in NAMES:
        embeddings = np.stack(
            [np.asarray(model.encode_text(text.format(name)))[0] for text in templates]
        )
        mean = embeddings.mean(axis=0)
        expected.append(mean / np.linalg.norm(mean))
    np.testing.assert_allclose(classifier.classes[...], expected, atol=1e-6)
    assert classifier.predict(photograph) == vit_jax.zero_shot(model, photograph, NAMES, templates)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_suite_zero_shot_classifies_as_the_classifier(kind, models, tmp_path):
    folder, rng = models[kind][0], np.random.default_rng(0)
    for number in range(9):
        name = ("cat", "dog")[number % 2]
        (tmp_path / "pets" / name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(256, size=(40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    files = sorted((tmp_path / "pets").rglob("*.png"))
    classifier = vit_jax.load_image_text(folder, log=str).classifier(["cat", "dog"])
    found = [one.classes[0] for one in classifier.predict([str(file) for file in files])]
    right = [name == file.parent.name for name, file in zip(found, files, strict=True)]
    options = {"set": [data_set(f"folder:{tmp_path}/pets")]}
    results = run_suites(
        folder, ["zero_shot"], tmp_path / "out", options=options, batch_size=4, workers=0, log=str
    )
    assert results.rows["zero_shot", "pets, top-1"].accuracy == pytest.approx(np.mean(right))


def test_vocabulary_and_merges_of_clip_are_read(models, tmp_path):
    folder, _, tokenizer, _ = models["clip"]
    shutil.copytree(folder, tmp_path / "old")
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "old/tokenizer.json").unlink()
    (tmp_path / "old/vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (tmp_path / "old/merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    ours = vit_jax.load_image_text(tmp_path / "old", log=str).tokenizer(TEXTS)
    np.testing.assert_array_equal(ours, their_tokens(tokenizer, TEXTS))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "old" / name).unlink(missing_ok=True)
    ours = vit_jax.load_image_text(tmp_path / "old", log=str).tokenizer(TEXTS)
    np.testing.assert_array_equal(ours, their_tokens(tokenizer, TEXTS))


def test_the_command_prints_the_same_probabilities(models, photograph, tmp_path):
    folder = models["siglip"][0]
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    model = vit_jax.load_image_text(folder, log=str)
    (expected,) = vit_jax.zero_shot(model, photograph, NAMES)
    for names in (",".join(NAMES), str(tmp_path / "names.txt")):
        run = subprocess.run(
            [sys.executable, "-m", "vit_jax.predict", f"--checkpoint={folder}", "--json"]
            + [f"--names={names}", str(photograph)],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)["predictions"]
        assert tuple(each["class"] for each in found) == expected.classes
        shown = [each["probability"] for each in found]
        np.testing.assert_allclose(shown, expected.probabilities, rtol=1e-5)
    run = subprocess.run(
        [sys.executable, "-m", "vit_jax.predict", f"--checkpoint={folder}", str(photograph)]
        + ["--template={} at night"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "--template is for zero-shot" in run.stderr
    with pytest.raises(UserError, match="there is no file --names=none.txt"):
        open_classifier(str(folder), names="none.txt", log=str)


def test_a_zero_shot_classifier_has_a_description_and_cannot_be_saved(models, tmp_path):
    model = vit_jax.load_image_text(models["clip"][0], log=str)
    assert "text tower           2 layers of width 32, 2 heads, 20 tokens of" in str(model)
    classifier = model.classifier(NAMES)
    assert "3: cat, dog, a red car" in str(classifier)
    with pytest.raises(UserError, match="Unsupported: saving a ZeroShotClassifier"):
        vit_jax.save_model(classifier, tmp_path / "saved")


@pytest.mark.parametrize(
    ("names", "templates", "words"),
    [
        ((), ("a {}",), "class names are empty: give one or more"),
        (("cat", " "), ("a {}",), "class names are empty"),
        (("cat", "Cat"), ("a {}",), "class names 'cat' and 'Cat' have the same tokens"),
        (("cat",), ("a {}",), "'cat' is the only class name, .* sum to 1: give two or more"),
        (NAMES, (), "template '' has no {} for the class name"),
        (NAMES, ("a photo",), "template 'a photo' has no {}"),
    ],
)
def test_bad_names_and_templates_are_rejected(names, templates, words, models):
    model = vit_jax.load_image_text(models["clip"][0], log=str)
    with pytest.raises(UserError, match=words):
        model.classifier(names, templates)


def test_a_class_name_without_tokens_is_rejected(models):
    model = vit_jax.load_image_text(models["siglip"][0], log=str)
    # A sigmoid also works for a single class name.
    assert model.classifier(["cat"]).num_classes == 1
    with pytest.raises(UserError, match="class name '!!!' has no tokens"):
        model.classifier(["cat", "!!!"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_text_is_reported_once(kind, models):
    model = vit_jax.load_image_text(models[kind][0], log=str)
    with pytest.warns(UserWarning, match="a text is truncated to the tower's 20 tokens: 'a "):
        model.encode_text(TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode_text(TEXTS)
        vit_jax.load_image_text(models[kind][0], log=str).encode_text(["", "a"])


def test_a_tokenizer_without_the_token_that_is_read_is_rejected(models, tmp_path):
    folder = shutil.copytree(models["clip"][0], tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not end texts with the token 7"):
        vit_jax.load_image_text(folder, log=str)


def test_folders_without_a_text_tower_or_a_tokenizer_are_rejected(models, tmp_path):
    folder = models["clip"][0]
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(UserError, match="there is no tokenizer in .*tokenizer.json, spiece.model"):
        vit_jax.load_image_text(bare, log=str)
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["vocab_size"] = 9
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="tokens, but the text tower has 9: it is the tokenizer of"):
        vit_jax.load_image_text(other, log=str)
    plain = vit_jax.create_model("ViT-mu/16", image_size=32)
    image = vit_jax.save_model(plain, tmp_path / "image", library="transformers", log=str)
    with pytest.raises(UserError, match="Unsupported: a text tower of model_type='vit'"):
        vit_jax.load_image_text(image, log=str)
    with pytest.raises(UserError, match="there is no .*none: give an image-text model"):
        vit_jax.load_image_text(tmp_path / "none", log=str)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_from_both_towers_and_keeps_its_tokenizer(kind, models, tmp_path, capsys):
    """After a step with learning rate 0, a run equals the folder's model and needs no folder."""
    source, *_ = models[kind]
    folder = shutil.copytree(source, tmp_path / "folder")
    config = config_from(kind, folder)
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
    assert "contrastive's own parameters" in capsys.readouterr().out
    shutil.rmtree(folder)
    first, run = (vit_jax.load_image_text(at, log=str) for at in (source, tmp_path / "run"))
    np.testing.assert_allclose(run.encode_text(TEXTS), first.encode_text(TEXTS), atol=1e-6)
    np.testing.assert_allclose(run.encode_image(images), first.encode_image(images), atol=1e-5)
    embeddings = run.encode_image(images), run.encode_text(NAMES)
    np.testing.assert_allclose(run.logits(*embeddings), first.logits(*embeddings), rtol=1e-5)


@pytest.mark.parametrize(("kind", "crop"), [("clip", "short_side"), ("siglip", "square")])
def test_images_of_a_continued_model_have_the_checkpoints_preprocessing(
    kind, crop, models, tmp_path
):
    folder = shutil.copytree(models[kind][0], tmp_path / "folder")
    data = get_config(f"from={folder}").data
    assert (data.test_crop, data.test_resize, data.image_size) == (crop, 32, 32)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= dict(do_center_crop=False, size=dict(height=32, width=32))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    data = get_config(f"from={folder}").data
    assert (data.crop, data.test_crop, data.test_resize) == ("none", "square", 32)
    (folder / "preprocessor_config.json").unlink()
    data = get_config(f"from={folder}").data
    assert (data.test_crop, data.test_resize, data.image_size) == (crop, 32, 32)


def test_a_text_tower_is_tuned_without_the_projection_of_images(models, tmp_path):
    config = get_config(f"from={models['clip'][0]},tune=text")
    assert config.contrastive.max_scale == 100.0
    config.data.source, config.batch_size, config.steps, config.epochs = "handed_in", 4, 2, None
    config.optimizer.update(dict(learning_rate=1e-2, warmup_steps=0))
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
    first, run = (
        vit_jax.load_image_text(at, log=str) for at in (models["clip"][0], tmp_path / "run")
    )
    np.testing.assert_array_equal(run.encode_image(images), first.encode_image(images))
    assert np.abs(run.encode_text(NAMES) - first.encode_text(NAMES)).max() > 0.01


def test_a_run_can_initialize_another_run(models, tmp_path):
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    config = config_from("clip", models["clip"][0])
    config.optimizer.learning_rate = 1e-2
    vit_jax.train(config, tmp_path / "first", train=pairs, test=pairs)
    config = get_config(f"from={tmp_path / 'first'}")
    config.data.source, config.batch_size, config.steps, config.epochs = "handed_in", 4, 1, None
    config.optimizer.update(dict(learning_rate=0.0, warmup_steps=0))
    vit_jax.train(config, tmp_path / "second", train=pairs, test=pairs)
    first, second = (
        vit_jax.load_image_text(tmp_path / name, log=str) for name in ("first", "second")
    )
    np.testing.assert_allclose(second.encode_image(images), first.encode_image(images), atol=1e-6)
    np.testing.assert_allclose(second.encode_text(TEXTS), first.encode_text(TEXTS), atol=1e-6)
    assert float(second.logit_scale[...]) == float(first.logit_scale[...])


@pytest.mark.parametrize("from_run", [False, True])
def test_a_tokenizer_of_the_same_size_with_other_tokens_is_rejected(from_run, models, tmp_path):
    config = config_from("clip", models["clip"][0])
    pairs = np.zeros((4, 32, 32, 3), np.uint8), ["a", "b", "c", "d"]
    if from_run:
        vit_jax.train(config, tmp_path / "first", train=pairs, test=pairs)
        config.finetune.checkpoint = str(tmp_path / "first")
    file = shutil.copytree(models["clip"][0], tmp_path / "other") / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a</w>"], words["d</w>"] = words["d</w>"], words["a</w>"]
    file.write_text(json.dumps(content))
    config.contrastive.tokenizer = str(tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer .* tokens of 'a cat' are .* set config"):
        vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)


def config_from(kind: str, folder):
    """Returns a config with one step and learning rate 0 that starts from a folder."""
    from vit_jax.config import base_config
    from vit_jax.interop.image_text import values_of_towers

    config = base_config()
    config.objective.name, config.finetune.checkpoint = "contrastive", str(folder)
    config.contrastive.update(values_of_towers(folder))
    config.finetune.head, config.model.name = "kept", ""
    config.data.update(dict(source="handed_in", image_size=32, test_resize=32, crop="none"))
    config.batch_size, config.steps, config.evaluate_every = 4, 1, 1
    config.optimizer.update(dict(learning_rate=0.0, warmup_steps=0))
    return config


def test_text_towers_that_the_config_does_not_describe_are_rejected(models, tmp_path):
    folder, *_ = models["siglip"]
    config = config_from("siglip", folder)
    config.contrastive.text_gelu = "erf"
    pairs = np.zeros((4, 32, 32, 3), np.uint8), ["a", "b", "c", "d"]
    with pytest.raises(UserError, match="config.contrastive.text_gelu='tanh'"):
        vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
