"""Figures that experiments derive from runs: similarity, weight on objects, slopes and speeds."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.ledger import speed
from vit_jax.ledger.looking import (
    Seen,
    distance_table,
    even_distance,
    nearness,
    on_objects,
    seen_in,
)
from vit_jax.ledger.study import Study
from vit_jax.ledger.tables import against, by_name, slopes


def test_nearness_distinguishes_neighbours_the_same_row_or_column_and_others():
    similarity = np.zeros((3, 3, 3, 3))
    for row, column, other_row, other_column in np.ndindex(3, 3, 3, 3):
        apart = abs(row - other_row) + abs(column - other_column)
        same_line = (row == other_row) != (column == other_column)
        similarity[row, column, other_row, other_column] = (
            1.0 if apart == 1 else 0.5 if same_line else 0.25
        )
    near = nearness(similarity)
    assert near["neighbours"] == 1.0 and near["others"] == 0.25
    # A patch has 4 others in its row and column. Of these 36 pairs, 24 are neighbours.
    assert near["one row or column"] == pytest.approx((24 * 1.0 + 12 * 0.5) / 36)


def seen(rollout, masks):
    """Returns images, masks and rollouts as needed to compute the weight on objects."""
    return Seen(
        None, np.zeros((*rollout.shape[:1], 4, 4, 3), np.uint8), masks, rollout, np.zeros((1, 1))
    )


def test_weight_on_objects_is_the_rollouts_share_that_falls_on_the_mask():
    rollout = np.array([[[0.7, 0.1], [0.1, 0.1]], [[0.25, 0.25], [0.25, 0.25]]])
    masks = np.zeros((2, 4, 4), bool)
    masks[0, :2, :2] = True  # The whole first patch.
    masks[1, 0, :3] = True  # Half of a patch and a quarter of its neighbour.
    found = on_objects(seen(rollout, masks))
    assert found["weight"] == pytest.approx([0.7, 0.25 * (0.5 + 0.25)])
    assert found["share"] == pytest.approx([4 / 16, 3 / 16])


def test_weight_on_objects_without_masks_is_none():
    assert on_objects(seen(np.full((1, 2, 2), 0.25), None)) is None


def test_uniform_attention_has_the_mean_distance_of_patches():
    model = SimpleNamespace(grid=(1, 2), image_size=(16, 32), patch_tokens=slice(1, 3))
    # The mean of the distances 0, to itself, and 16 pixels.
    assert even_distance(model) == pytest.approx(8.0)


def test_distances_table_leaves_layers_empty_that_a_model_lacks():
    figures = {"distance": {"a": [[1.0, 2.5], [3.0, 3.5]], "b": [[4.0, 4.0]]}}
    assert distance_table(figures).splitlines()[2:] == [
        "| a | 1.0 to 2.5 | 3.0 to 3.5 |",
        "| b | 4.0 to 4.0 |  |",
    ]


def test_attention_at_the_papers_scale_needs_a_checkpoint_and_images():
    with pytest.raises(UserError, match="needs --checkpoint=ViT-L_16.npz and --images=FOLDER"):
        seen_in(Study(Path("nowhere"), {"checkpoint": None, "images": None}, scale="paper"))


def test_slope_is_in_points_of_a_doubling_the_steepest_first():
    points = [
        {"what": what, "compute": compute, "few-shot": [0.5 + slope * power, 0.5 + slope * power]}
        for what, slope in (("width", 0.01), ("depth", 0.03))
        for power, compute in enumerate((1.0, 2.0, 4.0))
    ]
    words = slopes(points, "compute", "few-shot", "what")
    assert (
        words == "Points of few-shot that a doubling of compute brings: depth +3.00, width +1.00."
    )
    assert slopes(points[:1], "compute", "few-shot", "what") == ""


def test_a_value_is_compared_with_the_range_of_the_others():
    points = [
        {"kind": kind, "acc": [share]} for kind, share in (("none", 0.5), ("1d", 0.6), ("2d", 0.65))
    ]
    assert (
        against(points, "kind", "none", ["acc"])
        == "acc: none has 50.0 %, the others 60.0 to 65.0 %."
    )
    assert against(points[:1], "kind", "none", ["acc"]) == ""


def test_figures_by_name_are_a_line_each():
    assert by_name({"a": {"x": 0.51239}, "b": {"x": 2000.0}}).splitlines()[2:] == [
        "| a | 0.5124 |",
        "| b | 2,000 |",
    ]


def test_measurements_are_not_repeated(tmp_path):
    asked = []

    def how(model, size, turns):
        asked.append((model, size, turns))
        return {"speed": 10.0, "memory": 1.0}

    study = Study(tmp_path, {}, log=lambda line: None)
    rows = speed.kept(study, how, ["ViT-B/16", "ViT-H/14"], [64, 224])
    assert asked == [("ViT-B/16", 64, 5), ("ViT-B/16", 224, 5), ("ViT-H/14", 224, 5)]
    assert (
        speed.kept(study, how, ["ViT-B/16"], [64])
        == rows
        == [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()]
    )
    assert len(asked) == 3
