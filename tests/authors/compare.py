"""Compares our numbers with the authors', and writes the last result as a section of docs/."""

from pathlib import Path

import numpy as np

from tests.authors.ours import ALLOWED, Cases

GOLDEN = Path(__file__).with_name("golden.json")
PAGE = Path(__file__).parents[2] / "docs" / "self_supervised.md"
TITLE = "## Comparison with the authors' code"
Row = tuple[
    str, float, float, str
]  # The case, the largest difference, the allowed difference, and the name of the numbers.

KINDS = dict(
    schedules="learning rate, weight decay, the teacher's momentum and temperature, by update",
    warm_up="the learning rate's warm-up",
    groups="each parameter's factor on the learning rate, and whether it decays",
    first_values="standard deviation and mean absolute value of each array's first values",
    losses="DINO, iBOT, Gram anchoring, KoLeo, Sinkhorn-Knopp and MAE, of the same numbers",
)
HEAD = """
Compare recipes, schedules, parameter groups, initial values and losses with those of the authors' code:

```text needs=network
git clone https://github.com/facebookresearch/dinov2 CHECKOUTS/dinov2   # and the others below
python -m tests.authors --checkouts=CHECKOUTS --write
```

This command is run before each release. It wrote this section and `tests/authors/golden.json`, which contains
the authors' numbers; CI compares ours with them. `tests/recipes.toml` is a table of the recipes' values. For each
value it cites a line in one of these repositories. The command checks that the {citations:,} cited lines exist, and a test
compares every config with the table.

### The last result
"""
TAIL = """
A difference is relative to the largest number of its row. The warm-ups of DINO, DINOv2, DINOv3 and BEiT
reach the learning rate one update earlier than our warm-ups. In this comparison a warm-up has 200 updates, so
learning rates differ by 1/199 of the largest one. In a real run the difference is smaller.

### The commits
"""


def differences(ours: Cases, theirs: Cases) -> list[Row]:
    """Returns the largest difference of each case and bound, relative to its row's largest number.

    Initial values are random. For arrays with fewer than 10,000 numbers, their difference is
    multiplied by the root of the array's size, divided by 100. The size is the last number of a
    row. If one side lacks a row, the difference is infinite.
    """
    rows = []
    for case, expected in theirs.items():
        kind, found, far = case.rpartition(" ")[2], ours.get(case, {}), {}
        for name in found.keys() | expected.keys():
            far[name] = float("inf")
            if name in found and name in expected:
                one, other = np.asarray(found[name]), np.asarray(expected[name])
                scale = 1.0
                if kind == "first_values":
                    scale, one, other = min(1.0, other[-1] ** 0.5 / 100), one[:-1], other[:-1]
                far[name] = scale * float(np.max(np.abs(one - other)) / np.abs(other).max())
        allowed = {name: ALLOWED.get(name, ALLOWED[kind]) for name in far}
        rows += [(case, far[name], allowed[name], name) for name in _nearest(far, allowed)]
    return rows


def _nearest(far: dict[str, float], allowed: dict[str, float]) -> list[str]:
    """Returns the names of the largest differences, one for each bound."""
    alike = {
        bound: [name for name in far if allowed[name] == bound] for bound in {*allowed.values()}
    }
    return [max(names, key=far.get) for _, names in sorted(alike.items())]


def page(before: str, rows: list[Row], commits: dict[str, str], citations: int) -> str:
    """Returns the page with the last result as its last section.

    Args:
      before: the current page.
    """
    lines = ["| config | compared | largest difference | allowed |", "|---|---|---|---|"]
    for case, difference, allowed, name in rows:
        config, _, kind = case.rpartition(" ")
        what = KINDS.get(name, KINDS[kind])
        lines.append(f"| `{config}` | {what} | {difference:.1e} | {allowed:.0e} |")
    table = "\n".join(lines)
    kept = "\n".join(f"| `{repository}` | `{commit}` |" for repository, commit in commits.items())
    above = before.partition(f"\n{TITLE}\n")[0]
    below = f"{table}\n{TAIL}\n| repository | commit |\n|---|---|\n{kept}\n"
    return f"{above}\n{TITLE}\n{HEAD.format(citations=citations)}\n{below}"
