"""Prints what completes commands and configs in a shell: python -m vit_jax.completion bash

    vit-jax completion bash > ~/.local/share/bash-completion/completions/vit-jax
    vit-jax completion zsh > ~/.zfunc/_vit-jax       # A folder of $fpath.

It has the names of the configs that there are now.
"""

from vit_jax import command
from vit_jax.commands import COMMANDS
from vit_jax.errors import UserError, nearest
from vit_jax.shipped import config_names

# Bash makes words of `--config`, `=` and what is behind it.
BASH = """\
_vit_jax() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
    elif [ "$before$word" = --config= ]; then
        COMPREPLY=($(compgen -W "CONFIGS"))
    elif [ "${COMP_WORDS[COMP_CWORD-2]}$before" = --config= ]; then
        COMPREPLY=($(compgen -W "CONFIGS" -- "$word"))
    fi
}
complete -o default -F _vit_jax vit-jax
"""
ZSH = """\
#compdef vit-jax
_arguments '1:command:(COMMANDS)' '--config=[the job]:config:(CONFIGS)' \\
    '--workdir=[where the run is kept]:folder:_files -/' '*:file:_files'
"""
SHELLS = {"bash": BASH, "zsh": ZSH}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError(f"give a shell: vit-jax completion {' or '.join(SHELLS)}")
    if (script := SHELLS.get(arguments[0])) is None:
        raise UserError(f"there is no completion for {arguments[0]!r}; {nearest(arguments[0], SHELLS)}")
    names = script.replace("COMMANDS", " ".join(COMMANDS)).replace("CONFIGS", " ".join(config_names()))
    print(names, end="")


if __name__ == "__main__":
    command.run(main)
