"""Published image-text models are loaded by name, from a local server that answers like the Hub."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_big_vision_text
from safetensors.numpy import save_file
from test_big_vision_text import checkpoint

import vit_jax
from tests.hub_server import FakeHub
from vit_jax.errors import UserError
from vit_jax.published.towers import all_towers, find_towers

tokenizer = test_big_vision_text.tokenizer
LOAD = """
import sys, numpy as np, vit_jax
name, tag, out, *size = sys.argv[1:]
size = dict(image_size=int(size[0])) if size else {}
model = vit_jax.load_image_text(name, pretrained=tag, **size)
np.save(out, model.encode_text(["a cat", "two dogs"]))
"""


def load(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def open_clip_folder(source: Path, folder: Path) -> None:
    """Writes a text tower of Transformers in open_clip's format, with a random image tower."""
    from test_open_clip import own_tower

    model = vit_jax.load_image_text(source, log=str)
    text, options = {}, model.text.options
    for (*path, kind), leaf in vit_flat(model.text):
        name, array = open_clip_name(path, kind, np.asarray(leaf))
        text[f"text.{name}"] = array
    tensors = {name: np.float32(x) for name, x in own_tower().items()}
    tensors["visual.proj"] = np.ones((128, options.output_dim), np.float32)
    tensors |= text | dict(logit_scale=np.float32(1.0), logit_bias=np.float32(-2.0))
    tensors = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    vision = dict(layers=2, width=128, patch_size=8, image_size=[32, 40])
    described = dict(
        context_length=options.length,
        vocab_size=options.vocabulary,
        width=options.dim,
        heads=options.heads,
        layers=options.depth,
        no_causal_mask=True,
        proj_bias=True,
        pool_type="last",
        hf_tokenizer_name="owner/name",
        tokenizer_kwargs=dict(clean="canonicalize"),
        norm_kwargs=dict(eps=1e-6),
        act_kwargs=dict(approximate="tanh"),
    )
    config = dict(embed_dim=options.output_dim, vision_cfg=vision, text_cfg=described)
    (folder / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=config)))


def vit_flat(model) -> list:
    from vit_jax.interop.checkpoint import params_of

    return [(path.split("/"), leaf) for path, leaf in params_of(model).items()]


def open_clip_name(path: list[str], kind: str, x: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns the name and array of a parameter in open_clip."""
    whole = {
        "token_embedding": "token_embedding.weight",
        "position_embedding": "positional_embedding",
    }
    if path[0] in whole:
        return whole[path[0]], x
    part = "weight" if kind in ("kernel", "scale") else "bias"
    if path[0] in ("norm", "head"):
        return f"{dict(norm='ln_final', head='text_projection')[path[0]]}.{part}", x.T
    names = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention/out": "attn.out_proj",
        "mlp/fc1": "mlp.c_fc",
        "mlp/fc2": "mlp.c_proj",
    }
    start, name = f"transformer.resblocks.{int(path[1])}.", "/".join(path[2:])
    if name == "attention/qkv":
        flat = x.reshape(len(x), -1).T if kind == "kernel" else x.reshape(-1)
        return f"{start}attn.in_proj_{part}", flat
    x = x.reshape(-1, x.shape[-1]) if name == "attention/out" and kind == "kernel" else x
    return f"{start}{names[name]}.{part}", x.T


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """Writes a small SigLIP in the format of Transformers."""
    place = tmp_path_factory.mktemp("towers")
    model = vit_jax.load_image_text(checkpoint(place, tokenizer), log=str)
    return vit_jax.save_model(model, place / "transformers", log=str)


def test_a_name_and_a_tag_select_a_repository_of_the_hub(folder, tmp_path):
    expected = vit_jax.load_image_text(folder, log=str).encode_text(["a cat", "two dogs"])
    hub = FakeHub({"google/siglip2-base-patch16-224": contents(folder)})
    try:
        environment = hub.environment(tmp_path / "hub")
        done = load(environment, "SigLIP2-B/16", "webli", tmp_path / "out.npy")
        assert done.returncode == 0, done.stderr
        assert "SigLIP2-B/16, webli, 224 pixels: hf://google/siglip2-base-patch16" in done.stdout
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
        done = load(environment, "SigLIP2-B/16", "webli", tmp_path / "out.npy", 384)
        assert "384 pixels: hf://google/siglip2-base-patch16-384" in done.stdout
        assert "there is no" in done.stderr.splitlines()[-1]
    finally:
        hub.server.shutdown()


def test_only_the_weights_of_both_towers_are_downloaded(folder, tmp_path):
    """timm's repositories also have the image tower as a timm model, which is not downloaded."""
    both = shutil.copytree(folder, tmp_path / "both")
    open_clip_folder(folder, both)
    (both / "config.json").write_text(json.dumps(dict(architecture="vit_base_patch32_clip_224")))
    hub = FakeHub({"timm/vit_base_patch32_clip_224.openai": contents(both)})
    try:
        done = load(hub.environment(tmp_path / "hub"), "CLIP-B/32", "openai", tmp_path / "out.npy")
        assert done.returncode == 0, done.stderr
        fetched = [request for request in hub.requests if "/resolve/" in request]
        assert any("open_clip_model.safetensors" in request for request in fetched)
        assert not any("/model.safetensors" in request for request in fetched)
    finally:
        hub.server.shutdown()
    expected = vit_jax.load_image_text(folder, log=str).encode_text(["a cat", "two dogs"])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


def test_every_repository_has_one_line_and_the_size_of_its_name():
    repositories = [towers.repository for towers in all_towers()]
    assert len({*repositories}) == len(repositories) > 30
    for towers in all_towers():
        assert find_towers(towers.model, towers.tag, towers.pixels) == towers
        assert find_towers(towers.model, towers.repository) == towers
        if sizes := re.findall(r"(?<=[-_])(?:224|256|336|384|512)(?=[-.]|$)", towers.repository):
            assert str(towers.pixels) in sizes


def test_unknown_names_and_tags_are_rejected():
    with pytest.raises(UserError, match="no published model .* did you mean 'SigLIP2-B/16'"):
        vit_jax.load_image_text("SigLIP2-B16", pretrained="webli")
    with pytest.raises(UserError, match="CLIP-B/32 has no weights 'webli'; there are: openai"):
        vit_jax.load_image_text("CLIP-B/32", pretrained="webli")
    with pytest.raises(UserError, match=r"name of a model: load_image_text\('CLIP-B/32', pretr"):
        vit_jax.load_image_text("CLIP-B/32")
