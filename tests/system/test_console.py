"""The command `vit-jax`, which is the same as `python -m vit_jax`."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.system.conftest import ROOT
from vit_jax.commands import COMMANDS

MODULES = {
    path.stem
    for path in (ROOT / "vit_jax").glob("*.py")
    if "\n    command.run(" in path.read_text()
}


@pytest.fixture
def start(run):
    """Returns a function that runs `vit-jax` with arguments."""
    return lambda *arguments: run(*arguments, module="vit_jax.__main__")


def test_every_module_that_is_a_command_has_a_name():
    assert {command.module for command in COMMANDS.values()} == MODULES | {"experiment"}


def test_help_lists_every_command_with_the_first_line_of_its_description(start):
    listed = start("--help").stdout.splitlines()
    for name, command in COMMANDS.items():
        file = f"configs/{command.config}.py" if command.config else f"vit_jax/{command.module}.py"
        first = (ROOT / file).read_text().split("\n")[0].removeprefix('"""')
        assert f"  {name:<12}{first}" in listed


def test_no_library_is_imported_for_the_list():
    code = (
        "import sys; sys.argv = ['vit-jax', '--help']; from vit_jax.__main__ import main; main();"
        "sys.exit(bool({'jax', 'numpy', 'absl'} & {*sys.modules}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    "arguments",
    [("--config=quickstart", "--config.stepz=3"), ("--config=quikstart",), ("--workdir", "w", "x")],
)
def test_command_fails_as_its_module_does(run, start, arguments):
    ours, modules = start("train", *arguments), run(*arguments, module="vit_jax.main")
    assert (ours.returncode, ours.stdout, ours.stderr) == (2, modules.stdout, modules.stderr)
    assert modules.returncode == 2


def test_fine_tuning_has_a_default_config(start, tmp_path):
    result = start("finetune", f"--workdir={tmp_path}/run")
    assert result.returncode == 2 and "name the images: vit-jax finetune PHOTOS" in result.stderr
    assert "did you mean 'quickstart'" in start("finetune", "--config", "quikstart").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a command, such as vit-jax train; --help lists them"),
        (("trian",), "there is no command 'trian'; did you mean 'train'?"),
        (("TRIAN",), "there is no command 'TRIAN'; did you mean 'train'?"),
        (("completion",), "give a shell: vit-jax completion bash or zsh"),
        (("completion", "bsh"), "there is no completion for 'bsh'; did you mean 'bash'?"),
    ],
)
def test_an_unknown_command_is_a_one_line_error(start, arguments, said):
    result = start(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {said}\n")


def test_googles_package_of_the_same_name_is_named(run, tmp_path):
    theirs = tmp_path / "vit_jax" / "models_vit.py"
    theirs.parent.mkdir()
    theirs.touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    result = run("bsh", module="vit_jax.completion", PYTHONPATH=path)
    warning, error = result.stderr.splitlines()
    assert warning.startswith(
        f"warning: {theirs.parent} is google-research/vision_transformer's package"
    )
    assert error == "error: there is no completion for 'bsh'; did you mean 'bash'?"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("pre",), {"predict", "prepare", "pretrain"}),
        (("train", "--config", "=", "vit_l"), {"vit_l16_i1k", "vit_l16_i21k", "vit_l16_jft"}),
        (("train", "--config", "="), {path.stem for path in (ROOT / "configs").glob("*.py")}),
        (("train", "--workdir", "=", "vit_l"), set()),
        (("report", "--"), {"--out", "--serve", "--port"}),
        (("plan", "--c"), {"--config", "--chip"}),
        (
            ("train", "--config.optimizer.beta"),
            {"--config.optimizer.beta1", "--config.optimizer.beta2"},
        ),
    ],
)
def test_bash_completes_commands_flags_and_configs(start, words, completed):
    shown = (
        f"COMP_WORDS=(vit-jax {' '.join(words)}); COMP_CWORD={len(words)}; _vit_jax; echo "
        f"${{COMPREPLY[@]}}"
    )
    script = start("completion", "bash").stdout + shown
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    found = {word for word in answer.stdout.split() if word.startswith(words[-1].lstrip("="))}
    assert completed <= found and bool(completed) == bool(found)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("pre",), {"predict", "prepare", "pretrain"}),
        (("train", "--config=vit_l16"), {"vit_l16_i1k", "vit_l16_i21k", "vit_l16_jft"}),
        (("report", "--"), {"--out", "--serve", "--port"}),
        (
            ("train", "--config.optimizer.beta"),
            {"--config.optimizer.beta1", "--config.optimizer.beta2"},
        ),
        (("train", "--workdir=vit_l"), {"files of vit_l"}),
    ],
)
def test_zsh_completes_commands_flags_and_configs(start, words, completed):
    """Runs the completion script with replacements of zsh's completion functions.

    They print the candidates that match the typed prefix.
    """
    shell = f"""
        compset() {{ PREFIX=${{PREFIX#*=}} }}
        compadd() {{ while [[ $1 != -- ]]; do shift; done; shift; print -l -- ${{(M)@:#$PREFIX*}} }}
        _files() {{ print "files of $PREFIX" }}
        words=(vit-jax {" ".join(words)}) CURRENT={len(words) + 1} PREFIX={words[-1]}
        complete() {{
    """
    script = f"{shell}{start('completion', 'zsh').stdout}\n}}\ncomplete"
    answer = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
    assert (completed, answer.stderr) == ({*answer.stdout.splitlines()}, "")
