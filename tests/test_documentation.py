"""All pages, headings, configs, options, commands and flags that README and docs name exist."""

import ast
import contextlib
import importlib
import inspect
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vit_jax
from tests.pages import NEEDS, PAGES, ROOT, blocks
from vit_jax import command, experiment
from vit_jax.commands import COMMANDS as NAMED
from vit_jax.config import check
from vit_jax.data.sources import SOURCES, open_source
from vit_jax.training.objectives.objective import Objective

# The pages whose blocks are run by tests.
RUN = {
    *(
        "docs/python.md",
        "docs/models.md",
        "docs/ledger.md",
        "docs/growing_data.md",
    ),  # Run by test_python_page.py.
    "docs/extending.md",  # Run in this file.
    "docs/install.md",  # Run by test_wheel.py.
    *(
        f"docs/tutorials/{name}.md" for name in ("train", "finetune", "self_supervised")
    ),  # Run by test_tutorials.py.
}


def test_classes_of_the_reference_describe_all_their_fields():
    for path in re.findall(r"autoclass:: (\S+)", (ROOT / "docs/reference.md").read_text()):
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        described = inspect.getdoc(kind) or ""
        for field in getattr(kind, "__dataclass_fields__", getattr(kind, "_fields", ())):
            assert re.search(rf"\b{field}\b", described), f"{path}: {field}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Returns the commands of the package in a page's blocks, with continued lines joined."""
    wanted = (block.text for block in blocks(page) if block.language == "sh" or block.needs)
    text = re.sub(r"\\\n\s*", "", "\n".join(wanted))
    lines = re.sub(r"(?m)^vit-jax (\w+)", lambda named: as_module(named[1]), text).splitlines()
    return [
        line[line.index("python -m vit_jax") :] for line in lines if "python -m vit_jax" in line
    ]


def as_module(name: str) -> str:
    """Returns `python -m` with the module of a `vit-jax` subcommand."""
    return f"python -m vit_jax.{NAMED[name].module}"


COMMANDS = sorted({line for page in PAGES for line in commands(page)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_readme_leads_to_every_page(page):
    assert f"({page.relative_to(ROOT)})" in PAGES[0].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["commands", "published_weights"])
def test_pages_that_are_written_by_a_program_are_up_to_date(name):
    program = runpy.run_path(str(ROOT / f"docs/write_{name}.py"))
    assert (ROOT / f"docs/{name}.md").read_text() == program["page"]()


def test_examples_of_the_extending_page_work(monkeypatch):
    code = "\n".join(block.text for block in blocks(ROOT / "docs/extending.md", "python"))
    made: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/extending.md", "exec"), made)
    monkeypatch.setitem(SOURCES, "stripes", made["STRIPES"])
    source = open_source("stripes", "train[:10%]")
    assert len(source) == 100
    assert np.shape(source[1].image) == (32, 32, 3)
    assert issubclass(made["Brier"], Objective) and issubclass(made["Rotated"], Objective)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_code_is_run_or_has_a_reason(page):
    for language, needs, text in blocks(page):
        if needs:
            assert needs in NEEDS and language in ("text", "python"), text
        elif language in ("python", "sh"):
            assert str(page.relative_to(ROOT)) in RUN, text
        else:
            assert language in ("text", "bibtex", "{eval-rst}"), text
            starts = re.findall(r"(?m)^(python -m|vit-jax|pip|curl|git|gcloud) ", text)
            assert language != "text" or not starts, text


def test_pages_contain_the_current_version():
    version = re.escape(vit_jax.__version__)
    assert re.search(rf"(?m)^version: {version}$", (ROOT / "CITATION.cff").read_text())
    assert re.search(rf"version = {{{version}}}", PAGES[0].read_text())
    (latest, *_) = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert latest == vit_jax.__version__


def test_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) <= 150


@pytest.mark.parametrize("line", [line for line in COMMANDS if " --config=" in line])
def test_configs_of_commands_are_valid(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    config = command.read_config(
        next(word for word in words if word.startswith("--config=")).split("=", 1)[1]
    )
    for word in words:
        if word.startswith("--config."):
            key, value = word.removeprefix("--config.").split("=", 1)
            with contextlib.suppress(
                ValueError, SyntaxError
            ):  # The value is a text, as on the command line.
                value = ast.literal_eval(value)
            config.update_from_flattened_dict({key: value})
    check(config)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_their_flags_exist(line):
    words = shlex.split(line, comments=True)
    files = [ROOT / f"{words[2].replace('.', '/')}.py", ROOT / "vit_jax/command.py"]
    if words[2] == "vit_jax.evaluate":  # Evaluation suites define flags of their own.
        files += (ROOT / "vit_jax/evaluation").glob("suite_*.py")
    source = "".join(file.read_text() for file in files)
    if words[2] == "vit_jax.experiment" and words[3] != "--list":
        source += "".join(f'"{name}"' for name in experiment.load(words[3]).options)
    for word in words[3:]:
        if word == "--":
            break
        if word.startswith("--") and not word.startswith(("--config", "--help")):
            name = word[2:].partition("=")[0]
            assert f'"{name}"' in source or f'"--{name}"' in source, word


def test_values_that_pages_name_exist():
    known = dict.fromkeys(command.read_config(str(ROOT / "configs/quickstart.py")).keys())
    for page in PAGES:
        for key in re.findall(r"--config\.([a-z_]+)", page.read_text()):
            assert key in known, f"{page.name}: --config.{key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page):
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py")]
    files += ["/mine/table8.py"] if page.name == "commands.md" else []  # A file of the user.
    files += [
        f"/{made}" for made in re.findall(r'Path\("(\w+\.py)"\)\.write_text', page.read_text())
    ]
    for name in re.findall(r"(?<![\w/}.])[a-z][\w/]*\.py\b", page.read_text()):
        assert any(file.endswith(f"/{name}") for file in files), name
