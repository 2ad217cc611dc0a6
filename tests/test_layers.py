"""Parts of the package import each other only in the direction of docs/architecture.md."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vit_jax"

# The parts of the package that each part may import, in addition to itself, `errors`, `paths`,
# `progress` and `small_files`. `models` and `interop` are at the centre: they read and write models
# without the other parts.
ALLOWED = {
    "models": {"options", "published"},
    "data": {"options"},
    "parallel": {"huge_pages", "models", "options"},
    "options": set(),
    "config": {"config_types", "options", "models"},
    "recipes": {"config", "data", "models", "published"},
    "interop": {"models", "options", "published"},
    "evaluation": {"models", "data", "parallel", "config", "options", "recipes", "published"},
    "run_suites": {
        "checkpoint_crop",
        "data",
        "dense",
        "evaluation",
        "image_text",
        "interop",
        "options",
    }
    | {"load", "parallel", "runs"},
    "training": {"models", "data", "parallel", "config", "options", "evaluation"},
    "runs": {
        "options",
        "published",
        "models",
        "data",
        "parallel",
        "config",
        "interop",
        "evaluation",
        "inspection",
        "object_files",
        "shipped",
        "training",
    },
    "ledger": {
        "models",
        "options",
        "benchmarks",
        "checkpoint_crop",
        "command",
        "config",
        "data",
        "inspection",
        "interop",
        "load",
        "planning",
        "published",
        "recipes",
        "runs",
        "shipped",
    },
    "preparation": {"data", "inspection", "parallel", "spreadsheet"},
    "prediction_files": {"spreadsheet"},
    "load": {"interop", "models", "options", "published", "checkpoint_crop", "inference"},
    "save": {
        "interop",
        "models",
        "options",
        "runs",
    },  # `runs` is imported if a checkpoint has parameters of an objective.
    "checkpoint_crop": {"data", "interop", "options"},
    "inference": {"checkpoint_crop", "data", "evaluation", "interop", "models", "parallel"},
    "publishing": {
        "checkpoint_crop",
        "config",
        "evaluation",
        "interop",
        "load",
        "models",
        "published",
    }
    | {"runs"},
    "interface": {"command", "config", "config_types", "models", "published", "runs", "training"},
    "inspection": {"models"},
    "config_page": {"config", "options"},
    "command": {"config", "config_page", "config_types", "shipped"},
    "commands": {"shipped"},
    "image_text": {"interop", "load", "models", "published"},
    "dense": {"checkpoint_crop", "data", "evaluation", "inference", "interop", "load"}
    | {"models", "parallel", "runs"},
    "mask_files": {"data", "inspection", "models"},
    "depth_files": {"data", "inspection", "mask_files", "models"},
    "object_files": {"data", "inspection", "mask_files", "models"},
    "classifier": {"checkpoint_crop", "data", "image_text", "interop", "load", "models"},
    "serving": {
        "classifier",
        "data",
        "dense",
        "depth_files",
        "evaluation",
        "inspection",
        "models",
        "object_files",
    }
    | {"parallel"},
    "planning": {"config", "models", "options", "data", "parallel", "training", "runs", "libtpu"},
    "benchmarks": {"config", "models", "data", "options", "parallel", "interop", "evaluation"}
    | {"training", "runs", "planning", "load", "save"},
}
PARTS = sorted(
    {p.stem if p.suffix == ".py" else p.name for p in PACKAGE.iterdir()}
    - {"__pycache__", "__init__"}
)
COMMANDS = {
    path.stem for path in PACKAGE.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()
}


def imports(path: Path) -> set[str]:
    """Returns the parts of vit_jax that a file or a folder imports."""
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.rglob("*.py")
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] == "vit_jax"
            ):
                parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                names.update(parts)
            elif isinstance(node, ast.Import):
                names.update(
                    a.name.split(".")[1] for a in node.names if a.name.startswith("vit_jax.")
                )
    return names - {path.stem, "errors", "paths", "progress", "small_files"}


@pytest.mark.parametrize("part", [part for part in PARTS if part not in COMMANDS])
def test_part_imports_only_what_it_may(part):
    assert imports(PACKAGE / part) <= ALLOWED.get(part, set())


@pytest.mark.parametrize("part", PARTS)
def test_nothing_imports_a_command(part):
    assert not imports(PACKAGE / part) & COMMANDS


def test_importing_the_package_loads_no_library():
    code = "import sys, vit_jax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "experiments", "tests"])
def test_imported_names_of_vit_jax_exist(folder):
    """Imports inside of functions are also tested."""
    for path in (PACKAGE.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] == "vit_jax"
            ):
                module = importlib.import_module(node.module)
                for name in {alias.name for alias in node.names} - {
                    "_jpeg"
                }:  # The extension may not be built.
                    exists = hasattr(module, name) or importlib.util.find_spec(
                        f"{node.module}.{name}"
                    )
                    assert exists, f"{path}: {node.module} has no {name}"


# Prints the imported modules of the training side, of data and of Orbax.
REPORT = """
import sys
OUTSIDE = ("vit_jax.training", "vit_jax.runs", "vit_jax.data", "vit_jax.config", "orbax")
print(*sorted(name for name in sys.modules if name.startswith(OUTSIDE)))
"""


def imported_outside(code: str, *arguments: str) -> str:
    """Runs code in a new process. Returns its output, including the modules of `REPORT`."""
    command = [sys.executable, "-c", code + REPORT, *arguments]
    run = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return run.stdout.strip()


def test_models_and_interop_import_nothing_outside():
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for part in ("models", "interop")
        for path in (PACKAGE / part).rglob("*.py")
        if path.stem != "__init__"
    ]
    assert "vit_jax.interop.timm.timm_vit" in names
    code = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    assert imported_outside(code) == ""


SMALL = dict(dim=16, depth=1, mlp_dim=24, heads=2, image_size=32, num_classes=3)


@pytest.mark.parametrize("library", ["timm", "transformers", "google"])
def test_loading_and_saving_a_model_imports_nothing_outside(library, tmp_path):
    source = tmp_path / ("model.npz" if library == "google" else "model")
    code = f"""
import sys, vit_jax
source, target = sys.argv[1:]
model = vit_jax.create_model("ViT-Ti/16", **{SMALL})
vit_jax.save_model(model, source, library={library!r}, log=str)
model = vit_jax.load_model(source, image_size=48, num_classes=2, log=str)
assert model(__import__("numpy").zeros((1, 48, 48, 3), "float32")).shape == (1, 2)
vit_jax.save_model(source, target, library="timm", gelu="erf", norm_epsilon=1e-6, log=str)
"""
    assert imported_outside(code, str(source), str(tmp_path / "copy")) == ""
    assert (tmp_path / "copy/model.safetensors").is_file()
