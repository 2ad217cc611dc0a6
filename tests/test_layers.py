"""Dependencies point one way (see docs/architecture.md)."""

import ast
import importlib.util
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vit_jax"

# What each part may import of ours, besides itself, `errors` and `progress`.
ALLOWED = {
    "models": {"arguments", "options", "published"},
    "data": {"options"},
    "parallel": {"models", "options"},
    "options": set(),
    "arguments": {"options"},
    "config": {"config_types", "options", "models", "shipped"},
    "formats": {"config", "data"},
    "recipes": {"config", "data", "models"},
    "interop": {"models", "arguments", "published"},
    "evaluation": {"models", "data", "parallel", "config", "options", "recipes", "published"},
    "run_suites": {"data", "evaluation", "interop", "load", "parallel", "runs"},
    "training": {"models", "data", "parallel", "config", "options"},
    "runs": {
        "options",
        "formats",
        "published",
        "models",
        "data",
        "parallel",
        "config",
        "interop",
        "evaluation",
        "inspection",
        "shipped",
        "training",
    },
    "ledger": {
        "models",
        "benchmarks",
        "command",
        "config",
        "data",
        "inspection",
        "load",
        "planning",
        "published",
        "recipes",
        "runs",
        "shipped",
    },
    "preparation": {"data", "inspection", "parallel", "spreadsheet"},
    "prediction_files": {"spreadsheet"},
    "load": {"interop", "models", "published", "data", "parallel", "evaluation", "runs"},
    "save": {"interop", "models", "runs"},
    "publishing": {"config", "evaluation", "interop", "load", "models", "published", "runs"},
    "interface": {"command", "config", "models", "published", "runs", "training"},
    "inspection": {"models"},
    "config_page": {"config", "options"},
    "command": {"config", "config_page", "config_types", "shipped"},
    "commands": {"shipped"},
    "classifier": {"data", "interop", "load", "models", "runs"},
    "serving": {"classifier", "data", "evaluation", "inspection", "models", "parallel"},
    "planning": {"config", "models", "data", "parallel", "training", "runs", "libtpu"},
    "benchmarks": {"config", "models", "data", "parallel", "interop", "evaluation"}
    | {"training", "runs", "planning", "load", "save"},
}
PARTS = sorted(
    {p.stem if p.suffix == ".py" else p.name for p in PACKAGE.iterdir()} - {"__pycache__", "__init__"}
)
COMMANDS = {path.stem for path in PACKAGE.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}


def imports(path: Path) -> set[str]:
    """Our own parts that a file or a folder imports."""
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.rglob("*.py")
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vit_jax":
                parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                names.update(parts)
            elif isinstance(node, ast.Import):
                names.update(a.name.split(".")[1] for a in node.names if a.name.startswith("vit_jax."))
    return names - {path.stem, "errors", "progress", "small_files"}


@pytest.mark.parametrize("part", [part for part in PARTS if part not in COMMANDS])
def test_part_imports_only_what_it_may(part):
    assert imports(PACKAGE / part) <= ALLOWED.get(part, set())


@pytest.mark.parametrize("part", PARTS)
def test_nothing_imports_a_command(part):
    assert not imports(PACKAGE / part) & COMMANDS


def test_importing_the_package_loads_no_library():
    import subprocess
    import sys

    code = "import sys, vit_jax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_no_two_modules_have_one_name():
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "experiments", "tests"])
def test_what_files_import_of_ours_exists(folder):
    """Also what functions import when they are called."""
    for path in (PACKAGE.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vit_jax":
                module = importlib.import_module(node.module)
                for name in {alias.name for alias in node.names} - {"_jpeg"}:  # It need not be built.
                    exists = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert exists, f"{path}: {node.module} has no {name}"
