"""Tests of the suites `zero_shot` and `retrieval` on a small run with both towers."""

import csv
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import name_missing_operators
from tests.training.objectives.test_contrastive import COLOURS, pairs, small_config
from vit_jax.config import base_config
from vit_jax.data.sources import data_set, open_source
from vit_jax.errors import UserError
from vit_jax.evaluation.suite_zero_shot import class_names_of, parse_templates
from vit_jax.evaluation.suites import SUITES
from vit_jax.published.prompts import imagenet_prompts
from vit_jax.run_suites import run_suites
from vit_jax.runs.retrievals import kept_retrievals

TEMPLATES = ("a {} square", "it is {}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Writes 27 images into a folder for each colour, and a list with two captions per image."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for number, (image, texts) in enumerate(zip(*pairs(27, 2), strict=True)):
        name = texts[0].split()[1]
        (folder / "colours" / name).mkdir(parents=True, exist_ok=True)
        file = f"colours/{name}/{number}.png"
        Image.fromarray(image).save(folder / file)
        rows += [(file, f"{text} {number % 20}") for text in texts]
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "caption"), *rows])
    (folder / "templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Trains a run that evaluates the suite `zero_shot` at its end."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    config = small_config("softmax")
    config.steps = config.evaluate_every = 20
    config.evaluate.suites = ("zero_shot", "retrieval")
    sets = (f"set=folder:{data}/colours", f"templates={data}/templates.txt")
    config.evaluate.options = sets
    config.data.workers = 0
    with pytest.raises(UserError, match="cannot open retrieval, .*colours.* no captions"):
        vit_jax.train(config, workdir, train=pairs(64, 0), test=pairs(32, 1))
    config.evaluate.suites = ("zero_shot",)
    vit_jax.train(config, workdir, train=pairs(64, 0), test=pairs(32, 1))
    return workdir


def evaluated(run, suite: str, text: str, out, **options) -> dict:
    found = run_suites(
        run,
        [suite],
        out,
        options={"set": [data_set(text)], **options},
        batch_size=8,
        workers=0,
        log=str,
    )
    return {name: row for (_, name), row in found.rows.items()}


def read(data):
    """Returns the images of the list in its order, their classes, and their captions."""
    with open(data / "pairs.csv") as file:
        rows = list(csv.reader(file))[1:]
    files = list(dict.fromkeys(file for file, _ in rows))
    captions = [[text for name, text in rows if name == file] for file in files]
    return [str(data / file) for file in files], [file.split("/")[1] for file in files], captions


def test_zero_shot_accuracy_is_that_of_the_classifier(run, data, tmp_path):
    files, classes, _ = read(data)
    names = sorted(COLOURS)
    model = vit_jax.load_image_text(run, log=str)
    for templates in (TEMPLATES, ("a photo of a {}.",)):
        predictions = model.classifier(names, templates).predict(files)
        right = [p.classes[0] == name for p, name in zip(predictions, classes, strict=True)]
        out = tmp_path / templates[0]
        rows = evaluated(run, "zero_shot", f"folder:{data}/colours", out, templates=templates)
        assert rows["colours, top-1"].accuracy == pytest.approx(np.mean(right))
        assert rows["colours, top-1"].images == 27
        assert rows["colours, top-5"].accuracy == 1  # There are only three classes.


def test_evaluation_in_training_equals_the_commands(run, data, tmp_path):
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    rows = evaluated(run, "zero_shot", f"folder:{data}/colours", tmp_path, templates=TEMPLATES)
    assert f'"zero_shot/colours/top-1": {rows["colours, top-1"].accuracy}' in last
    assert "zero-shot accuracy on colours | top-1: " in (run / "log.txt").read_text()


def test_the_report_shows_the_worst_ranked_captions_first(run):
    text = (run / "report.html").read_text()
    assert "Captions and their most similar images" in text
    assert 'href="zero_shot_colours.html"' in text
    assert "Accuracy by class" in (run / "zero_shot_colours.html").read_text()
    found = kept_retrievals(run)
    images, texts = pairs(32, 1)
    model = vit_jax.load_image_text(run, log=str)
    first = [each[0] for each in texts]
    scores = np.asarray(model.encode_text(list(found.captions))) @ model.encode_image(images).T
    for caption, rank, row, own, best in zip(
        found.captions, found.ranks, scores, found.right, found.found, strict=True
    ):
        right = np.array([text == caption for text in first])
        assert rank == 1 + (row[~right] > row[right].max()).sum()
        assert row[own] == row[right].max()
        assert row[best].tolist() == sorted(row.tolist(), reverse=True)[: len(best)]
        assert caption in text
    mistakes = found.ranks[: found.mistakes].tolist()
    assert mistakes == sorted(mistakes, reverse=True)
    assert found.wrong == len([rank for rank in mistakes if rank > 1]) == found.mistakes


def test_retrieval_writes_a_page(run, data, tmp_path):
    evaluated(run, "retrieval", f"csv:{data}/pairs.csv", tmp_path)
    text = (tmp_path / "retrieval_pairs.html").read_text()
    assert "Captions and their most similar images" in text
    assert "of 27" in text


def test_retrieval_compares_all_captions(run, data, tmp_path):
    files, _, captions = read(data)
    model = vit_jax.load_image_text(run, log=str)
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    images = np.asarray(model.encode_image(pixels))
    listed = [text for each in captions for text in each]
    scores = images @ np.asarray(model.encode_text(listed)).T
    right = np.array([[text in each for text in listed] for each in captions])
    rows = evaluated(run, "retrieval", f"csv:{data}/pairs.csv", tmp_path)
    assert len({*listed}) < len(listed) == 54  # Some captions belong to two images.
    for k in (1, 5, 10):
        for way, similarity, own in (
            ("image to text", scores, right),
            ("text to image", scores.T, right.T),
        ):
            order = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
            share = np.take_along_axis(own, order, axis=1).any(axis=1).mean()
            assert rows[f"pairs, {way}, recall@{k}"].accuracy == pytest.approx(share)
    assert f"54 captions, {len({*listed})} of them distinct" in rows[f"pairs, {way}, recall@1"].note


def test_captions_are_read_from_the_column_of_the_run(data, tmp_path):
    text = (data / "pairs.csv").read_text().replace("file,caption", "file,words,caption", 1)
    lines = [text.splitlines()[0], *(f"{line},other" for line in text.splitlines()[1:])]
    (data / "words.csv").write_text("\n".join(lines))
    config = small_config("softmax")
    config.steps = config.evaluate_every = 1
    config.optimizer.warmup_steps = 0
    config.data.caption_key, config.data.workers = "words", 0
    config.evaluate.suites = ("retrieval",)
    config.evaluate.options = (f"set=csv:{data}/words.csv",)
    vit_jax.train(config, tmp_path / "run", train=pairs(64, 0), test=pairs(32, 1))
    row = evaluated(tmp_path / "run", "retrieval", f"csv:{data}/words.csv", tmp_path / "out")
    (found,) = (value for name, value in row.items() if name.endswith("image to text, recall@5"))
    assert found.note.startswith("54 captions, ") and found.accuracy < 1
    # For data without this column, the captions are read from the usual column.
    row = evaluated(tmp_path / "run", "retrieval", f"csv:{data}/pairs.csv", tmp_path / "usual")
    assert all(value.accuracy is not None for value in row.values()), row


def test_labels_are_read_from_the_column_of_label_key(run, data, tmp_path):
    files = sorted((data / "colours").rglob("*.png"))
    rows = [f"{file},{file.parent.name},{number}" for number, file in enumerate(files)]
    (data / "kinds.csv").write_text("\n".join(["file,kind,number", *rows]))
    text = f"csv:{data}/kinds.csv@all[:50%],all"
    rows = evaluated(run, "zero_shot", text, tmp_path, label_key="kind")
    assert rows["kinds, top-1"].accuracy is not None, rows["kinds, top-1"].note
    rows = evaluated(run, "knn", text, tmp_path, label_key="kind", neighbours=[1])
    assert rows["kinds, 1-NN"].accuracy > 0.4, rows["kinds, 1-NN"].note


@pytest.mark.parametrize(
    ("suite", "text", "options", "words"),
    [
        ("knn", "csv:{}/several.csv", {"label_key": "kind"}, "column 'kind': .* --label_key=NAME"),
        (
            "knn",
            "csv:{}/pairs.csv@a,b",
            {"label_key": "caption"},
            "--set=KIND:PATH@all.:80%.,all.80%",
        ),
        ("knn", "folder:{}/colours@dev,test", {}, r"\(--set=KIND:PATH and the split's name\)"),
        ("retrieval", "digits:", {}, r"captions \(--set=csv:PATH\)"),
        ("retrieval", "digits:", {}, "the test data have no captions"),
        ("retrieval", "folder:{}/colours", {}, "no captions"),
        ("retrieval", "csv:{}/several.csv", {}, "no column 'caption': .* with --caption_key=NAME"),
        ("zero_shot", "csv:{}/pairs.csv", {}, "has no column 'label'.*there are: caption"),
        ("zero_shot", "digits:", {"names": ("a", "b")}, "--names has 2 .*, and digits 10 classes"),
        ("zero_shot", "folder:{}/colours", {"names": ("a", "a", "b")}, "'a' and 'a' have the same"),
        ("zero_shot", "digits:", {"names": "imagenet"}, "class '0', which is no synset"),
        ("zero_shot", "csv:{}/several.csv", {}, "several: image 0 has 2 labels"),
    ],
)
def test_unsuitable_data_are_a_row_with_a_one_line_reason(
    suite, text, options, words, run, data, tmp_path, monkeypatch
):
    file = next((data / "colours").rglob("*.png"))
    (data / "several.csv").write_text(f"file,label,label2\n{file},a,b\n{file.parent}/x.png,a,\n")
    Image.open(file).save(file.parent / "x.png")
    monkeypatch.setattr("vit_jax.evaluation.suite.Extractor", None)  # Nothing is compiled.
    rows = evaluated(run, suite, text.format(data), tmp_path, **options)
    (file.parent / "x.png").unlink()
    assert all(row.accuracy is None for row in rows.values())
    with pytest.raises(UserError, match=words):
        raise UserError(*{row.note for row in rows.values()})


def test_a_model_without_text_tower_is_a_row_with_a_one_line_reason(tmp_path):
    model = vit_jax.create_model("ViT-mu/16", image_size=32, num_classes=10)
    vit_jax.save_model(model, tmp_path / "image.npz", log=str)
    rows = evaluated(tmp_path / "image.npz", "zero_shot", "digits:", tmp_path / "out")
    assert "has no text tower" in rows["digits, top-1"].note


def test_a_command_that_measures_nothing_fails_with_one_line(tmp_path):
    """The reason is the same for all rows and is logged once."""
    model = vit_jax.create_model("ViT-mu/16", image_size=32, num_classes=10)
    vit_jax.save_model(model, tmp_path / "image.npz", log=str)
    arguments = "--checkpoint=image.npz", "--suite=zero_shot", "--set=digits:", "--out=out"
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.evaluate", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nothing was evaluated: image.npz: the checkpoint has no text t")
    assert "\ndigits, top-1, digits, top-5: image.npz: the checkpoint has no text" in done.stdout
    assert (tmp_path / "out" / "results.md").is_file()


def test_a_run_without_text_tower_is_rejected_before_it_starts(tmp_path):
    config = base_config()
    config.data.update(dict(source="digits", image_size=8, test_resize=8, crop="none"))
    config.model.update(dict(name="ViT-32x1/4", heads=2))
    config.batch_size, config.steps = 16, 2
    config.evaluate.suites = ("zero_shot",)
    config.evaluate.options = ("set=digits:",)
    with pytest.raises(UserError, match="objective.name='classification' has no text tower"):
        vit_jax.train(config, tmp_path / "run")


def test_templates_are_one_template_or_a_file(tmp_path):
    (tmp_path / "templates.txt").write_text("a photo of a {}.\n\na drawing of a {}\n")
    assert parse_templates("it's {}!") == ("it's {}!",)
    assert parse_templates(str(tmp_path / "templates.txt")) == (
        "a photo of a {}.",
        "a drawing of a {}",
    )


def test_templates_without_a_placeholder_for_the_name_are_rejected(tmp_path):
    (tmp_path / "templates.txt").write_text("a photo of a {}.\na photo\n")
    with pytest.raises(UserError, match="template 'a photo' has no {}"):
        parse_templates(str(tmp_path / "templates.txt"))
    with pytest.raises(UserError, match="cannot read --templates=.*nowhere"):
        parse_templates(str(tmp_path / "nowhere"))


def test_prompts_of_imagenet_are_80_templates_and_1000_names():
    templates, names = imagenet_prompts()
    assert (len(templates), len(names), len({*names})) == (80, 1000, 998)
    assert all(template.count("{}") == 1 for template in templates)
    assert (names[0], names[-1]) == ("tench", "toilet paper")
    assert (
        parse_templates("imagenet")
        == templates
        == SUITES["zero_shot"].options["templates"].parse("imagenet")
    )


@pytest.mark.slow
def test_prompts_of_imagenet_are_those_of_open_clip():
    name_missing_operators(pytest.importorskip("torch"))
    theirs = pytest.importorskip("open_clip.zero_shot_metadata")
    templates, names = imagenet_prompts()
    assert names == tuple(theirs.IMAGENET_CLASSNAMES)
    expected = [template("tench") for template in theirs.OPENAI_IMAGENET_TEMPLATES]
    assert [template.replace("{}", "tench") for template in templates] == expected


def test_synsets_and_underscores_become_names(tmp_path):
    for name in ("n01440764", "n02114367", "a_red-car"):
        (tmp_path / "all" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "all" / name / "0.png")
    source = open_source("folder", "all", path=str(tmp_path / "all"))
    assert class_names_of(source, (), "x")[0] == ["a red-car", "n01440764", "n02114367"]
    (tmp_path / "all" / "a_red-car" / "0.png").unlink()
    (tmp_path / "all" / "a_red-car").rmdir()
    source = open_source("folder", "all", path=str(tmp_path / "all"))
    assert class_names_of(source, (), "x") == (["tench", "grey wolf"], "CLIP's class names")
