"""The commands of `vit-jax`. Each command is a module that `python -m` can start as well."""

import ast
from pathlib import Path
from typing import NamedTuple

from vit_jax.shipped import CONFIGS, PACKAGE


class Command(NamedTuple):
    """A command: a module of the package, and the module's default config."""

    module: str
    config: str = ""

    @property
    def about(self) -> str:
        """Summary of the command: the first line of its config's or its module's docstring."""
        file = CONFIGS / f"{self.config}.py" if self.config else self._file
        return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]

    @property
    def flags(self) -> list[str]:
        """Names of the flags that the module defines. The module is not imported."""
        calls = [
            node
            for node in ast.walk(ast.parse(self._file.read_text()))
            if isinstance(node, ast.Call)
        ]
        named = [
            call.args[0] for call in calls if ast.unparse(call.func).startswith("flags.DEFINE_")
        ]
        takes_config = any(ast.unparse(call.func) == "command.define_config" for call in calls)
        return ["config"] * takes_config + [
            name.value for name in named if isinstance(name, ast.Constant)
        ]

    @property
    def _file(self) -> Path:
        return PACKAGE / f"{self.module}.py"


COMMANDS = {
    "train": Command("main"),
    "finetune": Command("finetune_photos"),
    "pretrain": Command("pretrain_photos"),
    "report": Command("report"),
    "sweep": Command("sweep"),
    "evaluate": Command("evaluate"),
    "predict": Command("predict"),
    "search": Command("search"),
    "serve": Command("serve"),
    "visualize": Command("visualize"),
    "convert": Command("convert"),
    "export": Command("export"),
    "push": Command("push"),
    "prepare": Command("prepare"),
    "duplicates": Command("find_duplicates"),
    "plan": Command("plan"),
    "benchmark": Command("benchmark"),
    "experiment": Command("experiment"),
    "completion": Command("completion"),
}
