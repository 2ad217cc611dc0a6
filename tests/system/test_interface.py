"""The Python interface: training on data in memory, passing and returning models, predictions."""

import json
import signal
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score

import vit_jax
from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.command import read_config
from vit_jax.data.sources import handed_in
from vit_jax.data.sources.digits import digits
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.runs.training_log import TrainLog
from vit_jax.runs.watchdog import Watchdog
from vit_jax.training.objectives.objective import EVALUATION, Loss, Objective

TRAIN, TEST = digits("train"), digits("test")
COUNT = 48  # The number of images per split.
LIBRARIES = "timm", "transformers"
TINY = "ViT-Ti/4"
# Images of the model's size, which are not resized.
NOISE = np.random.default_rng(0).integers(256, size=(3, 16, 16, 3), dtype=np.uint8)


def small(**values):
    """Returns the quickstart's config with three steps and a model of one layer."""
    config = read_config("configs/quickstart.py").copy_and_resolve_references().unlock()
    config.update(dict(steps=3, batch_size=16, log_every=1, evaluate_every=3))
    config.model.update(dict(dim=16, depth=1, mlp_dim=16, heads=2))
    config.update_from_flattened_dict({"optimizer.warmup_steps": 1, "checkpoint.every": 1} | values)
    return config.lock()


def arrays(source, count=COUNT):
    """Returns images and labels sorted by class, as a folder lists them."""
    order = np.argsort(source.labels[:count], kind="stable")
    return source.images[:count][order], source.labels[:count][order]


class Pairs:
    """A data set like those of torch: it has a length, and pairs by index."""

    classes = [str(digit) for digit in range(10)]

    def __init__(self, source):
        self.images, self.labels = arrays(source)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Image.fromarray(self.images[index]), int(self.labels[index])


class Rows(Pairs):
    """A data set like those of Hugging Face: rows by index, columns by name, and features."""

    column_names = ["picture", "digit"]

    def __init__(self, source):
        super().__init__(source)
        label = type("ClassLabel", (), {"names": self.classes})()
        self.features = {"picture": type("Image", (), {})(), "digit": label}

    def __getitem__(self, key):
        if key == "digit":
            return self.labels.tolist()
        image, label = super().__getitem__(key)
        return {"picture": image, "digit": label}


class Tensors(Pairs):
    """A data set of torch's tensors, as from torchvision's ToTensor: floats in [0, 1], channels
    first.
    """

    def __getitem__(self, index):
        torch = pytest.importorskip("torch")
        pixels = torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255
        return pixels, torch.tensor(int(self.labels[index]))


def losses(workdir, config=None, **data):
    """Trains, and returns the loss of each step and the final metrics of the test images."""
    rows = {}
    figures = vit_jax.train(
        config or small(),
        workdir,
        on_log=lambda step, row: rows.setdefault(step, []).append(row.get("train/loss")),
        **data,
    )
    return rows, figures


@pytest.fixture(scope="module")
def of_arrays(tmp_path_factory):
    """Returns workdir, losses and metrics of a run on arrays."""
    workdir = tmp_path_factory.mktemp("run") / "arrays"
    return workdir, *losses(workdir, train=arrays(TRAIN), test=arrays(TEST))


@pytest.fixture(scope="module")
def several_labels(tmp_path_factory):
    """Returns the workdir of a run with two labels per image: the digit and its parity.

    The classes are trained with independent sigmoids.
    """
    images, digit = arrays(TRAIN)
    labels = [[str(k), "odd" if k % 2 else "even"] for k in digit.tolist()]
    workdir = tmp_path_factory.mktemp("run") / "several"
    settings = {
        "loss.name": "sigmoid",
        "data.train_split": "train[:32]",
        "data.test_split": "train[32:]",
    }
    vit_jax.train(small(**settings), workdir, train=(images, labels))
    return workdir


def sigmoids(workdir, images):
    """Returns the sigmoid probability of each class, `[images, classes]`."""
    logits = np.asarray(vit_jax.load_model(workdir, log=str)(images), np.float64)
    return 1 / (1 + np.exp(-logits))


def test_classes_trained_by_themselves_are_predicted_by_themselves(several_labels, tmp_path):
    images = NOISE[:3]
    expected = sigmoids(several_labels, images)
    # The probabilities are not a distribution over the classes.
    assert expected.sum(axis=1).max() > 2
    model = vit_jax.load_model(several_labels, log=str)
    folders = [
        vit_jax.save_model(model, tmp_path / form, library=form, log=str) for form in LIBRARIES
    ]
    lowest = float(np.median(expected))
    for loaded in (model, *(vit_jax.load_model(folder, log=str) for folder in folders)):
        everything = loaded.predict(images, top=12)
        for found, row in zip(everything, expected, strict=True):
            order = np.argsort(-row)
            assert found.classes == tuple(model.about.class_names[k] for k in order)
            np.testing.assert_allclose(found.probabilities, row[order], atol=1e-5)
        chosen = loaded.predict(images, threshold=lowest)
        assert [len(found.classes) for found in chosen] == (expected >= lowest).sum(axis=1).tolist()
    assert str(model.predict(images[0], threshold=1.0)[0]).endswith("  (no class)")
    with pytest.raises(vit_jax.UserError, match="threshold is 50 and must be a probability"):
        model.predict(images, threshold=50)


def test_a_new_head_forgets_the_kind_of_probabilities(several_labels):
    model = vit_jax.load_model(several_labels, num_classes=4, log=str)
    np.testing.assert_allclose(model.predict(NOISE[0], top=4)[0].probabilities, 0.25)


def test_server_responses_contain_the_sigmoid_of_each_class(several_labels):
    from vit_jax.classifier import open_classifier
    from vit_jax.serving.engine import ClassifierEngine

    images = NOISE[:2]
    expected = sigmoids(several_labels, images)
    lowest = float(np.median(expected))
    engine = ClassifierEngine(open_classifier(str(several_labels), log=str), 2, 12, lowest)
    answers = engine.compute(images, [None] * len(images))
    for (probabilities, classes), row in zip(answers, expected, strict=True):
        np.testing.assert_allclose(probabilities, row[classes], atol=1e-5)
        assert sorted(classes) == np.flatnonzero(row >= lowest).tolist()


@pytest.mark.parametrize("form", ["transformers", "timm"])
def test_transformers_pipeline_returns_the_sigmoid_of_each_class(
    several_labels, tmp_path, form, transformers, timm
):
    images = NOISE[:1]
    folder = vit_jax.save_model(several_labels, tmp_path / "model", library=form, log=str)
    pipeline = transformers.pipeline("image-classification", str(folder), device="cpu", top_k=12)
    found = {answer["label"]: answer["score"] for answer in pipeline(Image.fromarray(images[0]))}
    names = vit_jax.load_model(several_labels, log=str).about.class_names
    np.testing.assert_allclose(
        [found[name] for name in names], sigmoids(several_labels, images)[0], atol=2e-3
    )


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    """Returns the folder of a random model whose channels have different means."""
    model = vit_jax.create_model(
        TINY,
        **dict(num_classes=5, image_size=16, dim=16, depth=1, heads=2, mlp_dim=16, head_std=1.0),
        **dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2)),
    )
    model.about.preprocessing = Preprocessing("square", 1.0, "bicubic")
    folder = tmp_path_factory.mktemp("coloured") / "model"
    return vit_jax.save_model(model, folder, library="timm", log=str)


def test_floats_are_checked_for_their_range(coloured):
    model = vit_jax.load_model(coloured, log=str)
    images = np.float32(NOISE)
    expected = model(NOISE)
    np.testing.assert_allclose(model(images / 127.5 - 1), expected, atol=1e-5)
    standardised = (images / 255 - np.float32(model.mean)) / np.float32(model.std)
    partly = np.where(np.arange(images.size).reshape(images.shape) == 7, np.nan, images / 127.5 - 1)
    for wrong in (images, standardised, images * np.nan, partly):
        with pytest.raises(vit_jax.UserError, match=r"floats in \[-1, 1\], not (from|NaN)"):
            model(wrong)
    with pytest.warns(UserWarning, match=r"give 2 \* images - 1, or uint8"):
        model(images / 255)
    with pytest.raises(vit_jax.UserError, match=r"beyond \[0, 1\]: pass uint8.*\(x \+ 1\) / 2"):
        model.predict(images / 127.5 - 1)
    assert model.predict(images / 255) == model.predict(NOISE)


@pytest.mark.parametrize("channels", [1, 12])
def test_a_stem_for_other_channels_gives_the_logits_of_repeated_channels(coloured, channels):
    ours = vit_jax.load_model(coloured, channels=channels, log=str)
    assert ours.mean == pytest.approx(0.5) and ours.std == pytest.approx(0.2)
    theirs = vit_jax.load_model(coloured, mean=ours.mean, log=str)
    grey = NOISE[..., :1]
    logits = np.asarray(theirs(grey.repeat(3, axis=-1)))
    np.testing.assert_allclose(ours(grey.repeat(channels, axis=-1)), logits, atol=1e-4)
    found = ours.predict(grey.repeat(channels, axis=-1), top=5)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = -np.sort(-e / e.sum(axis=1, keepdims=True))
    np.testing.assert_allclose([one.probabilities for one in found], expected, atol=1e-4)


def test_predict_of_other_channels_resizes_each_and_reads_files_in_grey(coloured, tmp_path):
    one, twelve = (vit_jax.load_model(coloured, channels=channels, log=str) for channels in (1, 12))
    Image.fromarray(NOISE[0]).save(tmp_path / "x.png")
    grey = np.asarray(Image.open(tmp_path / "x.png").convert("L"))
    assert one.predict(tmp_path / "x.png")[0].probabilities == one.predict(grey)[0].probabilities
    large = np.random.default_rng(1).integers(256, size=(40, 30, 12), dtype=np.uint8)
    parts = [np.asarray(Image.fromarray(large[..., k])) for k in range(12)]
    crop = checkpoint_crop(open_checkpoint(coloured), 16)
    seen = np.stack(
        [crop(np.repeat(part[..., None], 3, axis=-1))[..., 0] for part in parts], axis=-1
    )
    assert twelve.predict(large)[0].probabilities == twelve.predict(seen)[0].probabilities
    for wrong, words in (
        (tmp_path / "x.png", "not a PosixPath"),
        (NOISE, r"not uint8 \[16, 16, 3\]"),
    ):
        with pytest.raises(vit_jax.UserError, match=f"takes images of 12 channels: .*{words}"):
            twelve.predict(wrong)


@pytest.mark.parametrize("channels", [1, 4, 12])
def test_a_stem_for_other_channels_is_timms(coloured, channels, timm, torch):
    from timm.models import adapt_input_conv

    kernel = vit_jax.load_model(coloured, log=str).pixel_kernel[...]
    theirs = adapt_input_conv(
        channels, torch.from_numpy(np.array(kernel).transpose(3, 2, 0, 1).copy())
    )
    ours = vit_jax.load_model(coloured, channels=channels, log=str).pixel_kernel[...]
    np.testing.assert_allclose(ours, theirs.numpy().transpose(2, 3, 1, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("said", "classes", "expected"),
    [
        ({}, 3, "softmax"),
        ({}, 1, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "single_label_classification"}, 1, "softmax"),
    ],
)
def test_type_of_problem_is_the_kind_of_probabilities(said, classes, expected, tmp_path):
    model = vit_jax.create_model(
        TINY, num_classes=classes, image_size=8, dim=8, depth=1, heads=1, mlp_dim=8
    )
    folder = vit_jax.save_model(model, tmp_path / "model", library="transformers", log=str)
    config = json.loads((folder / "config.json").read_text())
    config.pop("problem_type", None)
    (folder / "config.json").write_text(json.dumps(config | said))
    assert vit_jax.load_model(folder, log=str).about.probabilities == expected


@pytest.mark.one_variant
@pytest.mark.parametrize("kind", [Pairs, Rows, Tensors])
def test_a_data_set_in_any_form_trains_as_its_arrays(kind, tmp_path, of_arrays):
    _, expected, figures = of_arrays
    assert losses(tmp_path / "run", train=kind(TRAIN), test=kind(TEST)) == (expected, figures)


@pytest.mark.slow
def test_a_folder_trains_as_its_images_handed_in(tmp_path, of_arrays):
    for split, source in (("train", TRAIN), ("test", TEST)):
        for index, (image, label) in enumerate(zip(*arrays(source), strict=True)):
            folder = tmp_path / "data" / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index:03d}.png")
    config = small(**{"data.source": "folder", "data.path": str(tmp_path / "data")})
    assert losses(str(tmp_path / "run"), config) == of_arrays[1:]


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_data_and_no_other(tmp_path, of_arrays):
    stopped = RuntimeError("stopped by the test")

    def stop(step, row):
        if step == 2:
            raise stopped

    images, labels = arrays(TRAIN)
    data = dict(train=(images, labels), test=arrays(TEST))
    with pytest.raises(RuntimeError) as raised:
        vit_jax.train(small(), tmp_path / "run", on_log=stop, **data)
    assert raised.value is stopped
    other = images.copy()
    other[7] += 1
    for train, what in (
        ((other, labels), "content of images"),
        ((images, labels[::-1].copy()), "labels"),
    ):
        with pytest.raises(
            vit_jax.UserError, match=rf"a run of other data \(training: other {what}"
        ):
            vit_jax.train(small(), tmp_path / "run", **data | {"train": train})
    rows, figures = losses(tmp_path / "run", **data)
    assert min(rows) > 1  # The run continued.
    assert figures == of_arrays[2]
    assert {step: rows[step] for step in rows} == {step: of_arrays[1][step] for step in rows}


class Stopped(Exception):
    """Represents any exception that may end a run."""


def stopped_and_continued(workdir, **handed_in):
    """Stops a run after step 2 and continues it; returns losses and metrics of the rest."""

    def stop(step, row):
        if step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        vit_jax.train(small(), workdir, on_log=stop, **handed_in)
    return losses(workdir, **handed_in)


def assert_continues(undisturbed, continued):
    rows, figures = continued
    assert 1 not in rows  # The run continued.
    assert ({step: undisturbed[0][step] for step in rows}, undisturbed[1]) == (rows, figures)


DATA = dict(train=arrays(TRAIN), test=arrays(TEST))


def model_of(num_classes=10, **values):
    sizes = dict(dim=24, depth=1, mlp_dim=16, heads=2, pooling="gap") | values
    return vit_jax.create_model("ViT-Ti/8", num_classes=num_classes, image_size=16, **sizes)


def test_a_run_starts_from_a_model_that_is_handed_in(tmp_path, of_arrays):
    model = vit_jax.load_model(of_arrays[0], log=str)
    logits = np.array(model(TEST.images[:4].repeat(2, 1).repeat(2, 2)))
    config = small(**{"optimizer.learning_rate": 1e-30})
    config.data.flip = False
    figures = vit_jax.train(config, tmp_path / "run", model=model, **DATA)
    assert figures == of_arrays[2]  # The learning rate is too small to change the parameters.
    vit_jax.train(small(), tmp_path / "trained", model=model, **DATA)
    np.testing.assert_array_equal(
        model(TEST.images[:4].repeat(2, 1).repeat(2, 2)), logits
    )  # Training does not change the model that was passed.


@pytest.mark.slow
def test_a_run_of_a_model_that_is_handed_in_goes_on_with_it_and_no_other(tmp_path):
    undisturbed = losses(tmp_path / "whole", model=model_of(), **DATA)
    continued = stopped_and_continued(tmp_path / "run", model=model_of(), **DATA)
    assert_continues(undisturbed, continued)
    assert vit_jax.load_model(tmp_path / "run", log=str).options.pooling == "gap"
    for model, what in ((model_of(head_bias=-1.0), "parameters"), (model_of(heads=1), "heads")):
        with pytest.raises(vit_jax.UserError, match=f"a run with other model .*{what}"):
            vit_jax.train(small(), tmp_path / "run", model=model, **DATA)
    with pytest.raises(vit_jax.UserError, match="the model of this run was passed"):
        config = small(**{"finetune.checkpoint": "handed_in", "model.name": ""})
        vit_jax.train(config, tmp_path / "run", **DATA)


def test_a_model_of_other_classes_is_refused(tmp_path):
    with pytest.raises(vit_jax.UserError, match="has 7 classes, and the run 10") as raised:
        vit_jax.train(small(), tmp_path / "run", model=model_of(7), **DATA)
    assert "\n" not in str(raised.value)
    with pytest.raises(vit_jax.UserError, match="must be of vit_jax.load_model"):
        vit_jax.train(small(), tmp_path / "run", model="ViT-B/16", **DATA)


class Brier(Objective):
    """An objective: the squared error of the probabilities, with an average of the parameters that
    is evaluated.
    """

    labels = True
    metrics = {"squared": "number"}

    @classmethod
    def make(cls, config, model, steps, rngs):
        return cls()

    @staticmethod
    def eval_params(config):
        return "slow"

    def initial_state(self, params):
        return {"slow": params}

    def update_state(self, memory, params, seen, update):
        return {"slow": jax.tree.map(lambda old, new: (old + new) / 2, memory["slow"], params)}

    def __call__(self, model, batch, context=EVALUATION):
        chances = jax.nn.softmax(model(batch["image"], context.rngs))
        wanted = jax.nn.one_hot(batch["labels"][:, 0], chances.shape[-1])
        error = jax.numpy.square(chances - wanted).sum(-1)
        return Loss(error, {"squared": error})


class Slow(Brier):
    """Each training step multiplies large matrices, so it ends long after it has been started."""

    def __call__(self, model, batch, context=EVALUATION):
        loss = super().__call__(model, batch, context)
        if context.rngs is None:
            return loss
        start = jnp.full((512, 512), jax.lax.stop_gradient(loss.each[0]))
        product = jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ x), start)
        return loss._replace(each=loss.each + 0 * product[0, 0])


def test_a_step_is_reported_as_done_after_the_devices_have_computed_it(tmp_path, monkeypatch):
    look, done, started, ready = TrainLog.look, Watchdog.done, {}, {}

    def looked(self, step, metrics):
        started[f"step {step}"] = metrics["steps"]
        look(self, step, metrics)

    def reported(self, what):
        if what in started:
            ready[what] = started[what].is_ready()
        done(self, what)

    monkeypatch.setattr(TrainLog, "look", looked)
    monkeypatch.setattr(Watchdog, "done", reported)
    config = small(steps=8, log_every=8, evaluate_every=8, **{"checkpoint.every": 8})
    vit_jax.train(config, tmp_path / "run", objective=Slow, **DATA)
    assert ready == {f"step {step}": True for step in range(1, 7)}


@pytest.mark.slow
def test_an_objective_that_is_handed_in_trains_and_goes_on(tmp_path):
    rows, figures = undisturbed = losses(tmp_path / "whole", objective=Brier, **DATA)
    # The ten classes are equally likely at first.
    assert rows[1][0] == pytest.approx(0.9, abs=1e-4)
    assert figures["squared"] == figures["loss"]
    assert_continues(undisturbed, stopped_and_continued(tmp_path / "run", objective=Brier, **DATA))
    model = vit_jax.load_model(tmp_path / "run", log=str)
    chances = np.array(jax.nn.softmax(model(np.stack([image_of(x) for x in arrays(TEST)[0]]))))
    errors = np.square(chances - np.eye(10)[arrays(TEST)[1]]).sum(-1)
    assert errors.mean() == pytest.approx(
        figures["loss"], abs=1e-5
    )  # The saved model has the averaged parameters.


def image_of(pixels):
    return np.asarray(Image.fromarray(pixels).resize((16, 16), Image.BILINEAR))


@pytest.mark.slow
def test_an_objective_is_only_available_in_the_call_that_received_it(tmp_path):
    vit_jax.train(small(), tmp_path / "run", objective=Brier, **DATA)
    config = small(**{"objective.name": "Brier"})
    with pytest.raises(vit_jax.UserError, match="objective.name is 'Brier' and must be"):
        vit_jax.train(config, tmp_path / "run", **DATA)
    with pytest.raises(
        vit_jax.UserError, match="another config .*objective.name: Brier -> classification"
    ):
        vit_jax.train(small(), tmp_path / "run", **DATA)


@pytest.mark.parametrize("objective", ["Brier", type("dino", (Objective,), {}), dict])
def test_other_values_than_a_new_objective_are_rejected(tmp_path, objective):
    with pytest.raises(vit_jax.UserError, match="objective"):
        vit_jax.train(small(), tmp_path / "run", objective=objective, **DATA)


@pytest.mark.slow
def test_training_restores_the_state_of_the_process(tmp_path):
    def state():
        return (
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            sys.getswitchinterval(),
            dict(jax.config.values),
            threading.active_count() if not before else before[-1],
        )

    before = ()
    losses(tmp_path / "first", train=arrays(TRAIN), test=arrays(TEST))
    before = state()
    losses(tmp_path / "second", train=arrays(TRAIN), test=arrays(TEST))
    assert state() == before


def test_a_program_may_train_in_a_thread_of_its_own(tmp_path, of_arrays):
    results = []
    data = dict(train=arrays(TRAIN), test=arrays(TEST))
    thread = threading.Thread(target=lambda: results.append(losses(tmp_path / "run", **data)))
    thread.start()
    thread.join()
    assert results == [of_arrays[1:]]


@pytest.mark.slow
def test_slices_cut_test_images_out_of_the_training_data(tmp_path):
    config = small(**{"data.train_split": "train[:75%]", "data.test_split": "train[75%:]"})
    assert losses(tmp_path / "run", config, train=arrays(TRAIN))[1]["images"] == COUNT // 4


@pytest.mark.slow
def test_labels_are_optional_where_the_objective_needs_none(tmp_path):
    config = small(**{"objective.name": "masked_patch"})
    images = arrays(TRAIN)[0]
    assert losses(tmp_path / "run", config, train=images, test=images)[1]["images"] == COUNT


IMAGES, LABELS = arrays(TRAIN, 4)


@pytest.mark.parametrize(
    "data, message",
    [
        ((IMAGES, LABELS[:3]), "4 images and 3 labels"),
        (IMAGES, "no label"),
        ((IMAGES[:0], LABELS[:0]), "are empty"),
        ((IMAGES.astype(np.float32), LABELS), r"goes beyond \[0, 1\]"),
        ((IMAGES.astype(np.int32), LABELS), "is of int32"),
        ((np.moveaxis(IMAGES, -1, 1)[:, :2], LABELS), "must be .images, height, width, channels"),
        (
            IMAGES[0, ..., :2],
            "2, and must be .images, height, width, channels. with 1, 3 or 4 channels",
        ),
        ((IMAGES, LABELS.astype(np.float32)), "not a number or a name"),
        ((IMAGES, LABELS + 2**40), "outside"),
        ({"train": Pairs(TRAIN)}, "pass one of them"),
        (iter([]), "no length"),
        ([{"picture": IMAGES[0], "label": 1}], "have no image"),
        ([{"image": IMAGES[0], "a": 1, "b": 2}], "choose the label's"),
        ([(IMAGES[0], "cat"), (IMAGES[0], 3)], "both numbers and names"),
    ],
)
def test_invalid_data_sets_raise_a_one_line_error(data, message):
    with pytest.raises(vit_jax.UserError, match=message) as raised:
        handed_in(data, "train")
    assert "\n" not in str(raised.value)


def test_a_data_set_that_augments_at_random_is_refused():
    class Random(Pairs):
        def __getitem__(self, index):
            return np.random.default_rng().integers(256, size=(8, 8, 3), dtype=np.uint8), 1

    with pytest.raises(vit_jax.UserError, match="give another image each time"):
        handed_in(Random(TRAIN), "train")


def test_class_names_are_those_of_the_data_set():
    assert handed_in(Rows(TRAIN), "train").class_names == tuple(Pairs.classes)
    named = handed_in((IMAGES, np.array(["dog", "cat", "cat", "emu"])), "train")
    assert named.class_names == ("cat", "dog", "emu")
    assert named.labels[:, 0].tolist() == [1, 0, 0, 2]


@pytest.mark.slow
def test_predictions_are_those_of_the_command(of_arrays, tmp_path, run):
    workdir = of_arrays[0]
    for index in range(5):
        Image.fromarray(TEST.images[index]).resize((20, 13)).save(tmp_path / f"{index}.png")
    model = vit_jax.load_model(workdir, log=str)
    predictions = model.predict(tmp_path)
    done = run(f"--checkpoint={workdir}", "--json", tmp_path, module="vit_jax.predict")
    for line, prediction in zip(done.stdout.splitlines(), predictions, strict=True):
        said = json.loads(line)
        assert said["path"] == prediction.image
        assert [one["class"] for one in said["predictions"]] == list(prediction.classes)
        np.testing.assert_allclose(
            [one["probability"] for one in said["predictions"]], prediction.probabilities, atol=1e-6
        )


def test_images_may_be_handed_in_any_way(of_arrays, tmp_path):
    model = vit_jax.load_model(of_arrays[0], log=str)
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, image in zip(paths, TEST.images, strict=False):
        Image.fromarray(image).save(path)
    expected = [prediction.probabilities for prediction in model.predict(TEST.images[:3])]
    for images in (tmp_path, paths, [Image.open(path) for path in paths], list(TEST.images[:3])):
        assert [prediction.probabilities for prediction in model.predict(images)] == expected
    assert [x.probabilities for x in model.predict(TEST.images[:3].tolist())] == expected
    assert [x.probabilities for x in model.predict(TEST.images[0].tolist())] == expected[:1]
    (alone,) = model.predict(TEST.images[0], top=20)
    assert len(alone.classes) == 10
    np.testing.assert_allclose(sum(alone.probabilities), 1, rtol=1e-5)


def test_an_image_with_its_channels_first_is_refused(of_arrays):
    model = vit_jax.load_model(of_arrays[0], log=str)
    (alone,), (of_jax,) = (
        model.predict(image) for image in (TEST.images[0], jnp.asarray(TEST.images[0]))
    )
    assert of_jax == alone
    with pytest.raises(
        vit_jax.UserError, match="3 grey images, or one with its channels first; give"
    ):
        model.predict(TEST.images[0].transpose(2, 0, 1))


def test_a_tensor_of_pytorch_is_one_image_with_its_channels_first_or_last(of_arrays, torch):
    model = vit_jax.load_model(of_arrays[0], log=str)
    image = TEST.images[0]
    (alone,) = model.predict(image)
    for tensor in (torch.tensor(image), torch.tensor(image.transpose(2, 0, 1))):
        assert model.predict(tensor) == [alone]


def test_a_saved_model_predicts_the_same(of_arrays, tmp_path):
    model = vit_jax.load_model(of_arrays[0], log=str)
    images = np.random.default_rng(0).integers(256, size=(2, 16, 16, 3), dtype=np.uint8)
    for path in (tmp_path / "folder", tmp_path / "model.npz"):
        assert vit_jax.save_model(model, path) == path
        saved = vit_jax.load_model(path, log=str)
        np.testing.assert_array_equal(saved(images), model(images))
    assert vit_jax.load_model(tmp_path / "folder", log=str).about.class_names == tuple(
        Pairs.classes
    )
    with pytest.raises(vit_jax.UserError, match="exists"):
        vit_jax.save_model(model, tmp_path / "folder")


def test_a_model_prints_as_a_card(of_arrays):
    model = vit_jax.load_model(of_arrays[0], log=str)
    lines = str(model).splitlines()
    assert len(lines) <= 12 and repr(model) == str(model)
    assert str(of_arrays[0]) in str(model)
    assert len(model.tree().splitlines()) > 5 * len(lines)


def test_a_fresh_model_predicts_nothing():
    with pytest.raises(vit_jax.UserError, match="load_model"):
        vit_jax.create_model("ViT-mu/16", num_classes=2, image_size=16).predict(IMAGES)


def test_dir_shows_the_public_names():
    assert {*vit_jax.__all__} <= {*dir(vit_jax)}
    assert all(getattr(vit_jax, name) is not None for name in vit_jax.__all__)


def test_run_on_unequal_classes_reports_balanced_accuracy_and_classes_never_predicted(
    tmp_path, capsys
):
    test = arrays(TEST, 200)
    # Class 3 has more test images than the others.
    kept = np.flatnonzero((test[1] == 3) | (np.arange(200) % 4 == 0))
    test = test[0][kept], test[1][kept]
    training = np.flatnonzero(TRAIN.labels[:300] != 7)  # Only two images of class 7.
    training = np.r_[training, np.flatnonzero(TRAIN.labels == 7)[:2]]
    images = TRAIN.images[training], TRAIN.labels[training]
    config = small(**{"loss.class_weights": "sqrt"})
    found = vit_jax.train(config, tmp_path / "run", train=images, test=test)
    kept = np.load(tmp_path / "run/predictions.npz")
    labels, answer = kept["labels"][:, 0], kept["answer"]
    with warnings.catch_warnings(action="ignore"):  # A class without images is predicted.
        assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, answer))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, answer, average="macro"))
    log = (tmp_path / "run/log.txt").read_text()
    assert f"test balanced accuracy {found['balanced_accuracy']:.2%} | test macro F1" in log
    counts = np.bincount(labels)
    never = [
        f"{label} (0 of {counts[label]})" for label in np.unique(labels) if label not in answer
    ]
    assert never and f"note: never predicted in the test images: {', '.join(never)}" in log
