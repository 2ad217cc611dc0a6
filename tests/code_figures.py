"""Prints figures of the package's code: size, complexity, dependencies and wording.

    python -m tests.code_figures

Complexity is that of radon (`pip install radon`), which counts comprehensions and boolean
operators. `--list` also prints the counted functions.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vit_jax"
COMPLEX = 12  # The largest complexity of a function that is easy to read.
CONFIGS = {"ConfigDict", "TypedConfig", "Config"}
TRAINING_SIDE = ("vit_jax.training", "vit_jax.runs", "vit_jax.data", "orbax")
SAYING = r"\b(say|says|said|saying|tell|tells|told)\b"
# Relative clauses such as "what it does", but not questions.
RELATIVE_WHAT = r"(?i)\bwhat\b(?![^.]*\?)"

LIST = flags.DEFINE_bool("list", False, "Also print the functions that the counts are of.")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields all functions and methods of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns True if an argument called `config` is declared as a whole config."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(
        argument.arg == "config" and argument.annotation is not None and _names(argument.annotation)
        for argument in arguments
    )


def _names(annotation: ast.expr) -> bool:
    return bool(set(re.findall(r"\w+", ast.unparse(annotation))) & CONFIGS)


def docstrings(tree: ast.AST) -> str:
    """Returns all docstrings of a module."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(text for text in found if text)


def complex_functions() -> tuple[list[str], int]:
    """Returns the functions above `COMPLEX` with their complexity, and the number of all."""
    try:
        from radon.complexity import cc_visit
    except ImportError:
        sys.exit("radon is not installed: pip install radon")
    found, count = [], 0
    for file in sorted(PACKAGE.rglob("*.py")):
        for block in cc_visit(file.read_text()):
            methods = getattr(block, "methods", None)
            count += methods is None
            if methods is None and block.complexity > COMPLEX:
                found.append(f"{block.complexity} {file.relative_to(ROOT)}: {block.fullname}")
    return found, count


def imported_by_load() -> list[str]:
    """Returns the modules of the training side that `load_model` of a timm folder imports."""
    with tempfile.TemporaryDirectory() as folder:
        write = (
            "import vit_jax; model = vit_jax.create_model('ViT-mu/16', image_size=32);"
            f"vit_jax.save_model(model, {folder!r} + '/model', library='timm')"
        )
        load = (
            f"import sys, vit_jax; vit_jax.load_model({folder!r} + '/model', log=str);"
            "print(*sys.modules)"
        )
        subprocess.run([sys.executable, "-c", write], check=True, cwd=ROOT)
        run = subprocess.run(
            [sys.executable, "-c", load], check=True, cwd=ROOT, capture_output=True, text=True
        )
    return [name for name in run.stdout.split() if name.startswith(TRAINING_SIDE)]


def main(argv: list[str]) -> None:
    del argv
    files = sorted(PACKAGE.rglob("*.py"))
    sources = {file: file.read_text() for file in files}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    lines = sum(len(source.splitlines()) for source in sources.values())
    code_lines = sum(
        bool(line.strip()) and not line.strip().startswith("#")
        for source in sources.values()
        for line in source.splitlines()
    )
    text = "\n".join(map(docstrings, trees.values()))
    words = len(text.split())
    code_lines -= sum(bool(line.strip()) for line in text.splitlines())
    nodes = sum(1 for tree in trees.values() for _ in ast.walk(tree))
    configs = [
        f"{file.relative_to(ROOT)}: {function.name}"
        for file, tree in trees.items()
        for function in functions(tree)
        if takes_config(function)
    ]
    complex_ones, count = complex_functions()
    loaded = imported_by_load()
    rows = {
        "lines of vit_jax/": f"{lines:,}",
        "syntax nodes a line of code": f"{nodes / code_lines:.1f}",
        f"functions of complexity above {COMPLEX}": f"{len(complex_ones)} ({len(complex_ones) / count:.2%})",
        "functions that take the whole config": f"{len(configs)}",
        '"what" per 1,000 words of docstrings': f"{1e3 * len(re.findall(RELATIVE_WHAT, text)) / words:.1f}",
        "forms of say and tell per 1,000": f"{1e3 * len(re.findall(SAYING, text)) / words:.1f}",
        "modules of the training side that load_model imports": f"{len(loaded)}",
    }
    for name, value in rows.items():
        print(f"{name:55}{value:>16}")
    if LIST.value:
        print(*complex_ones, *configs, *loaded, sep="\n")


if __name__ == "__main__":
    app.run(main)
