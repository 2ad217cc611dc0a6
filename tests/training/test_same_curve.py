"""Losses equal those of big_vision's own training step, which big_vision.py recorded."""

import json

import pytest

from tests.training import pair_curves
from tests.training.big_vision import GOLDEN, PAIRS
from tests.training.curves import CASES, draw, furthest, our_losses


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_of_60_updates_are_big_visions(name):
    golden = json.loads(GOLDEN.read_text())["cases"][name]
    values = draw({path: tuple(shape) for path, shape in golden["shapes"].items()})
    # The recorded losses are from another machine and compiler, so twice the difference is allowed.
    assert furthest(our_losses(CASES[name], values), golden["losses"]) < 2 * golden["allowed"]


@pytest.mark.slow
def test_losses_of_60_updates_on_captions_are_big_visions():
    golden = json.loads(GOLDEN.read_text())["cases"][PAIRS]
    values = pair_curves.draw({path: tuple(shape) for path, shape in golden["shapes"].items()})
    found = pair_curves.our_losses(values)
    assert furthest(found, golden["losses"]) < 2 * golden["allowed"]
