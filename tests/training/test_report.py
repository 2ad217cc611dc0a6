"""Tests of the report of a run, and of comparisons of several runs."""

import base64
import hashlib
import io
import json
import math
import re
import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, precision_recall_fscore_support

from vit_jax.config import base_config, run_options, to_json
from vit_jax.errors import UserError
from vit_jax.models import model_card, model_options
from vit_jax.options.run import RunOptions
from vit_jax.runs import predictions
from vit_jax.runs.comparison_page import comparison_page, sign_test
from vit_jax.runs.predictions import (
    Predictions,
    by_class,
    calibration,
    class_counts,
    class_figures,
    confused,
)
from vit_jax.runs.run_page import read_run, run_page, write_report
from vit_jax.runs.workdir import claim, make_manifest
from vit_jax.runs.workdir_reader import open_workdir
from vit_jax.serving.drop_page import drop_page

ROWS = [
    {"step": 50, "train/loss": 2.0, "train/accuracy": 0.3, "train/learning_rate": 1e-3},
    {"step": 100, "train/loss": 1.0, "train/accuracy": 0.6, "train/learning_rate": 2e-3},
    {"step": 100, "test/loss": 1.1, "test/accuracy": 0.5, "test/images": 4.0},
]
NAMES = ("cat", "dog", "fox")


def predictions_of(
    labels=((0,), (1,), (1,), (2,)), answer=(0, 0, 2, 2), probability=(0.9, 0.6, 0.95, 0.8), **more
):
    """Returns predictions for four images: a cat (right), two dogs (wrong) and a fox (right)."""
    found = Predictions(
        "test",
        100,
        np.arange(len(answer)),
        np.array(labels, np.int32),
        np.array(answer, np.int32),
        np.array(probability, np.float32),
    )
    images = np.random.default_rng(0).integers(256, size=(len(answer), 8, 6, 3), dtype=np.uint8)
    return found._replace(**({"shown": np.arange(len(answer)), "images": images} | more))


@pytest.fixture
def workdir(tmp_path):
    def write(rows=ROWS, found=None, names=NAMES, name="run", **changes):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = base_config()
        config.update_from_flattened_dict(
            {
                "model.name": "ViT-Ti/4",
                "data.source": "folder",
                "data.path": "/data/<pets>",
                "steps": 100,
            }
            | changes
        )
        (folder / "config.json").write_text(to_json(run_options(config)))
        model = model_options("ViT-Ti/4", num_classes=len(names), image_size=16)
        images = {"train": 3000, "test": 4}
        manifest = make_manifest(100, names, images, model, "bilinear", {"accuracy": "share"}, 1e9)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if found is not None:
            predictions.keep(folder, found)
        return folder

    return write


@pytest.fixture
def report(workdir):
    return lambda *arguments, **values: write_report(workdir(*arguments, **values)).read_text()


def test_report_is_self_contained(report):
    references = re.findall(r'(?:src|href)="([^"]+)"', report(found=predictions_of()))
    assert len(references) > 4
    assert all(reference.startswith(("data:", "#")) for reference in references)


def test_mistakes_show_the_names_of_their_files(report):
    files = np.array(["pets/cat/a.jpg", "pets/dog/b.jpg", "pets/dog/c (2).jpg", "pets/fox/d.jpg"])
    text = report(found=predictions_of(files=files))
    assert '<figcaption title="dog, predicted fox: pets/dog/c (2).jpg">' in text
    shown = re.findall("<small>(.*?)</small>", text.partition("<h2>Calibration")[0])
    assert shown == ["c (2).jpg", "b.jpg"]  # The most confident mistake first.


def test_predictions_of_earlier_versions_without_files_are_read(tmp_path):
    found = predictions_of()
    values = {name: value for name, value in found._asdict().items() if name != "files"}
    predictions.write_arrays(tmp_path / predictions.PREDICTIONS, values)
    kept = predictions.kept(tmp_path)
    assert kept.split == "test" and not len(kept.files)
    assert np.array_equal(kept.images, found.images)


def test_a_script_in_an_image_of_the_workdir_is_not_a_script_of_the_page(workdir):
    folder = workdir()
    (folder / "seen").mkdir()
    (folder / "seen" / "distance.svg").write_text(
        "<svg onload='a()'><script>alert(1)</script></svg>"
    )
    text = run_page(read_run(folder))
    assert "<script" not in text and "onload" not in text
    assert 'src="data:image/svg+xml;base64,' in text


def test_pages_forbid_scripts_but_their_own_before_anything_else_is_read(report):
    start = '<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="'
    policy = report().partition(start)[2].partition('"')[0]
    assert "default-src 'none';" in policy and "script-src" not in policy
    text = drop_page("A", "b", layer="heat")
    policy = text.partition(start)[2].partition('"')[0]
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy


def test_reports_of_runs_with_names_that_are_not_utf_8_are_written(workdir):
    folders = [workdir(name=name) for name in ("r\udce9n", "other")]
    assert write_report(folders[0]).is_file()
    text = comparison_page([read_run(folder) for folder in folders])
    assert ">r\\udce9n<" in text
    with pytest.raises(
        UserError, match=r"r\\udce9n is not UTF-8, and checkpoints can only be written"
    ):
        open_workdir(folders[0])
    with pytest.raises(UserError, match="rename the folder"), claim(folders[0], RunOptions(), {}):
        pass


def test_dollars_in_a_name_are_not_parsed_as_math(report):
    text = report(rows=[*ROWS, {"step": 100, "knn/$\\frac$/20": 0.5}])
    assert ">$\\frac$/20<" in text


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "ViT-Ti/4 trained on &lt;pets&gt;"),
        ({"data.source": "digits", "data.path": ""}, "ViT-Ti/4 trained on digits"),
        ({"data.source": "tfds", "data.path": "cifar10:/data/tfds"}, "ViT-Ti/4 trained on cifar10"),
        ({"finetune.checkpoint": "/runs/big"}, "ViT-Ti/4 fine-tuned on &lt;pets&gt;"),
        ({"objective.name": "mae"}, "ViT-Ti/4 trained by mae on &lt;pets&gt;"),
    ],
)
def test_title_has_the_model_the_method_and_the_data(report, changes, title):
    assert f"<h1>{title}</h1>" in report(**changes)


def test_metrics_have_their_standard_error(report):
    text = report()
    assert f"<td>test accuracy<td>50.00% ± {100 * math.sqrt(0.25 / 4):.2f}</tr>" in text
    assert "<td>test loss<td>1.1</tr>" in text


def test_report_has_size_cost_versions_and_command(report):
    text = report()
    assert "<td>data<td>3,000 to train, 4 to test; 3 classes" in text
    assert f"<td>computed<td>{1e9 * 100 * 4096:.3g} FLOPs in training" in text
    size = model_card("ViT-Ti/4", num_classes=3, image_size=16)
    said = (
        f"{size.parameters / 1e6:.3g} M parameters, {size.multiply_adds / 1e6:.3g} M multiply-adds"
    )
    assert f"<td>model<td>{said} for an image of 16 × 16" in text
    assert "jax 0." in text and "<pre>python " in text


def test_worst_mistake_comes_first(report):
    text = report(found=predictions_of())
    worst = text[text.index("Mistakes: 2 in 4 test images") : text.index("Confusion")]
    assert re.findall(r"✗ (\w+)</b> (\d+)%<br><span>is (\w+)", worst) == [
        ("fox", "95", "dog"),
        ("cat", "60", "dog"),
    ]


def test_image_has_the_pixels_that_were_kept(report):
    found = predictions_of()
    encoded = re.search(r'base64,([^"]+)"', report(found=found))[1]
    np.testing.assert_array_equal(
        Image.open(io.BytesIO(base64.b64decode(encoded))), found.images[2]
    )


@pytest.mark.parametrize(("size", "small"), [(8, 1), (64, 1), (224, 0)])
def test_only_small_images_show_their_pixels(report, size, small):
    found = predictions_of(shown=np.array([2]), images=np.zeros((1, size, size, 3), np.uint8))
    assert (
        report(found=found).count('<img class="small"') == 2 * small
    )  # Once as a mistake and once in the sample.


def test_matrix_and_classes_have_the_counts(report):
    text = report(found=predictions_of())
    assert "<title>dog taken for fox: 1 of 2</title>" in text
    assert re.findall(r">(\w+)</span><span>([\d.%]+, \d of \d);[^<]*</span><meter", text) == [
        ("dog", "0.0%, 0 of 2"),
        ("cat", "100.0%, 1 of 1"),
        ("fox", "100.0%, 1 of 1"),
    ]


def test_images_of_several_classes_have_no_confusion(report):
    found = predictions_of(labels=((0, 1), (1, -1), (1, 2), (2, -1)))
    text = report(found=found)
    assert "Not defined: some images are of several classes." in text and "<title>dog" not in text
    assert (
        "%, 2 of 3</span>" in text
    )  # Two of three images with a dog are correct, because another of their classes was predicted.


def test_report_of_a_run_without_labels_states_what_is_missing(report):
    text = report(rows=[*ROWS[:2], {"step": 100, "test/loss": 1.1, "test/images": 4.0}], names=())
    assert "it trains without labels" in text and "Calibration" not in text


def test_report_of_a_run_of_an_earlier_version_states_what_is_missing(report):
    assert "the run kept none" in report()


def test_damaged_predictions_are_ignored(workdir):
    folder = workdir(found=predictions_of())
    (folder / "predictions.npz").write_bytes(b"PK damaged")
    assert read_run(folder).predictions is None
    with (folder / "predictions.npz").open("wb") as file:
        np.save(file, np.zeros(3))  # A single array, without a name.
    assert read_run(folder).predictions is None


def test_damaged_worst_images_are_ignored(workdir):
    folder = workdir()
    for text in ("[", "[]", '{"title": ""}'):
        (folder / "worst_images.json").write_text(text)
        assert read_run(folder).worst is None


def test_confused_pairs_and_classes_are_those_counted_one_by_one():
    draw = np.random.default_rng(1)
    labels, answer = draw.integers(5, size=(200, 1)), draw.integers(5, size=200)
    found = predictions_of(labels, answer, draw.random(200))
    pairs, counts = confused(found)
    for (truth, other), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        assert count == sum(
            t == truth and a == other for (t,), a in zip(labels, answer, strict=True)
        )
    assert counts.sum() == (answer != labels[:, 0]).sum() and (np.diff(counts) <= 0).all()
    images, right = by_class(found, 6)
    assert images.tolist() == [(labels == c).sum() for c in range(6)]
    assert right.tolist() == [((labels[:, 0] == c) & (answer == c)).sum() for c in range(6)]


def test_calibration_error_is_the_mean_distance_of_bins():
    # The predictions in the first bin are right and wrong, those in the second wrong and right.
    found = predictions_of(probability=(0.55, 0.52, 1.0, 0.97))
    bins, error = calibration(found)
    np.testing.assert_allclose(bins[[5, 9]], [[0.535, 0.5, 2], [0.985, 0.5, 2]], rtol=1e-6)
    assert error == pytest.approx((0.035 + 0.485) / 2, rel=1e-6)


def test_curves_are_drawn_for_available_metrics(report):
    drawn = re.findall(r'aria-label="(.*?) over', report())
    assert drawn == ["Loss", "Accuracy, %", "Learning rate"]


def test_each_suite_has_a_panel_with_a_curve_for_each_metric(report):
    figures = {"knn/pets/10": 0.25, "knn/pets/20": 0.5, "probe/pets/linear probe": 0.75}
    text = report(rows=[*ROWS, {"step": 100} | figures])
    of_suites = re.findall(r'aria-label="(.*?) over', text)[3:]
    assert of_suites == [
        "k-NN on frozen features of all training images, %",
        "Linear probe on all training images, %",
    ]
    assert all(line in text for line in (">pets/10<", ">pets/20<", ">pets/linear probe<"))


def test_values_that_are_not_finite_are_skipped(report):
    rows = [*ROWS[:2], {"step": 100, "train/loss": None, "train/accuracy": None}]
    drawings = [
        re.findall("<svg.*?</svg>", report(rows=each), re.DOTALL)
        for each in (rows, ROWS[:2], ROWS[:1])
    ]
    assert drawings[0] == drawings[1] != drawings[2]


@pytest.mark.parametrize(("points", "marks"), [(1, 1), (2, 2), (3, 0)])
def test_points_of_a_curve_of_one_or_two_are_marked(report, points, marks):
    rows = [{"step": 50 * n, "train/images_per_second": 9.0} for n in range(1, points + 1)]
    (drawn,) = re.findall('<svg[^>]*aria-label="Throughput.*?</svg>', report(rows=rows), re.DOTALL)
    assert len(re.findall("<use [^>]*fill: #4c8dd6", drawn)) == marks


def test_curves_have_the_colours_of_the_page(report):
    text = report()
    assert "currentColor" in text and "#010203" not in text and "#000000" not in text


def test_config_starts_with_values_that_are_not_the_default(report):
    text = report(seed=7)
    changed, whole = text[text.index("<h2>Config") :].split("<details>")
    assert "<td>seed<td>7<td>0</tr>" in changed and "batch_size" not in changed
    assert "&#34;batch_size&#34;: 4096" in whole


def test_page_of_a_run_without_evaluation_states_that(report):
    text = report(rows=ROWS[:1])
    assert "not yet: the first comes at step 100" in text and 'aria-label="Loss' in text


def test_live_page_loads_itself_until_the_run_is_over(workdir):
    for rows, times in ((ROWS[:2], 1), (ROWS, 0)):
        assert (
            run_page(read_run(workdir(rows=rows)), live=True).count('http-equiv="refresh"') == times
        )


def test_text_is_escaped(report):
    text = report(found=predictions_of(), names=('<i>"cat"', '<i>"dog"', "fox"))
    assert "&lt;pets&gt;" in text and "<pets>" not in text and "<i>" not in text
    assert 'alt="&lt;i&gt;&#34;dog&#34;, predicted &lt;i&gt;&#34;cat&#34;"' in text


def test_report_replaces_the_previous_one_and_leaves_no_other_file(workdir):
    folder = workdir()
    first, second = (
        write_report(folder).read_text(),
        write_report(workdir(rows=ROWS[:1])).read_text(),
    )
    assert (folder / "report.html").read_text() == second != first
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "manifest.json",
        "metrics.jsonl",
        "report.html",
    }


def test_comparison_has_the_metrics_the_differences_and_the_images_of_each_run(workdir):
    better = predictions_of(answer=(0, 1, 1, 2))
    runs = [
        read_run(workdir(found=predictions_of(), name="a")),
        read_run(workdir(found=better, name="b", seed=3)),
    ]
    text = comparison_page(runs)
    assert "<h1>2 runs: ViT-Ti/4 trained on &lt;pets&gt;</h1>" in text
    assert "<tr><td>seed<td>0<td>3</tr>" in text and "batch_size" not in text
    assert "<tr><td>a<td>b<td>2<td>0<td>2<td>0<td>0.5</tr>" in text
    assert "<tr><td>dog<td>2<td>0.0%<td>100.0%</tr>" in text
    assert text.count(">a<") >= 4  # Also in the legends.


def test_comparison_names_the_differences_of_the_data(workdir):
    same = [read_run(workdir(name=name)) for name in "ab"]
    assert "The data of" not in comparison_page(same)
    other = read_run(workdir(name="c", names=("cat", "dog", "lynx")))
    other.saved.manifest["images"]["test"] = 9
    text = comparison_page([*same, other])
    assert (
        "The data of c differ from those of a: no class &#39;fox&#39;; a new class "
        "&#39;lynx&#39;; test: 4 images, and in c 9.</p>"
    ) in text
    assert "The data of b" not in text and "do not compare" in text


def test_comparison_distinguishes_runs_of_the_same_name(workdir, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    text = comparison_page([read_run(workdir(name=f"{each}/run")) for each in ("one", "two")])
    assert "<th>one/run<th>two/run" in text


def test_comparison_with_a_run_without_evaluation_states_that(workdir):
    text = comparison_page(
        [read_run(workdir(name="a")), read_run(workdir(rows=ROWS[:1], name="b"))]
    )
    assert "<tr><td>test accuracy<td>50.00% ± 25.00<td>not evaluated yet</tr>" in text
    # The metrics of a run with another objective.
    rows = [{key.replace("accuracy", "miou"): value for key, value in row.items()} for row in ROWS]
    text = comparison_page([read_run(workdir(name="c")), read_run(workdir(rows=rows, name="d"))])
    assert "<tr><td>test accuracy<td>50.00% ± 25.00<td>no such metric</tr>" in text


@pytest.mark.parametrize(
    ("one", "other", "expected"), [(0, 2, 0.5), (5, 5, 1.0), (1, 9, 22 / 1024)]
)
def test_sign_test_counts_the_splits_that_are_as_uneven(one, other, expected):
    assert sign_test(one, other) == sign_test(other, one) == pytest.approx(expected)


def test_sign_test_of_many_images_is_continuous():
    assert sign_test(470, 530) == pytest.approx(sign_test(469, 530), rel=0.1)


def test_metrics_by_class_equal_scikit_learns():
    draw = np.random.default_rng(2)
    # The last class has no images, but some predictions.
    labels = draw.choice(5, size=300, p=[0.6, 0.2, 0.1, 0.1, 0])
    answer = np.where(draw.random(300) < 0.6, labels, draw.choice([0, 1, 2, 4], size=300))
    counts = class_counts(labels[:, None], answer, 6)
    present = np.arange(4)
    expected = precision_recall_fscore_support(labels, answer, labels=present, zero_division=0)
    for found, reference in zip(
        (counts.precision, counts.recall, counts.f1), expected, strict=False
    ):
        np.testing.assert_allclose(found[:4], reference)
    # scikit-learn warns that a predicted class has no images.
    with warnings.catch_warnings(action="ignore"):
        balanced = balanced_accuracy_score(labels, answer)
    assert class_figures(counts) == pytest.approx(
        {"balanced_accuracy": balanced, "macro_f1": f1_score(labels, answer, average="macro")}
    )


def test_metrics_by_class_require_one_label_per_image():
    assert class_counts(np.array([[0, -1], [1, 2]]), np.array([0, 1])) is None
    assert class_counts(np.array([[0, -1], [-1, -1]]), np.array([0, 1])) is None


def test_report_has_precision_and_f1_of_each_class_and_classes_never_predicted(report):
    text = report(found=predictions_of(answer=(0, 0, 0, 2)))  # A dog is never predicted.
    assert "100.0%, 1 of 1; precision 33.3%, F1 50.0%" in text
    assert "0.0%, 0 of 2; never predicted" in text
    assert "Balanced accuracy 66.67%, macro F1 50.00%." in text


def test_metrics_averaged_over_classes_are_percentages_in_reports(report):
    row = ROWS[-1] | {"test/balanced_accuracy": 0.25, "test/macro_f1": 0.125}
    text = report(rows=[*ROWS[:-1], row])
    assert "test balanced accuracy<td>25.00%" in text and "test macro F1<td>12.50%" in text
