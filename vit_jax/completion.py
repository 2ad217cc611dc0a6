"""Prints a script of shell completions: python -m vit_jax.completion bash.

The script completes commands, flags and the names of configs.

    vit-jax completion bash > ~/.local/share/bash-completion/completions/vit-jax
    vit-jax completion zsh > ~/.zfunc/_vit-jax       # A folder of $fpath.

The script contains the names of the current configs. After a config was added, run the command
again.
"""

from vit_jax import command
from vit_jax.commands import COMMANDS
from vit_jax.config import VALUES
from vit_jax.errors import UserError, nearest
from vit_jax.shipped import config_names

# Bash splits `--config=NAME` into three words: `--config`, `=` and `NAME`.
BASH = """\
_vit_jax() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags
    case ${COMP_WORDS[1]} in
FLAGS
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
    elif [ "$before$word" = --config= ]; then
        COMPREPLY=($(compgen -W "CONFIGS"))
    elif [ "${COMP_WORDS[COMP_CWORD-2]}$before" = --config= ]; then
        COMPREPLY=($(compgen -W "CONFIGS" -- "$word"))
    elif [[ $word == --config.* && $flags == *--config* ]]; then
        COMPREPLY=($(compgen -W "VALUES" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o default -F _vit_jax vit-jax
"""
ZSH = """\
#compdef vit-jax
local flags
case $words[2] in
FLAGS
esac
if (( CURRENT == 2 )); then
    compadd -- COMMANDS
elif [[ $PREFIX == --config=* ]]; then
    compset -P '*='
    compadd -- CONFIGS
elif [[ $PREFIX == --config.* && $PREFIX != *=* && $flags == *--config* ]]; then
    compadd -S '=' -- VALUES
elif [[ $PREFIX == -* && $PREFIX != *=* ]]; then
    compadd -- ${=flags}
else
    compset -P '*='
    _files
fi
"""
SHELLS = {"bash": BASH, "zsh": ZSH}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError(f"give a shell: vit-jax completion {' or '.join(SHELLS)}")
    if (script := SHELLS.get(arguments[0])) is None:
        raise UserError(
            f"there is no completion for {arguments[0]!r}; {nearest(arguments[0], SHELLS)}"
        )
    flags = {
        name: " ".join(f"--{flag}" for flag in command.flags) for name, command in COMMANDS.items()
    }
    words = {
        "FLAGS": "\n".join(f'    {name}) flags="{given}" ;;' for name, given in flags.items()),
        "COMMANDS": " ".join(COMMANDS),
        "CONFIGS": " ".join(config_names()),
        "VALUES": " ".join(f"--config.{key}" for key in VALUES),
    }
    for place, names in words.items():
        script = script.replace(place, names)
    print(script, end="")


if __name__ == "__main__":
    command.run(main)
