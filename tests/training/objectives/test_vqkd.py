"""Tests of VQ-KD, a tokeniser learned from a frozen teacher: loss, codebook and saved runs."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.system.test_interface import small
from tests.training.objectives.small import SMALL, config_of, dotted, noisy
from tests.training.objectives.test_eva import TEACHER
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.interop.open import open_checkpoint
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.runs.assemble import evaluation_views
from vit_jax.runs.checkpoints import load_items
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives.codebook import k_means, nearest, sums_by_code
from vit_jax.training.objectives.frozen import TeacherSpec, WithHeads
from vit_jax.training.objectives.objective import EVALUATION
from vit_jax.training.objectives.vqkd import VQKD, Tokeniser
from vit_jax.training.program import make_program

SIZE, PATCHES, BATCH, CODES, DIM, MOMENTUM = 16, 16, 8, 24, 6, 0.9


def directions(rng, *shape):
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_nearest_of_many_codes_is_found_in_chunks():
    rng = np.random.default_rng(0)
    x, codes = directions(rng, 3, 50, 5), directions(rng, 2500, 5)
    codes[2000] = codes[30]  # Of several equally near codes, the first is chosen.
    x[0, 0] = codes[30]
    expected = np.linalg.norm(x[:, :, None] - codes, axis=-1).argmin(-1)
    assert expected[0, 0] == 30
    found = nearest(jnp.float32(x), jnp.float32(codes))
    np.testing.assert_array_equal(found, expected)
    flat, given = np.float64(x).reshape(-1, 5), expected.reshape(-1)
    sums, hits = sums_by_code(jnp.float32(flat), jnp.asarray(given), len(codes))
    wanted = np.zeros_like(codes)
    np.add.at(wanted, given, flat)
    np.testing.assert_allclose(sums, wanted, atol=1e-5)
    np.testing.assert_array_equal(hits, np.bincount(given, minlength=len(codes)))


def means_in_float64(x, given, codes):
    """Returns the normalized mean of each code's vectors, or the code itself if it has none."""
    means = codes.copy()
    for code in np.unique(given):
        mean = x[given == code].mean(0)
        means[code] = mean / np.linalg.norm(mean)
    return means


def k_means_in_float64(x, count, key):
    codes = x[np.asarray(jax.random.permutation(key, len(x)))[:count]]
    for _ in range(10):
        codes = means_in_float64(x, (x @ codes.T).argmax(1), codes)
    return codes


def test_k_means_starts_at_vectors_and_ends_among_them():
    x, key = directions(np.random.default_rng(1), 200, 4), jax.random.key(3)
    found = jax.jit(k_means, static_argnums=1)(jnp.float32(x), 12, key)
    np.testing.assert_allclose(found, k_means_in_float64(x, 12, key), atol=1e-5)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    """Writes a checkpoint of each kind of teacher, and returns their folders by kind."""
    kinds = {
        "plain": ("ViT-Ti/4", TEACHER),
        "with a head": ("ViT-Ti/4", TEACHER | {"num_classes": 5}),
        "of larger patches": ("ViT-Ti/8", TEACHER),
        "of no patches": ("ConvNeXt-T", dict(image_size=SIZE, blocks=(1, 1), widths=(8, 16))),
    }
    folder = tmp_path_factory.mktemp("teachers")
    for kind, (name, values) in kinds.items():
        model = noisy(vit_jax.create_model(name, **{"num_classes": 0} | values), 2)
        vit_jax.save_model(model, folder / kind, library="timm", log=str)
    return {kind: str(folder / kind) for kind in kinds}


def config_for(teacher, **values):
    config = config_of("vqkd", teacher=teacher, codes=CODES, code_dim=DIM, code_momentum=MOMENTUM)
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    config.optimizer.update(dict(warmup_steps=0, learning_rate=3e-3, schedule="constant"))
    config.batch_size, config.data.image_size, config.data.test_resize = BATCH, SIZE, SIZE
    config.data.flip = False
    config.update_from_flattened_dict(values)
    return config


def program_of(teacher, **values):
    """Returns the program and its first state."""
    config = config_for(teacher, **values)
    frozen = open_frozen(config)
    program = make_program(
        config, num_classes=0, steps=10, mesh=make_mesh(config.mesh), frozen=frozen.model
    )
    return program, program.initial_state(0, frozen=frozen.read())


def batch_of(program, seed=0):
    images = np.random.default_rng(seed).integers(256, size=(BATCH, SIZE, SIZE, 3), dtype=np.uint8)
    return to_devices({"image": images, "labels": np.full((BATCH, 1), -1, np.int32)}, program.mesh)


def modules(program, state):
    evaluated = program.evaluated(state)
    return nnx.merge(program.graphdef, evaluated.params), nnx.merge(
        program.objective, evaluated.objective_params
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _result_of(graphdef, objective, evaluated, batch):
    context = EVALUATION._replace(state=evaluated.objective_state)
    model, objective = (
        nnx.merge(graphdef, evaluated.params),
        nnx.merge(objective, evaluated.objective_params),
    )
    return objective(model, batch, context)


def result_of(program, state, batch):
    """Returns the objective's result on a batch."""
    return _result_of(program.graphdef, program.objective, program.evaluated(state), batch)


def trained(program, state, steps=1):
    for number in range(steps):
        state, sums = program.train_step(
            state, program.initial_metrics(), batch_of(program, number)
        )
    return state, sums


@pytest.fixture(scope="module")
def plain(teachers):
    """Returns a program, its first state and result, and the state and metrics of one update."""
    program, state = program_of(teachers["plain"])
    first = jax.device_get(state)
    result = jax.device_get(result_of(program, state, batch_of(program)))
    return program, first, result, *trained(program, state)


@jax.jit
def patch_features(model, images):
    """Returns the features of each patch, `[batch, patches, dim]`."""
    return model.features(images, dense=True).reshape(len(images), PATCHES, -1)


def dense(layer, x):
    return x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)


@pytest.mark.parametrize("features", ["tokens", "head"])
def test_loss_is_computed_from_the_decoded_nearest_codes(teachers, features):
    values = {"objective.teacher_features": features, "vqkd.commitment": 0.5}
    program, state = program_of(teachers["with a head"], **values)
    model, objective = modules(program, state)
    noisy(objective.decoder.out), noisy(objective.projection)
    evaluated = program.evaluated(state)._replace(
        objective_params=nnx.to_pure_dict(nnx.state(objective))
    )
    batch = batch_of(program)
    found = _result_of(program.graphdef, program.objective, evaluated, batch)
    images, codebook = np.asarray(batch["image"]), np.float64(state["objective_state"]["codebook"])

    tokens = np.float64(patch_features(model, images))
    x = dense(objective.projection.out, np.tanh(dense(objective.projection.hidden, tokens)))
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    given = np.linalg.norm(x[:, :, None] - codebook, axis=-1).argmin(-1)
    np.testing.assert_array_equal(found.aux["given"], given)
    np.testing.assert_allclose(found.aux["projected"], x, atol=1e-5)

    decoder = objective.decoder
    read = dense(decoder.embedding, codebook[given])
    cls = np.broadcast_to(np.asarray(decoder.cls[...]), (BATCH, 1, read.shape[-1]))
    tokens = np.float32(np.concatenate([cls, read], axis=1) + np.asarray(decoder.positions()))

    @jax.jit
    def through_blocks(tokens):
        for block in decoder.blocks.values():
            tokens = block(tokens)
        return decoder.norm(tokens)[:, 1:]

    tokens = np.float64(through_blocks(tokens))
    decoded = dense(decoder.out.out, np.tanh(dense(decoder.out.hidden, tokens)))
    teacher = vit_jax.load_model(teachers["with a head"], log=str)
    said = np.float64(patch_features(teacher, images))
    said = dense(teacher.head, said) if features == "head" else said
    cosines = (
        (decoded * said).sum(-1) / np.linalg.norm(decoded, axis=-1) / np.linalg.norm(said, axis=-1)
    )
    distances = ((x - codebook[given]) ** 2).mean((1, 2))
    np.testing.assert_allclose(found.metrics["code_distance"], distances, rtol=1e-4)
    np.testing.assert_allclose(found.each, 1 - cosines.mean(1) + 0.5 * distances, rtol=1e-4)


def test_gradients_pass_straight_through_the_codes(plain):
    program, first, *_ = plain
    model, objective = modules(program, first)
    batch, memory = batch_of(program), first["objective_state"]

    def loss(x, straight):
        _, codes = objective.quantise(x, jnp.asarray(memory["codebook"]))
        read = x + jax.lax.stop_gradient(codes - x) if straight else codes
        return objective.decoder(read).sum(), read

    @jax.jit
    def gradients(images):
        x = objective.project(model, images)
        through, read = jax.grad(loss, has_aux=True)(x, True)
        expected = jax.grad(lambda x: objective.decoder(x).sum())(read)
        return through, expected, jax.grad(loss, has_aux=True)(x, False)[0]

    through, expected, not_straight = gradients(batch["image"])
    np.testing.assert_allclose(through, expected, atol=1e-5)
    assert not np.any(not_straight)


def updated_in_float64(codes, x, given):
    codes = MOMENTUM * codes + (1 - MOMENTUM) * means_in_float64(x, given, codes)
    return codes / np.linalg.norm(codes, axis=-1, keepdims=True)


def test_the_first_batch_initializes_and_updates_the_codes(plain):
    program, first, result, state, _ = plain
    x = np.float64(result.aux["projected"]).reshape(-1, DIM)
    codes = k_means_in_float64(x, CODES, jax.random.fold_in(jax.random.key(0), 1))
    given = (x @ codes.T).argmax(1)
    np.testing.assert_allclose(
        state["objective_state"]["codebook"], updated_in_float64(codes, x, given), atol=1e-4
    )
    shares = np.bincount(given, minlength=CODES) / len(x)
    np.testing.assert_allclose(state["objective_state"]["usage"], shares, atol=1e-6)
    assert not np.allclose(
        first["objective_state"]["codebook"], state["objective_state"]["codebook"], atol=0.1
    )


def test_each_code_follows_the_mean_of_its_patches_of_the_whole_batch(plain):
    program, _, _, state, _ = plain
    before, batch = np.float64(state["objective_state"]["codebook"]), batch_of(program, 5)
    # Makes some codes that have patches and some that have none.
    before[3], before[4] = -before[5], before[5]
    memory = {"codebook": jnp.float32(before), "usage": state["objective_state"]["usage"]}
    state = jax.tree.map(jnp.copy, state) | {"objective_state": memory}
    result = jax.device_get(result_of(program, state, batch))
    given = result.aux["given"].reshape(-1)
    assert 0 < len(np.unique(given)) < CODES
    after = program.train_step(state, program.initial_metrics(), batch)[0]["objective_state"]
    x = np.float64(result.aux["projected"]).reshape(-1, DIM)
    np.testing.assert_allclose(after["codebook"], updated_in_float64(before, x, given), atol=1e-5)


def test_rarely_used_codes_are_moved_to_patches(teachers):
    program, state = program_of(teachers["plain"], **{"vqkd.revive_below": 0.5})
    _, objective = modules(program, state)
    rng = np.random.default_rng(0)
    codes = directions(rng, CODES, DIM)
    # No patch is assigned to the last six codes.
    x = codes[rng.integers(CODES - 6, size=(BATCH, PATCHES))]
    usage = np.where(np.arange(CODES) < CODES - 6, 1.0, 0.1) / CODES
    memory = {"codebook": np.float32(codes), "usage": np.float32(usage)}
    told = {"projected": np.float32(x), "given": np.int32((x @ codes.T).argmax(-1))}
    after = jax.jit(objective.update_state)(memory, {}, told, jnp.int32(7))
    np.testing.assert_allclose(after["codebook"][:-6], codes[:-6], atol=1e-5)
    revived = np.asarray(after["codebook"][-6:])
    near = np.abs(revived[:, None] - x.reshape(-1, DIM)).max(-1).min(-1)
    np.testing.assert_allclose(near, 0, atol=1e-6)
    np.testing.assert_allclose(after["usage"][-6:], 1 / CODES)


@pytest.mark.slow
def test_micro_batches_update_the_codes_as_the_whole_batch(teachers, plain):
    program, *_, state, sums = plain
    parts, same = trained(*program_of(teachers["plain"], micro_batches=4))
    np.testing.assert_allclose(
        parts["objective_state"]["codebook"], state["objective_state"]["codebook"], atol=1e-5
    )
    np.testing.assert_allclose(same["loss"], sums["loss"], rtol=1e-5)


def test_few_codes_in_use_log_a_warning(plain):
    program, *_ = plain
    objective = program.abstract_objective()
    means = {"codes_used": 0.01, "perplexity": 2.0}
    assert objective.warning(means, 10) is None
    assert "revive_below" in objective.warning(means, 10_000)
    assert objective.warning(means | {"codes_used": 0.9}, 10_000) is None


def test_pictures_show_the_patches_whose_teacher_features_are_decoded(teachers, plain):
    program, *_, state, _ = plain
    config = config_for(teachers["plain"])
    splits = {"test": open_source("digits", "test[:8]")}
    evaluate = Evaluator(program, splits, config, print, evaluation_views(config))
    original, same, drawn = evaluate.pictures("test", program.evaluated(state), 3)
    np.testing.assert_array_equal(same, original)
    patches = {drawn[0, row : row + 4, :4].tobytes() for row in range(0, SIZE, 4)}
    known = {
        image[row : row + 4, column : column + 4].tobytes()
        for image in original
        for row in range(0, SIZE, 4)
        for column in range(0, SIZE, 4)
    }
    assert patches <= known


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("plain", {"vqkd.codes": 200}, "codes = 200 are more than the 128 patches of a batch"),
        (
            "plain",
            {"vqkd.decoder_heads": 3},
            "decoder_dim = 16 must be divisible by decoder_heads = 3",
        ),
        ("plain", {"model.pooling": "map"}, "trains nothing behind the encoder"),
        ("plain", {"objective.teacher_features": "head"}, "has no head"),
        ("of larger patches", {}, "has 2x2 patches .* and the model 4x4: .*teacher_size=32"),
        ("of no patches", {}, "has no patch features: use a ViT"),
    ],
)
def test_invalid_options_are_refused_in_one_line(teachers, kind, values, words):
    with pytest.raises(UserError, match=words):
        program_of(teachers[kind], **values)


def test_a_momentum_of_one_is_refused(teachers):
    config = small(
        **{
            "objective.name": "vqkd",
            "objective.teacher": teachers["plain"],
            "vqkd.code_momentum": 1.0,
        }
    )
    with pytest.raises(UserError, match="code_momentum is 1.0 and must be"):
        vit_jax.train(config, "unused")


@pytest.fixture(scope="module")
def run(teachers, tmp_path_factory):
    """Trains a short run and returns its workdir."""
    values = {"objective.name": "vqkd", "objective.teacher": teachers["plain"]}
    values |= {"vqkd.codes": CODES, "vqkd.code_dim": DIM}
    values |= {"vqkd.decoder_dim": 16, "vqkd.decoder_depth": 1, "vqkd.decoder_heads": 2}
    config = small(steps=2, evaluate_every=2, **values)
    folder = tmp_path_factory.mktemp("run") / "run"
    vit_jax.train(config, folder)
    return folder


def opened(source, monkeypatch) -> tuple[WithHeads, dict]:
    """Opens a run as the tokeniser of an objective; returns the model and its parameters."""
    config = config_for(str(source))
    wanted = TeacherSpec(str(source), {"image_size": SIZE}, "vqkd", Tokeniser)
    monkeypatch.setattr(VQKD, "teacher_spec", staticmethod(lambda config: wanted))
    found = open_frozen(config)
    return found.model, found.read()


@pytest.mark.one_variant
@pytest.mark.parametrize("saved", [False, True], ids=["workdir", "folder"])
@pytest.mark.slow
def test_a_run_is_opened_as_a_tokeniser_with_its_codebook(run, saved, tmp_path, monkeypatch):
    source = run
    if saved:
        source = tmp_path / "saved"
        command = [sys.executable, "-m", "vit_jax.convert", str(run), str(source), "--to=timm"]
        subprocess.run(command, check=True, capture_output=True)
    model, params = opened(source, monkeypatch)
    tokeniser = nnx.merge(nnx.graphdef(model), params)
    items = load_items(run / "checkpoints", {"codebook": jnp.zeros((CODES, DIM))})
    np.testing.assert_array_equal(tokeniser.heads.codebook[...], items["codebook"])
    images = np.random.default_rng(0).integers(256, size=(3, SIZE, SIZE, 3), dtype=np.uint8)
    patches = patch_features(vit_jax.load_model(run, log=str), images)
    x = np.float64(jax.jit(lambda heads, x: heads.projection(x))(tokeniser.heads, patches))
    np.testing.assert_array_equal(
        jax.jit(lambda heads, x: heads(x))(
            tokeniser.heads, patch_features(tokeniser.model, images)
        ),
        (x @ np.float64(items["codebook"]).T).argmax(-1),
    )
    assert len(np.unique(x)) > 1


@pytest.mark.slow
def test_training_continues_from_a_run_with_its_codebook(run, teachers, tmp_path, capsys):
    values = dict(teacher=teachers["plain"], codes=CODES, code_dim=DIM, code_momentum=0.999)
    decoder = dict(decoder_dim=16, decoder_depth=1, decoder_heads=2)
    config = small(steps=1, evaluate_every=1, **dotted("vqkd", **values, **decoder))
    config = config.copy_and_resolve_references().unlock()
    config.finetune.checkpoint, config.optimizer.learning_rate = str(run), 0.0
    config.optimizer.warmup_steps = 0
    vit_jax.train(config.lock(), tmp_path / "run")
    assert "with codebook and usage" in capsys.readouterr().out
    before, after = (
        open_checkpoint(folder).objective.state["codebook"].read()
        for folder in (run, tmp_path / "run")
    )
    assert 0 < np.abs(before - after).max() < 0.01  # The codebook was not initialized again.


@pytest.mark.slow
def test_a_run_of_another_objective_is_no_tokeniser(teachers, monkeypatch):
    with pytest.raises(UserError, match="has no heads of vqkd: use a workdir"):
        opened(teachers["plain"], monkeypatch)
