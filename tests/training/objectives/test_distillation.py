"""Tests of distillation: the loss is the paper's, and no step changes the frozen teacher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.training.objectives.small import SMALL, config_of, noisy
from vit_jax.config import run_options
from vit_jax.errors import UserError
from vit_jax.models import abstract, count_multiply_adds, create_model, model_factory
from vit_jax.parallel.mesh import make_mesh, to_devices
from vit_jax.planning.estimate import make_workload
from vit_jax.runs.checkpoints import as_items
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.runs.memory_check import needs_of
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.objective import EVALUATION, StepContext
from vit_jax.training.program import make_program

CLASSES, SIZE = 5, 8
TEACHER = dict(image_size=SIZE, dim=32, depth=2, mlp_dim=32, heads=2, mean=0.3, std=0.2)


def saved(model, folder, library="timm"):
    """Saves a model with noise added to all parameters, and returns its folder."""
    vit_jax.save_model(noisy(model, 2, 0.2), folder, library=library)
    return str(folder)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> str:
    model = vit_jax.create_model("ViT-Ti/4", num_classes=CLASSES, **TEACHER)
    return saved(model, tmp_path_factory.mktemp("teacher") / "model")


def config_for(teacher: str | None, **values):
    config = config_of("distillation")
    config.model.update(dict(name="ViT-Ti/4", **SMALL))
    config.batch_size, config.data.image_size, config.data.test_resize = 16, SIZE, SIZE
    config.data.flip = False
    config.optimizer.update(dict(warmup_steps=0, learning_rate=1e-2))
    config.update_from_flattened_dict({"objective.teacher": teacher} | values)
    return config


def batch_of(images: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=(images, 1)).astype(np.int32)
    return {
        "image": rng.integers(256, size=(images, SIZE, SIZE, 3), dtype=np.uint8),
        "labels": labels,
    }


def stepped(teacher: str, steps: int = 2, devices=None, **values):
    """Returns the program, the state before and after some steps, and the summed metrics."""
    config = config_for(teacher, **values)
    frozen = open_frozen(config)
    mesh = make_mesh(config.mesh, devices)
    program = make_program(config, num_classes=CLASSES, steps=10, mesh=mesh, frozen=frozen.model)
    state, sums = program.initial_state(0, frozen=frozen.read()), program.initial_metrics()
    first = jax.device_get(state)
    for _ in range(steps):
        state, sums = program.train_step(state, sums, to_devices(batch_of(), mesh))
    del sums["skipped"]
    return program, first, state, jax.device_get(sums)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def student_of(**values):
    """Returns a student whose heads have random parameters, different in each head."""
    student = create_model("ViT-Ti/4", num_classes=CLASSES, image_size=SIZE, **SMALL | values)
    rng = np.random.default_rng(3)
    for head in filter(None, (student.head, student.distillation_head)):
        nnx.update(head, jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape), nnx.state(head)))
    return student


@jax.jit
def logits_of_heads(student, images):
    """Returns the logits of the class token's head and of the distillation token's head.

    The model averages both heads, so one head's logits are twice the model's output with the other
    head set to zero.
    """
    if student.distillation_head is None:
        return 2 * (student(images),)
    other = nnx.clone(student)
    for muted in (student.distillation_head, other.head):
        nnx.update(muted, jax.tree.map(jnp.zeros_like, nnx.state(muted)))
    return 2 * student(images), 2 * other(images)


@pytest.mark.parametrize(
    ("kind", "heads"), [("soft", "none"), ("soft", "heads"), ("hard", "token"), ("hard", "heads")]
)
def test_loss_is_the_papers(teacher, kind, heads):
    share, heat = 0.3, 2.0
    values = dict(kind=kind, teacher_weight=share, temperature=heat)
    student = student_of(distillation=heads)
    taught = vit_jax.load_model(teacher, log=str)
    config = config_of("distillation", teacher=teacher, **values)
    objective = make_objective(config, student, rngs=nnx.Rngs(0), frozen=taught)

    @jax.jit
    def compute(student, taught, objective, batch):
        objective.frozen = taught
        found = objective(student, batch, StepContext(nnx.Rngs(dropout=0)))
        tested = objective(student, batch, EVALUATION).each
        return found, tested, taught(batch["image"]), *logits_of_heads(student, batch["image"])

    batch = batch_of()
    found, tested, *logits = compute(student, taught, objective, batch)
    theirs, own, learnt = map(np.asarray, logits)
    ours = (own + learnt) / 2
    rows, labels = np.arange(16), batch["labels"][:, 0]
    plain = -log_softmax(own)[rows, labels]
    if kind == "hard":
        taken = -log_softmax(learnt)[rows, theirs.argmax(-1)]
    else:
        p, q = log_softmax(theirs / heat), log_softmax(learnt / heat)
        taken = heat**2 * (np.exp(p) * (p - q)).sum(-1)
    np.testing.assert_allclose(
        found.each, (1 - share) * plain + share * taken, rtol=1e-4, atol=1e-5
    )
    assert len({*theirs.argmax(-1)}) > 1
    np.testing.assert_array_equal(found.metrics["agreement"], ours.argmax(-1) == theirs.argmax(-1))
    np.testing.assert_array_equal(found.metrics["teacher_accuracy"], theirs.argmax(-1) == labels)
    np.testing.assert_allclose(tested, -log_softmax(ours)[rows, labels], rtol=1e-4, atol=1e-5)
    assert (heads == "heads") == bool(np.abs(own - learnt).max() > 0.1)


@pytest.mark.slow
def test_teacher_uses_its_checkpoints_normalization_and_no_step_changes_it(teacher):
    _, first, state, sums = stepped(teacher)
    frozen = {x.shape for x in jax.tree.leaves(state["frozen"])}
    assert frozen and not frozen & {
        x.shape for x in jax.tree.leaves(as_items(state, sums)) if x.ndim > 1
    }
    jax.tree.map(np.testing.assert_array_equal, first["frozen"], jax.device_get(state["frozen"]))
    labels = batch_of()["labels"][:, 0]
    said = jax.jit(lambda model, images: model(images))
    right = (
        np.asarray(said(vit_jax.load_model(teacher, log=str), batch_of()["image"])).argmax(-1)
        == labels
    )
    assert (
        sums["teacher_accuracy"] / sums["steps"] == pytest.approx(right.mean())
        and 0 < right.mean() < 1
    )
    changed = jax.tree.map(
        lambda a, b: (a != b).any(), first["params"], jax.device_get(state["params"])
    )
    assert any(jax.tree.leaves(changed))


@pytest.mark.slow
@pytest.mark.parametrize("once", ["as_computed", "float32_once"])
def test_micro_batches_change_no_loss(teacher, once):
    *_, one = stepped(teacher)
    *_, several = stepped(teacher, micro_batches=2, **{"optimizer.sum_gradients": once})
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=1e-5, err_msg=name)


OTHERS = {
    "BiT-R50x1": ("transformers", dict(resnet_blocks=(1, 1), resnet_epsilons="timm")),
    "ConvNeXt-T": ("timm", dict(blocks=(1, 1), widths=(16, 32))),
    "Swin-T": ("timm", dict(dim=32, blocks=(1, 1), stage_heads=(2, 2), window=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_teacher_of_another_family_gets_the_students_pixels_at_the_students_size(name, tmp_path):
    library, values = OTHERS[name]
    values |= dict(num_classes=CLASSES, image_size=32, mean=0.3, std=0.2)
    model = vit_jax.create_model(name, **values)
    taught = saved(model, tmp_path / "teacher", library)
    frozen = open_frozen(config_for(taught, **{"data.image_size": 64, "data.test_resize": 64}))
    kept = nnx.merge(nnx.graphdef(frozen.model), jax.tree.map(jnp.asarray, frozen.read()))
    images = np.random.default_rng(0).integers(256, size=(2, 64, 64, 3), dtype=np.uint8)
    said = jax.jit(lambda model, images: model(images))
    np.testing.assert_allclose(
        said(kept, images), said(model.resized(64), images), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_teacher_in_bfloat16_has_its_checkpoints_bfloat16_outputs(teacher):
    frozen = open_frozen(config_for(teacher, **{"objective.teacher_dtype": "bfloat16"}))
    graphdef, said = nnx.graphdef(frozen.model), jax.jit(lambda model, images: model(images))
    kept = nnx.merge(graphdef, jax.tree.map(jnp.asarray, frozen.read()))
    loaded = vit_jax.load_model(teacher, log=str, dtype="bfloat16")
    images = batch_of()["image"]
    np.testing.assert_array_equal(said(kept, images), said(loaded, images))
    whole, half = (
        sum(x.nbytes for x in jax.tree.leaves(read))
        for read in (open_frozen(config_for(teacher)).read(), frozen.read())
    )
    assert half < 0.65 * whole


def test_memory_and_plan_count_the_teacher(teacher):
    program, first, *_ = stepped(teacher, steps=0, devices=jax.devices()[:1])
    config = config_for(
        teacher, epochs=5.0, **{"data.source": "digits", "data.num_classes": CLASSES}
    )
    held = sum(x.nbytes for x in jax.tree.leaves((first["params"], first["frozen"])))
    assert needs_of(program, config, 1).parameters == held
    student = abstract(model_factory("ViT-Ti/4", num_classes=CLASSES, image_size=SIZE, **SMALL))
    theirs = count_multiply_adds(open_frozen(config).model)
    assert (
        make_workload(run_options(config), None).multiply_adds
        == count_multiply_adds(student) + theirs / 3
    )
    assert program.flops() == 6 * make_workload(run_options(config), None).multiply_adds


def refused(message: str, teacher: str | None, **values) -> None:
    config = config_for(teacher, **values)
    with pytest.raises(UserError, match=message):
        frozen = open_frozen(config, tuple("abcde"))
        make_program(
            config, num_classes=CLASSES, steps=2, mesh=make_mesh(config.mesh), frozen=frozen.model
        )


def test_unsuitable_teachers_are_refused_in_one_line(teacher, tmp_path):
    def other(name, classes, **values):
        made = vit_jax.create_model("ViT-Ti/4", num_classes=classes, **TEACHER | values)
        return saved(made, tmp_path / name)

    refused("learns from a frozen model: give config.objective.teacher", None)
    refused("objective.teacher='/nowhere': there is no /nowhere", "/nowhere")
    refused("objective.teacher=.* has 7 classes, and the data 5", other("seven", 7))
    refused(
        "objective.teacher=.* is not a classifier: it has features, but no head",
        other("headless", 0),
    )
    refused(
        "objective.teacher=.* does not divide the image of 10x10",
        teacher,
        **{"data.image_size": 10},
    )
    refused("compares distributions .*loss.name='softmax'", teacher, **{"loss.name": "sigmoid"})
    refused(
        "objective.teacher is .*classification' uses no teacher",
        teacher,
        **{"objective.name": "classification"},
    )
