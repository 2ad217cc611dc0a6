"""The pages of the documentation, and the blocks of code on them.

The first word behind a fence is the block's language. A test runs `python` and `sh` as they stand;
`text` is no code. A block that no test can run says by a second word what it needs: `text
needs=data`.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "experiments/launch/README.md",
]
# A reader's own data or checkpoint, something that is installed or fetched, accelerators, minutes.
NEEDS = ("data", "network", "devices", "time")


class Block(NamedTuple):
    """A block of code; `needs` is empty where it needs nothing."""

    language: str
    needs: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page; with languages those of them that need nothing."""
    found = []
    for words, text in re.findall(r"(?ms)^```([^\n]*)\n(.*?)^```$", page.read_text()):
        language, _, needs = words.partition(" needs=")
        found.append(Block(language, needs, text))
    return [x for x in found if not languages or (x.language in languages and not x.needs)]
