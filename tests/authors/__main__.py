"""Compares with the authors' code: python -m tests.authors --checkouts=DIR [--write]

DIR contains checkouts of the repositories in recipes.toml, or their git directories. Each is named
after its repository (`dinov2`) or `OWNER+NAME`. The command checks that each line cited in
recipes.toml contains the cited part. It then compares the authors' schedules, parameter groups,
initial values and losses with ours, and prints a line for each case. It fails if a difference is
larger than `ours.ALLOWED`. --write saves the authors' numbers in golden.json, with which CI
compares ours, and the result in docs/self_supervised.md. The command requires PyTorch, timm and
PyYAML.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

from tests.authors.compare import GOLDEN, PAGE, differences, page
from tests.authors.ours import Cases, cases

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "recipes.toml"


def checkout_of(checkouts: Path, repository: str, parts: set[str], into: Path) -> tuple[Path, str]:
    """Extracts a repository's Python and text files below `parts`; returns folder and commit."""
    owner, name = repository.split("/")
    for folder in (
        checkouts / name,
        checkouts / f"{owner}+{name}",
        checkouts / f"{owner}+{name}" / "repo",
    ):
        for git in (folder / ".git", folder):
            if (git / "HEAD").is_file():
                break
        else:
            continue
        run = ["git", f"--git-dir={git}"]

        def output(*words: str, run=run) -> bytes:
            return subprocess.run([*run, *words], capture_output=True, check=True).stdout

        files = output("ls-tree", "-r", "--name-only", "HEAD").decode().splitlines()
        for file in files:
            if file.endswith((".py", ".md", ".yaml")) and file.split("/")[0] in parts:
                (into / name / file).parent.mkdir(parents=True, exist_ok=True)
                (into / name / file).write_bytes(output("show", f"HEAD:{file}"))
        return into / name, output("rev-parse", "HEAD").decode().strip()
    raise SystemExit(f"{checkouts} has no checkout of {repository}: clone it to {checkouts / name}")


def missing_citations(folders: dict[str, Path]) -> list[str]:
    """Returns a message for each row of the table whose line does not contain the cited part."""
    missing = []
    for recipe in tomllib.loads(TABLE.read_text())["recipes"]:
        folder = folders[recipe["repository"].split("/")[1]]
        for option, _, line, part in recipe["values"]:
            file, _, number = line.rpartition(":")
            lines = (folder / file).read_text(errors="replace").split("\n")
            if part not in lines[int(number) - 1]:
                missing.append(f"{recipe['repository']} {line} has no {part!r} ({option})")
    return missing


def _rounded(theirs: Cases) -> Cases:
    """Rounds the numbers to nine digits, more than float32 has."""
    return {
        case: {name: [float(f"{x:.9g}") for x in row] for name, row in rows.items()}
        for case, rows in theirs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, required=True, help="the folder that has them")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name} and {PAGE.name}")
    arguments = parser.parse_args()
    from tests.authors.theirs import Authors  # This import requires PyTorch and timm.

    parts, citations = defaultdict(set), 0
    for recipe in tomllib.loads(TABLE.read_text())["recipes"]:
        parts[recipe["repository"]] |= {
            line.split(":")[0].split("/")[0] for *_, line, _ in recipe["values"]
        }
        citations += len(recipe["values"])
    with tempfile.TemporaryDirectory() as into:
        found = {
            repository: checkout_of(arguments.checkouts, repository, inside, Path(into))
            for repository, inside in parts.items()
        }
        folders = {repository.split("/")[1]: folder for repository, (folder, _) in found.items()}
        commits = {repository: commit for repository, (_, commit) in found.items()}
        missing = missing_citations(folders)
        theirs = Authors(folders).cases()
    rows = differences(cases(), theirs)
    for case, difference, allowed, name in rows:
        print(f"{case:45} {difference:.1e} of {allowed:.0e} allowed, {name}")
    print(f"{citations - len(missing)} of {citations} citations found", *missing, sep="\n")
    if arguments.write:
        text = json.dumps({"commits": commits, "cases": _rounded(theirs)}, indent=1)
        # Writes each list in one line.
        GOLDEN.write_text(re.sub(r"\s+(?=[^\[\]{}]*\])", " ", text) + "\n")
        PAGE.write_text(page(PAGE.read_text(), rows, commits, citations))
    failed = [case for case, difference, allowed, _ in rows if difference > allowed]
    if failed or missing:
        sys.exit(f"further from the authors' code than allowed: {', '.join(failed) or 'citations'}")


if __name__ == "__main__":
    main()
