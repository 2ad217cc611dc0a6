"""Image-text models in open_clip's files have open_clip's embeddings and probabilities."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import randomise
from PIL import Image
from safetensors.numpy import load_file

import vit_jax
from vit_jax.classifier import open_classifier
from vit_jax.errors import UserError

OWN = dict(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
TEXT = dict(width=32, heads=2, layers=2, context_length=40)
SIGLIP = dict(
    hf_tokenizer_name="owner/name",
    tokenizer_kwargs={"clean": "canonicalize"},
    no_causal_mask=True,
    proj_bias=True,
    pool_type="last",
    norm_kwargs={"eps": 1e-6},
    act_kwargs={"approximate": "tanh"},
)
SQUASHED = dict(mean=[0.5] * 3, std=[0.5] * 3, interpolation="bicubic", resize_mode="squash")
KINDS = {
    "clip": (dict(embed_dim=24, vision_cfg=OWN, text_cfg=TEXT), {}),
    "quick": (
        dict(embed_dim=24, quick_gelu=True, custom_text=True, vision_cfg=OWN, text_cfg=TEXT),
        dict(interpolation="bilinear"),
    ),
    "siglip": (
        dict(
            embed_dim=96,
            init_logit_bias=-10,
            custom_text=True,
            vision_cfg=dict(
                timm_model_name="test_vit3", timm_pool="map", timm_proj="none", image_size=160
            ),
            text_cfg=TEXT | SIGLIP,
        ),
        SQUASHED,
    ),
    "eva": (
        dict(
            embed_dim=24,
            custom_text=True,
            vision_cfg=dict(
                timm_model_name="eva02_tiny_patch14_224",
                timm_pool="token",
                timm_proj=None,
                image_size=224,
            ),
            text_cfg=TEXT,
        ),
        {},
    ),
}
# An image tower like SigLIP's (see `register_small_siglip`); timm's own smallest one has a ViT-B.
SMALL = "vit_tiny_patch16_siglip_32"
KINDS["plain siglip"] = (
    KINDS["siglip"][0]
    | dict(
        embed_dim=192,
        vision_cfg=dict(timm_model_name=SMALL, timm_pool="map", timm_proj="none", image_size=32),
    ),
    SQUASHED,
)
TEXTS = (
    "a photo of a cat",
    "A PHOTO of a  Dog!",
    "",
    "naïve café, 12 cups: 猫 🐈 ﬁne “quotes” don’t",
    "it's DON'T \n new\tline &amp; &lt;b&gt; snake_case",
    "schÃ¶n ΑΣ İ <|endoftext|> <end_of_text> ½ e&#769;",
    "a very long text about cats and dogs " * 12,
)
NAMES = ("cat", "dog", "a red car")
WEIGHTS = "open_clip_model.safetensors"


def clip_tokenizer(open_clip, transformers):
    """Returns open_clip's vocabulary and merges as a tokenizer of Transformers, as on the Hub."""
    theirs = open_clip.SimpleTokenizer()
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {renamed.get(name, name): index for name, index in theirs.encoder.items()}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=list(theirs.bpe_ranks))


def unigram_tokenizer(transformers):
    """Trains a tokenizer with SigLIP's special tokens, with Hugging Face's library."""
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    made.train_from_iterator([text.lower() for text in TEXTS], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def register_small_siglip():
    from timm.models import register_model
    from timm.models.vision_transformer import VisionTransformer

    def make(num_classes, global_pool, **unused):
        sizes = dict(img_size=32, patch_size=16, embed_dim=192, depth=2, num_heads=3)
        given = dict(num_classes=num_classes, global_pool=global_pool, class_token=False)
        return VisionTransformer(**sizes, **given)

    make.__name__ = SMALL
    register_model(make)


@pytest.fixture(scope="module")
def models(torch, open_clip, transformers, tmp_path_factory):
    """Returns folders of small random models, with open_clip's model, transform and tokenizer."""
    from safetensors.torch import save_file

    register_small_siglip()
    folders, found = tmp_path_factory.mktemp("open_clip"), {}
    for kind, (model_cfg, preprocess_cfg) in KINDS.items():
        folder = folders / kind
        folder.mkdir()
        made = (
            unigram_tokenizer(transformers)
            if "siglip" in kind
            else clip_tokenizer(open_clip, transformers)
        )
        made.save_pretrained(folder)
        model_cfg = json.loads(json.dumps(model_cfg))
        model_cfg["text_cfg"]["vocab_size"] = len(made)
        config = dict(model_cfg=model_cfg, preprocess_cfg=preprocess_cfg)
        (folder / "open_clip_config.json").write_text(json.dumps(config))
        theirs = open_clip.create_model(f"local-dir:{folder}")
        randomise(torch, theirs)
        theirs.logit_scale.data.fill_(1.2)
        if "siglip" in kind:
            theirs.logit_bias.data.fill_(-1.5)
        state = {name: x.contiguous() for name, x in theirs.state_dict().items()}
        save_file(state, folder / "open_clip_model.safetensors")
        theirs, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
        found[kind] = folder, theirs.double().eval(), transform, tokenizer
    return found


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """Writes a smooth image that is not square."""
    rows, columns = np.mgrid[:60, :90] / 90
    pixels = np.stack([rows, columns, (rows + columns) / 2], -1) * 255
    path = tmp_path_factory.mktemp("photographs") / "photograph.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_text_embeddings_are_those_of_the_library(kind, torch, models):
    folder, theirs, _, tokenizer = models[kind]
    model = vit_jax.load_image_text(folder, log=str)
    np.testing.assert_array_equal(model.tokenizer(TEXTS), tokenizer(list(TEXTS)).numpy())
    with torch.no_grad():
        expected = theirs.encode_text(tokenizer(list(TEXTS)), normalize=True).numpy()
    np.testing.assert_allclose(model.encode_text(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_shot_probabilities_from_a_file_are_those_of_the_library(
    kind, torch, models, photograph
):
    folder, theirs, transform, tokenizer = models[kind]
    pixels = transform(Image.open(photograph))[None].double()
    texts = tokenizer([f"a photo of a {name}." for name in NAMES])
    with torch.no_grad():
        image, text, scale, *bias = theirs(pixels, texts)
        logits = (scale * image @ text.T + (bias[0] if bias else 0))[0]
    probabilities = logits.sigmoid() if bias else logits.softmax(-1)
    model = vit_jax.load_image_text(folder, log=str)
    images = pixels.numpy().transpose(0, 2, 3, 1) * model.image.std + model.image.mean
    ours = model.encode_image(np.float32(2 * images - 1))
    np.testing.assert_allclose(ours, image.numpy(), atol=1e-5)
    order = np.argsort(-probabilities.numpy())
    (found,) = vit_jax.zero_shot(model, photograph, NAMES)
    assert found.classes == tuple(NAMES[i] for i in order)
    np.testing.assert_allclose(found.probabilities, probabilities.numpy()[order], atol=3e-3)
    classifier = open_classifier(str(folder), names=",".join(NAMES), decode="exact", log=str)
    crop = classifier.crop(photograph.read_bytes())
    exact = classifier.model.each_head(crop[None])[0][0]
    exact = 1 / (1 + np.exp(-exact)) if bias else np.exp(exact) / np.exp(exact).sum()
    np.testing.assert_allclose(exact, probabilities.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "siglip"])
def test_both_towers_are_bit_exact_after_writing_and_read_by_the_library(
    kind, torch, open_clip, models, photograph, tmp_path
):
    folder, theirs, transform, tokenizer = models[kind]
    model = vit_jax.load_image_text(folder, log=str)
    notes = []
    written = vit_jax.save_model(model, tmp_path / "x", library="open_clip", log=notes.append)
    assert not notes
    found, expected = (load_file(each / WEIGHTS) for each in (written, folder))
    assert len(found) == len(expected)
    read, read_transform = open_clip.create_model_from_pretrained(f"local-dir:{written}")
    tokens = open_clip.get_tokenizer(f"local-dir:{written}")(list(TEXTS))
    np.testing.assert_array_equal(tokens, tokenizer(list(TEXTS)))
    pixels = [each(Image.open(photograph))[None].double() for each in (read_transform, transform)]
    np.testing.assert_array_equal(*pixels)
    with torch.no_grad():
        outputs = [each(pixels[0], tokens) for each in (read.double().eval(), theirs)]
    for ours, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(ours.detach(), other.detach(), atol=1e-6)


def test_an_image_tower_without_a_name_in_timm_is_refused(models, tmp_path):
    """timm's CLIP and SigLIP names describe no model with a register, which `test_vit3` has."""
    model = vit_jax.load_image_text(models["siglip"][0], log=str)
    with pytest.raises(
        UserError, match="none of timm's CLIP or SigLIP architectures, from whose names open_clip"
    ):
        vit_jax.save_model(model, tmp_path / "x", library="open_clip", log=str)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_timm_model_of_the_images_is_read_as_open_clips(models, tmp_path):
    """timm's repositories of CLIPs have files of both kinds, with different preprocessing."""
    folder = shutil.copytree(models["eva"][0], tmp_path / "both")
    expected = vit_jax.load_image_text(folder, log=str)
    plain = vit_jax.create_model("ViT-mu/16", image_size=32)
    other = vit_jax.save_model(plain, tmp_path / "timm", library="timm", log=str)
    for file in other.iterdir():
        shutil.copyfile(file, folder / file.name)
    found = vit_jax.load_image_text(folder, log=str)
    assert found.image.options == expected.image.options
    classifier = open_classifier(str(folder), names="cat,dog", log=str)
    assert classifier.crop.resize == 224 and classifier.model.image_size == (224, 224)
    assert vit_jax.load_model(folder, log=str).options.dim == plain.options.dim


def test_a_run_continues_an_open_clip_with_its_tokens(models, tmp_path):
    from test_image_text import config_from

    folder = models["quick"][0]
    config = config_from("clip", folder)
    images = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3)).astype(np.uint8)
    pairs = images, ["a cat", "two dogs", "it's naïve", "猫"]
    vit_jax.train(config, tmp_path / "run", train=pairs, test=pairs)
    trained = vit_jax.load_image_text(tmp_path / "run", log=str)
    expected = vit_jax.load_image_text(folder, log=str)
    np.testing.assert_array_equal(trained.tokenizer(TEXTS), expected.tokenizer(TEXTS))
    np.testing.assert_allclose(trained.encode_text(TEXTS), expected.encode_text(TEXTS), atol=1e-6)
    np.testing.assert_allclose(
        trained.encode_image(images), expected.encode_image(images), atol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (dict(hf_model_name="roberta-base"), "text tower with hf_model_name='roberta-base'"),
        (dict(embed_cls=True), "text tower with embed_cls=True"),
        (dict(pool_type="first"), "pool_type='first'. Supported: argmax, last, eos"),
        # Without `eos_id`, open_clip reads the token 2.
        (dict(pool_type="eos"), "does not end texts with the token 2"),
        (dict(ls_init_value=0.1), "text tower with ls_init_value=0.1"),
        (dict(act_kwargs={"approximate": "other"}), "act_kwargs={'approximate': 'other'}"),
        (dict(tokenizer_kwargs={"clean": "none"}), "clean='none'. Supported: lower, whitespace"),
        (dict(tokenizer_kwargs={"strip_sep_token": True}), "strip_sep_token=True"),
        (dict(vocab_size=9), "tokens, but the text tower has 9: it is the tokenizer of another"),
        (dict(layers=3), "lacks transformer.resblocks.2"),
        (dict(width=64), r" is \[32\], but the model has \[64\]"),
    ],
)
def test_another_text_tower_is_rejected(text, words, models, tmp_path):
    folder = shutil.copytree(models["clip"][0], tmp_path / "other")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] |= text
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        vit_jax.load_image_text(folder, log=str)


def test_a_folder_without_tokenizer_or_with_another_is_rejected(models, tmp_path):
    ignored = shutil.ignore_patterns("tokenizer.json", "vocab.json")
    bare = shutil.copytree(models["clip"][0], tmp_path / "bare", ignore=ignored)
    with pytest.raises(UserError, match="there is no tokenizer in"):
        vit_jax.load_image_text(bare, log=str)
    other = shutil.copytree(bare, tmp_path / "other")
    content = json.loads((models["clip"][0] / "tokenizer.json").read_text())
    content["model"]["vocab"].pop("<|endoftext|>")
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not CLIP's, .* it lacks <|endoftext|>"):
        vit_jax.load_image_text(other, log=str)


def test_a_pickle_is_written_for_transformers_with_both_towers(
    torch, transformers, models, tmp_path
):
    source = models["clip"][0]
    ignored = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(source, tmp_path / "pickled", ignore=ignored)
    tensors = {name: torch.from_numpy(x) for name, x in load_file(source / WEIGHTS).items()}
    torch.save(tensors, folder / "open_clip_pytorch_model.bin")
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.convert", folder / "open_clip_pytorch_model.bin"]
        + [tmp_path / "out", "--tower=both"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "note: not written: open_clip's cleaning of texts" in done.stdout
    expected = vit_jax.load_image_text(source, log=str)
    found = vit_jax.load_image_text(tmp_path / "out", log=str)
    texts = ["a photo of a cat", "two dogs"]
    np.testing.assert_array_equal(found.encode_text(texts), expected.encode_text(texts))
    images = np.random.default_rng(0).integers(256, size=(2, *expected.image.image_size, 3))
    images = images.astype(np.uint8)
    np.testing.assert_array_equal(found.encode_image(images), expected.encode_image(images))
    read = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        theirs = read.get_text_features(input_ids=torch.from_numpy(found.tokenizer(texts)))
    theirs = getattr(theirs, "pooler_output", theirs).numpy()
    theirs /= np.linalg.norm(theirs, axis=-1, keepdims=True)
    np.testing.assert_allclose(found.encode_text(texts), theirs, atol=1e-5)


def test_an_image_tower_that_transformers_lacks_is_refused(models, tmp_path):
    model = vit_jax.load_image_text(models["siglip"][0], log=str)
    with pytest.raises(UserError, match="SigLIP has no pool_all=True"):
        vit_jax.save_model(model, tmp_path / "written", log=str)
    assert not list(tmp_path.iterdir())
