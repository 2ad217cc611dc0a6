"""Public functions have docstrings, and all functions are short and simple."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from radon.complexity import cc_visit

ROOT = Path(__file__).parents[1]
FOLDERS = ("vit_jax", "configs", "experiments")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
IDS = [str(file.relative_to(ROOT)) for file in FILES]

ENTRIES = ("main", "get_config")  # Described by the docstring of their module.
LINES, PARAMETERS, COMPLEXITY = 85, 12, 12
# Functions that exceed `COMPLEXITY`, with the reason.
COMPLEX = {
    "vit_jax/ledger/dinov2_weights.py: read_weights": "It maps the names of one exporter's graph.",
    "vit_jax/runs/loop.py: Run.turns": "It is read from top to bottom: a turn of the loop.",
}
MANY_PARAMETERS = {
    "vit_jax/runs/training_log.py: TrainLog.__init__": "The progress line shows each of them.",
}


def definitions(file: Path) -> Iterator[tuple[str, ast.AST, ast.ClassDef | None, bool]]:
    """Yields qualified name, node, class and publicity of a file's functions and classes."""

    def within(node: ast.AST, prefix: str, owner: ast.ClassDef | None, public: bool) -> Iterator:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                shown = public and not child.name.startswith("_")
                yield prefix + child.name, child, owner, shown
                is_class = isinstance(child, ast.ClassDef)
                inner = child if is_class else None
                yield from within(child, f"{prefix}{child.name}.", inner, shown and is_class)
            elif not isinstance(child, ast.expr):
                yield from within(child, prefix, owner, public)

    yield from within(ast.parse(file.read_text()), "", None, True)


def documented_members() -> set[str]:
    """Returns the names of documented methods, classes and annotated attributes in the package's
    classes.

    Methods of subclasses with these names override documented ones, and need no docstring.
    """
    names = set()
    for file in (ROOT / "vit_jax").rglob("*.py"):
        for _, node, owner, _ in definitions(file):
            if owner is not None and ast.get_docstring(node):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names.update(
                    ast.unparse(line.target)
                    for line in node.body
                    if isinstance(line, ast.AnnAssign)
                )
    return names


DOCUMENTED = documented_members()


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_public_names_have_docstrings(file):
    for name, node, owner, public in definitions(file):
        overrides = owner is not None and owner.bases and node.name in DOCUMENTED
        decorated = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if (
            public
            and node.name not in ENTRIES
            and not overrides
            and not decorated & {"setter", "overload"}
        ):
            assert ast.get_docstring(node), name


def measured() -> Iterator[tuple[str, int, int]]:
    """Yields name, number of lines without the signature, and number of parameters of all
    functions.

    The number of parameters is 0 for private functions.
    """
    for file, name in zip(FILES, IDS, strict=True):
        for qualified, node, _, public in definitions(file):
            if not isinstance(node, ast.ClassDef):
                arguments = node.args
                count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
                shown = public or node.name == "__init__"
                lines = node.end_lineno - node.body[0].lineno + 1
                yield f"{name}: {qualified}", lines, count if shown else 0


def test_functions_are_short():
    assert not {name for name, lines, _ in measured() if lines > LINES}


def test_functions_are_simple():
    """Complexity is measured by radon: branches, loops, boolean operators and comprehensions."""
    blocks = {
        f"{name}: {block.fullname}": block.complexity
        for file, name in zip(FILES, IDS, strict=True)
        for block in cc_visit(file.read_text())
        if block.letter != "C"  # Without classes: only functions and methods.
    }
    assert {name for name, value in blocks.items() if value > COMPLEXITY} == set(COMPLEX)


def test_public_functions_take_few_parameters():
    assert {name for name, _, count in measured() if count > PARAMETERS} <= set(MANY_PARAMETERS)
