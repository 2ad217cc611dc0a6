"""Our schedules, parameter groups, initial values and losses equal the authors', in golden.json."""

import json

import pytest

from tests.authors import ours
from tests.authors.compare import GOLDEN, differences

pytestmark = pytest.mark.slow  # Each test starts processes or compiles for seconds.

THEIRS = json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("case", THEIRS)
def test_numbers_equal_those_of_the_authors_code(case):
    name, _, kind = case.rpartition(" ")
    made = ours.losses() if kind == "losses" else getattr(ours, kind)(name)
    for _, difference, allowed, where in differences({case: made}, {case: THEIRS[case]}):
        assert difference <= allowed, (
            f"{where}: ours {made.get(where)}, the authors' {THEIRS[case].get(where)}"
        )
