"""Tests of DINO with a frozen teacher that has its own heads and is larger than the student."""

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.training.objectives.small import SMALL, config_of
from vit_jax.config import check, run_options
from vit_jax.errors import UserError
from vit_jax.interop.objective_files import write_objective_files
from vit_jax.interop.open import open_checkpoint
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.planning.estimate import make_workload
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives.objective import StepContext
from vit_jax.training.program import make_program

pytestmark = pytest.mark.slow  # Each test starts processes or compiles for seconds.

# Number of prototypes and bottleneck width of each head.
HEADS = {"head": (12, 8), "patch_head": (9, 6)}
LARGER = dict(dim=24, depth=1, mlp_dim=32, heads=2)


def write_teacher(folder, heads=("head", "patch_head"), seed=0, patch=4):
    """Writes a teacher that is larger than the student, with DINO heads."""
    rng = np.random.default_rng(seed)
    name = f"ViT-Ti/{patch}"
    model = vit_jax.create_model(name, num_classes=0, image_size=16, **LARGER, pooling="cls")
    vit_jax.save_model(model, folder, library="timm")
    own = {}
    for head in heads:
        count, bottleneck = HEADS[head]
        widths = (24, 16, 16, bottleneck)
        for layer, pair in enumerate(zip(widths, widths[1:], strict=False)):
            own[f"{head}/layers/{layer}/kernel"] = rng.normal(0, 0.5, pair)
            own[f"{head}/layers/{layer}/bias"] = rng.normal(0, 0.5, pair[1:])
        own[f"{head}/prototypes"] = rng.normal(size=(bottleneck, count))
    own = {path: np.float32(array) for path, array in own.items()}
    if own:
        write_objective_files(folder, "dino", dict(prototype_lengths="one"), own, {})
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model")


def config_for(teacher, **values):
    config = config_of("dino", head_hidden=16, bottleneck=8, prototypes=12, patch_prototypes=9)
    config.objective.teacher = str(teacher)
    config.dino.update(dict(patch_weight=1.0, patch_bottleneck=6))
    config.model.update(dict(name="ViT-Ti/4", pooling="cls", **SMALL))
    plain = {"name": "adam", "weight_decay": 0.0, "learning_rate": 3e-3, "schedule": "constant"}
    config.optimizer.update(plain | {"warmup_steps": 0})
    config.batch_size, config.data.image_size, config.data.test_resize = 16, 16, 16
    config.update_from_flattened_dict(values)
    return config


def setup(teacher, **values):
    """Returns the program, its first state and a batch."""
    config = config_for(teacher, **values)
    frozen = open_frozen(config)
    mesh = make_mesh(config.mesh)
    program = make_program(config, num_classes=0, steps=10, mesh=mesh, frozen=frozen.model)
    images = np.random.default_rng(0).integers(256, size=(16, 2, 16, 16, 3), dtype=np.uint8)
    batch = to_devices({"image": images, "labels": np.full((16, 1), -1, np.int32)}, mesh)
    return program, program.initial_state(0, frozen=frozen.read()), batch


def modules(program, state):
    evaluated = program.evaluated(state)
    return nnx.merge(program.graphdef, evaluated.params), nnx.merge(
        program.objective, evaluated.objective_params
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def head_outputs(own: dict, name: str, x: np.ndarray) -> np.ndarray:
    """Returns the outputs of a head that was read from a folder, in float64."""
    x = np.float64(x)
    for layer in range(3):
        if layer:
            x = np.float64(jax.nn.gelu(x, approximate=False))
        x = (
            x @ np.float64(own[f"{name}/layers/{layer}/kernel"])
            + own[f"{name}/layers/{layer}/bias"]
        )
    prototypes = np.float64(own[f"{name}/prototypes"])
    return (
        x
        / np.linalg.norm(x, axis=-1, keepdims=True)
        @ (prototypes / np.linalg.norm(prototypes, axis=0))
    )


def test_loss_of_unmasked_views_is_the_cross_entropy_with_the_teachers_own_heads(teacher):
    program, state, batch = setup(teacher, **{"dino.teacher_temperature": 0.1})
    model, objective = modules(program, state)
    # With a frozen teacher the student sees unmasked views, so the mask token has no effect.
    objective.mask[...] += 1.0
    batch = objective.prepare(jax.device_get(batch), jax.random.split(jax.random.key(0), 16))
    found = jax.jit(
        lambda model, objective, batch: objective(
            model, batch, StepContext(None, state["objective_state"], 1)
        )
    )(model, objective, batch)
    held, loaded = open_checkpoint(teacher).objective, vit_jax.load_model(teacher, log=str)
    own = {path: np.asarray(read()) for path, read in held.sources(held.shapes()).items()}

    def see(model):
        features, tokens = objective.see(model, batch["image"], None, True)
        np.testing.assert_allclose(features, tokens_of_class(model, batch["image"]), atol=1e-5)
        return features, tokens

    def tokens_of_class(model, images):
        return np.asarray(model.features(images.reshape(-1, 16, 16, 3))).reshape(16, 2, -1)

    (features, tokens), (theirs, their_tokens) = see(model), see(loaded)
    wanted = np.exp(
        log_softmax(head_outputs(own, "head", theirs) / 0.1)
    )  # The centres are still zero.
    said = log_softmax(np.float64(objective.head(features)) / 0.1)
    pairs = -(wanted * said[:, ::-1]).sum(-1).mean(1)
    wanted = np.exp(log_softmax(head_outputs(own, "patch_head", their_tokens) / 0.1))
    said = log_softmax(np.float64(objective.patch_head(tokens)) / 0.1)
    masked = np.asarray(batch["masked"])
    patches = (-(wanted * said).sum(-1) * masked).sum((1, 2)) / masked.sum((1, 2))
    np.testing.assert_allclose(found.metrics["patch_loss"], patches, rtol=1e-4)
    np.testing.assert_allclose(found.each, pairs + patches / 2, rtol=1e-4)


def test_teacher_does_not_change_while_the_student_and_its_average_train(teacher):
    program, state, batch = setup(teacher, **{"dino.teacher_momentum": 0.5})
    first, losses = jax.device_get((state["frozen"], state["objective_state"]["teacher"])), []
    assert {"model", "heads"} == first[0].keys()
    for _ in range(12):
        state, sums = program.train_step(state, program.initial_metrics(), batch)
        losses.append(float(sums["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, first[0], jax.device_get(state["frozen"]))
    assert program.evaluated(state).params is state["objective_state"]["teacher"]
    followed = jax.device_get((first[1], state["objective_state"]["teacher"], state["params"]))
    moved, apart = (
        sum(np.abs(a - b).sum() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in ((followed[0], followed[1]), (followed[1], followed[2]))
    )
    assert apart > 0 < moved


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"dino.prototypes": 13},
            "has 12 prototypes, .*dino.prototypes=13: set prototypes=12",
        ),
        (
            {"dino.patch_prototypes": None},
            "has 9 prototypes, .*patch_prototypes=None: set patch_proto",
        ),
        ({"model.name": "ViT-Ti/8"}, "has patches 4x4, and the student 2x2"),
    ],
)
def test_a_teacher_with_other_outputs_is_refused_in_one_line(values, words, teacher):
    with pytest.raises(UserError, match="config.objective.teacher=.*" + words):
        setup(teacher, **values)


def test_a_teacher_without_the_heads_is_refused_in_one_line(tmp_path):
    bare, one = (
        write_teacher(tmp_path / "bare", heads=()),
        write_teacher(tmp_path / "one", heads=("head",)),
    )
    with pytest.raises(
        UserError, match="config.objective.teacher='.*bare' has no heads of dino: use a workdir"
    ):
        setup(bare)
    with pytest.raises(
        UserError, match="has no prototypes for patches of their own, .*patch_prototypes=9"
    ):
        setup(one)
    alone = {"dino.patch_prototypes": None}
    assert modules(*setup(one, **alone)[:2])[1].patch_head is None


def test_gram_anchoring_is_refused_with_a_frozen_teacher(teacher):
    config = config_for(teacher, epochs=1.0, **{"dino.gram": 1.0, "data.source": "digits"})
    with pytest.raises(
        UserError, match="dino.gram is 1.0 and must be 0 with .*, objective.teacher or"
    ):
        check(config)


def test_plan_counts_a_third_of_the_teacher(teacher):
    config = config_for(teacher, epochs=5.0, **{"data.source": "digits"})
    taught = make_workload(run_options(config), None).multiply_adds
    config.objective.teacher = None
    alone = make_workload(run_options(config), None).multiply_adds
    # This teacher has one layer of width 24. Without it, the teacher has the student's two layers
    # of width 16. Both cost about the same, and the heads are equal.
    assert 0.9 < taught / alone < 1.1 and taught != alone
