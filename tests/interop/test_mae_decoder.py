"""Tests of masked autoencoders with decoders, in folders of Transformers and authors' files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import randomise
from safetensors.numpy import load_file

import vit_jax
from vit_jax.config import base_config, check
from vit_jax.errors import UserError
from vit_jax.interop.positions import fixed_table
from vit_jax.runs.assemble import assemble

SIZES = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=160)
SIZES |= dict(image_size=32, patch_size=8, layer_norm_eps=1e-6)
SIZES |= dict(decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_intermediate_size=128)
OURS = {"mae.decoder_dim": 32, "mae.decoder_depth": 2, "mae.decoder_heads": 16}


@pytest.fixture
def drawn(torch, transformers, tmp_path):
    """Returns a function that writes a random masked autoencoder of Transformers.

    The function returns the model and its folder.
    """

    def make(**options):
        theirs = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SIZES | options))
        randomise(torch, theirs)
        for p in theirs.parameters():
            if not p.requires_grad:
                p.data[:] = torch.from_numpy(fixed_table((4, 4), p.shape[-1]))
        theirs.save_pretrained(tmp_path / "theirs")
        return theirs, tmp_path / "theirs"

    return make


# The authors' names by patterns of Transformers' names.
NAMES = {
    r"^decoder\.decoder_(encoder\.layer|layers)\.": "decoder_blocks.",
    r"^decoder\.": "",
    r"^vit\.encoder\.layer\.": "blocks.",
    r"^vit\.embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"^vit\.embeddings\.position_embeddings": "pos_embed",
    r"^vit\.embeddings\.": "",
    r"^vit\.layernorm": "norm",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"attention\.output\.dense": "attn.proj",
    r"intermediate\.dense": "mlp.fc1",
    r"(?<=\d\.)output\.dense": "mlp.fc2",
}


@pytest.fixture
def authors_file(torch, tmp_path):
    """Returns a function that writes the tensors of a folder as a file of the authors."""

    def write(folder) -> Path:
        tensors, known = {}, load_file(folder / "model.safetensors")
        for name, tensor in known.items():
            if ".attention.attention." in name:
                parts = [
                    re.sub("query|key|value", part, name) for part in ("query", "key", "value")
                ]
                tensor = np.concatenate([known[part] for part in parts])
                name = re.sub(r"attention\.attention\.\w+", "attn.qkv", name)
            for theirs, other in NAMES.items():
                name = re.sub(theirs, other, name)
            tensors[name] = torch.from_numpy(tensor)
        torch.save({"model": tensors}, tmp_path / "mae_full.pth")
        return tmp_path / "mae_full.pth"

    return write


def convert(source, destination, *flags) -> str:
    """Runs the convert command and returns its output."""
    command = [sys.executable, "-m", "vit_jax.convert", str(source), str(destination), *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(checkpoint, **values):
    """Returns the parts of a masked autoencoder's run that starts from a checkpoint."""
    config = base_config()
    config.update(dict(steps=1, batch_size=2))
    config.update_from_flattened_dict(
        {
            "data.source": "synthetic",
            "data.image_size": 32,
            "data.test_resize": 32,
            "model.name": "",
            "optimizer.warmup_steps": 0,
            "objective.name": "mae",
            "finetune.checkpoint": str(checkpoint),
        }
        | OURS
        | values
    )
    return assemble(check(config))


def modules(parts):
    """Returns the model and the objective before the first step."""
    program, origin = parts.program, parts.origin
    state = program.initial_state(0, origin.read(), objective=origin.read_objective())
    evaluated = program.evaluated(state)
    return nnx.merge(program.graphdef, evaluated.params), nnx.merge(
        program.objective, evaluated.objective_params
    )


def assert_alike(torch, theirs, parts):
    """Asserts that predictions and losses are equal for the same images and masked patches."""
    model, objective = modules(parts)
    rng = np.random.default_rng(0)
    images, noise = (
        rng.integers(256, size=(2, 32, 32, 3), dtype=np.uint8),
        rng.uniform(size=(2, 16)),
    )
    batch = dict(image=images, order=np.argsort(noise, axis=1).astype(np.int32))
    seen = np.float64(model.normalize(images)).transpose(0, 3, 1, 2).copy()
    with torch.no_grad():
        out = theirs.double().eval()(torch.from_numpy(seen), noise=torch.from_numpy(noise))
    hidden = batch["order"][:, objective.visible :]
    wanted = np.take_along_axis(out.logits.numpy(), hidden[..., None], axis=1)
    found = jax.jit(lambda model, objective, batch: objective.predict(model, batch))(
        model, objective, batch
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    losses = jax.jit(lambda model, objective, batch: objective(model, batch))(
        model, objective, batch
    )
    assert np.mean(losses.each) == pytest.approx(out.loss.item(), rel=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_predictions_and_loss_of_transformers_decoder_are_the_same_here(normalized, torch, drawn):
    theirs, folder = drawn(norm_pix_loss=normalized, layer_norm_eps=1e-3)
    parts = started(folder, **{"mae.normalize_targets": normalized})
    count = sum(p.numel() for p in theirs.decoder.parameters() if p.requires_grad)
    assert parts.origin.notes[-1] == f"kept: mae's own parameters, {count:,}"
    assert_alike(torch, theirs, parts)


def test_authors_file_can_be_converted_for_transformers(
    torch, transformers, drawn, authors_file, tmp_path
):
    theirs, folder = drawn()
    printed = convert(authors_file(folder), tmp_path / "ours")
    assert "a decoder of 16 heads, whose targets are unknown" in printed
    assert "skipped" not in printed and "kept: mae's own parameters" in printed
    kind = transformers.ViTMAEForPreTraining
    again, info = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert_alike(torch, theirs, started(tmp_path / "ours", **{"mae.normalize_targets": False}))


def test_decoders_that_a_format_cannot_store_are_saved_separately_or_reported(drawn, tmp_path):
    _, folder = drawn(norm_pix_loss=True)
    printed = convert(folder, tmp_path / "ours", "--to=timm", "--position=1d")
    assert "kept: mae's own parameters" in printed
    assert not any("decoder" in name for name in load_file(tmp_path / "ours" / "model.safetensors"))
    first, second = (started(place).origin for place in (folder, tmp_path / "ours"))
    assert first.notes[-1] == second.notes[-1]
    jax.tree.map(np.testing.assert_array_equal, first.read_objective(), second.read_objective())
    lines = []
    vit_jax.save_model(folder, tmp_path / "ours.npz", position="1d", gelu="tanh", log=lines.append)
    assert "not saved, as the format cannot store them: mae's own parameters" in lines


def test_a_model_is_written_for_transformers_and_read_with_its_decoder(drawn, tmp_path):
    _, folder = drawn(norm_pix_loss=True, mask_ratio=0.6)
    written = vit_jax.save_model(folder, tmp_path / "ours")
    before, after = (started(place).origin for place in (folder, written))
    assert before.notes[1:] == after.notes[1:]
    first, second = (jax.tree.leaves(origin.read_objective()) for origin in (before, after))
    assert len(first) > 20
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_decoder_is_refused_unless_it_is_initialized_again(drawn):
    _, folder = drawn()
    other = {"mae.decoder_dim": 64, "mae.decoder_depth": 1}
    words = "for config.mae.decoder_dim=32 config.mae.decoder_depth=2: set that, or "
    with pytest.raises(UserError, match=words + "config.finetune.objective='new'"):
        started(folder, **other)
    parts = started(folder, **other, **{"finetune.objective": "new"})
    assert parts.origin.notes[-1] == "new: mae's own parameters, random"
    assert modules(parts)[1].mask.shape == (1, 1, 64)


def test_other_training_options_of_a_decoder_are_logged(drawn):
    _, folder = drawn(norm_pix_loss=False, mask_ratio=0.6)
    line = started(folder).origin.notes[-1]
    assert line.endswith(", trained with mask_ratio=0.6, normalize_targets=False")


def test_an_encoder_alone_starts_with_a_random_decoder_and_logs_it(drawn):
    theirs, folder = drawn()
    theirs.vit.save_pretrained(folder)
    origin = started(folder).origin
    assert origin.notes[-1] == "new: mae's own parameters, random, as the checkpoint gives none"
    assert origin.read_objective() == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(hidden_act="gelu_new"), "decoder with 'gelu_new' is unsupported"),
        (
            dict(decoder_intermediate_size=64),
            r"intermediate.dense.\w+ is \[64.*\], but the model has \[128",
        ),
    ],
)
def test_a_decoder_that_computes_differently_is_refused(options, words, drawn):
    _, folder = drawn(**options)
    with pytest.raises(UserError, match=words + ".*; config.finetune.objective='new'"):
        started(folder)


@pytest.mark.parametrize("dim", [None, "wide", 0, 2**40])
def test_decoder_sizes_in_a_config_are_validated_before_allocation(dim, drawn, tmp_path):
    _, folder = drawn()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(decoder_hidden_size=dim)))
    with pytest.raises(UserError, match=f"config.mae.decoder_dim is {dim!r} and must be"):
        vit_jax.save_model(folder, tmp_path / "ours")
    with pytest.raises(UserError, match=f"for config.mae.decoder_dim={dim!r}: set that, or"):
        started(folder)


def test_a_decoder_with_learned_positions_is_refused(drawn):
    theirs, folder = drawn()
    theirs.decoder.decoder_pos_embed.data[0, 3, 5] += 0.1
    theirs.save_pretrained(folder)
    with pytest.raises(
        UserError, match="decoder_pos_embed is not the fixed table of masked autoencoders"
    ):
        started(folder)
