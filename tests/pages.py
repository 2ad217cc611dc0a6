"""The pages of the documentation and their blocks of code.

The first word after a fence is the language of the block. Tests run blocks of `python` and `sh` as
they are. Blocks of `text` are not code. If tests cannot run a block, its second word names the
reason: `text needs=data`.
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
# The reader's own data or checkpoint, an installation or a download, accelerators, minutes of time.
NEEDS = ("data", "network", "devices", "time")


class Block(NamedTuple):
    """A block of code; `needs` is empty if tests can run it."""

    language: str
    needs: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Returns a page's blocks. With `languages`: only runnable blocks in these languages."""
    found = []
    for words, text in re.findall(r"(?ms)^```([^\n]*)\n(.*?)^```$", page.read_text()):
        language, _, needs = words.partition(" needs=")
        found.append(Block(language, needs, text))
    return [x for x in found if not languages or (x.language in languages and not x.needs)]
