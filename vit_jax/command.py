"""Code that all commands share: flags, help, configs, and error messages with exit codes."""

import contextlib
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import runpy
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax.config import VALUES, ConfigMistake, as_made, leaves, unknown_key
from vit_jax.config_page import WIDTH, listing, short_listing
from vit_jax.errors import UserError, mistake, nearest, readers_may_leave
from vit_jax.paths import user_cache
from vit_jax.shipped import CONFIGS, config_names
from vit_jax.small_files import check_small

if TYPE_CHECKING:
    from vit_jax.config_types import TypedConfig

# Name of a config's attribute, which contains a copy of the config before command-line changes.
_AS_IN_FILE = "_as_in_file"
# Most frequently changed values of training runs.
COMMON = (
    *(
        "data.source",
        "data.path",
        "data.train_split",
        "data.test_split",
        "data.image_size",
        "batch_size",
    ),
    *("epochs", "model.name", "optimizer.learning_rate", "optimizer.warmup_steps"),
)
WRITTEN = {"out", "embed", "dry_run"}  # Flags that name an output file or folder.


def run(main: Callable[[list[str]], None], common: Sequence[str] = COMMON) -> None:
    """Parses the flags, calls `main` with the other arguments, and sets the exit code.

    Exit codes:

    - 0: the command has finished, or a signal has stopped it after it saved its state.
    - 1: a bug; a traceback is printed.
    - 2: a user error.
    - 141: the reader of the command's output has closed the pipe, as `head` does in `| head`.

    `--help` prints one screen about the command. `--helpfull` also lists all values of the config,
    and `--help=optimizer` lists one section.

    Args:
      common: keys of the most frequently changed config values, for `--help`.
    """
    _print_any_name()
    warnings.formatwarning = _format_warning
    with readers_may_leave(), mistakes():
        if (section := _help_asked()) is not None:
            print(_help(section, common))
            return
        main(parse_flags())


def _print_any_name() -> None:
    """Makes `print` accept file names that are not UTF-8.

    Their original bytes are written if the output is UTF-8. Otherwise they are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf_8 = stream.encoding.lower() in ("utf-8", "utf8")
            stream.reconfigure(errors="surrogateescape" if utf_8 else "backslashreplace")


_FORMAT_OF_PYTHON = warnings.formatwarning


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Formats a warning. Warnings of this package are formatted without the line of the code."""
    own = Path(filename).is_relative_to(Path(__file__).parent)
    if own and category is UserWarning:
        return f"warning: {message}\n"
    return _FORMAT_OF_PYTHON(message, category, filename, lineno, line)


def _help_asked() -> str | None:
    """Returns '' for `--help`, `full` for `--helpfull`, SECTION for `--help=SECTION`, else None."""
    for argument in sys.argv[1:]:
        if asked := re.fullmatch(r"-h|--?help(?:=(.*)|(full))?", argument):
            return asked[1] or asked[2] or ""
    return None


def _help(section: str, common: Sequence[str]) -> str:
    """Returns the text for a help flag.

    Args:
      section: '' or `full`: the command's purpose, flags and config values. The name of a section:
        only the config values of this section.
      common: keys of the most frequently changed config values, which are listed for ''.
    """
    takes_config = "config" in flags.FLAGS
    if section not in ("", "full"):
        return listing(section) if takes_config else ""
    about = f"{sys.modules['__main__'].__doc__.strip()}\n\n{_flags_of_command()}"
    if not takes_config:
        return about
    if section == "full":
        return f"{about}\n\nValues of the config, with their defaults\n\n{listing()}"
    values = {key: VALUES[key].default for key in common}
    for argument in sys.argv[1:]:
        if named := re.fullmatch(r"--?config=(.+)", argument):
            found = dict(leaves(read_config(named[1])))
            values = {key: found[key] for key in common}
            # If `config.auto` is set, default values are later replaced according to the data and
            # the device. These default values are printed as `...`.
            if found["auto"] != "none":
                values |= {
                    key: "..." for key, value in values.items() if value == VALUES[key].default
                }
    shown = f"Values of the config that are changed most:\n{short_listing(values)}"
    return (
        f"{about}\n\n{shown}\n\n--helpfull lists all values, --help=optimizer those of one section."
    )


def _flags_of_command() -> str:
    """Returns help on the command's own flags."""
    lines = ["Flags:"]
    for flag in flags.FLAGS.get_key_flags_for_module(sys.modules["__main__"].__name__):
        default = "" if flag.default in (None, []) else flag.default_as_str.strip("'")
        lines.append(
            f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}={default or '...'}"
        )
        about, again, _ = flag.help.partition(";\n    repeat this option")
        kinds = (
            not flag.boolean and flag.parser.syntactic_help,
            again and "may be given several times",
        )
        kind = ", ".join(filter(None, kinds))
        lines += textwrap.wrap(
            f"{about} ({kind})" if kind else about,
            WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        )
    return "\n".join(lines)


@contextlib.contextmanager
def mistakes():
    """Context in which a user error is printed as one line, with exit code 2.

    It also prints a warning if google-research's package `vit_jax` is importable.
    """
    if folder := other_package():
        print(
            f"warning: {folder} is google-research/vision_transformer's package of the same name, "
            "and Python imports the first that it finds: keep each in an environment of its own",
            file=sys.stderr,
        )
    try:
        yield
    except Exception as error:
        if (message := mistake(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def other_package() -> Path | None:
    """Returns the folder of google-research's package `vit_jax`; None: it is not importable."""
    folders = (Path(entry, "vit_jax").absolute() for entry in ["", *sys.path])
    return next((folder for folder in folders if os.path.isfile(folder / "models_vit.py")), None)


def define_config(about: str, default: str | None = None) -> flags.FlagHolder:
    """Defines the flag `--config=FILE.py` with a default. A config error is printed as one line."""
    holder = config_flags.DEFINE_config_file("config", None, about)
    flags.FLAGS["config"].parser = _ConfigFile()
    if default and not any(re.match(r"--?config(=|$)", argument) for argument in sys.argv[1:]):
        sys.argv.insert(1, f"--config={default}")
    return holder


def read_config(path: str) -> "TypedConfig":
    """Runs a config file, `FILE.py` or `FILE.py:ARGUMENT`, and returns its config.

    Raises:
      UserError: the file does not exist, or does not return a config.
    """
    try:
        return cast("TypedConfig", _ConfigFile().parse(path))
    except _ConfigFault as fault:
        raise fault.args[0] from fault


def as_in_file(config: ConfigDict) -> ConfigDict | None:
    """Returns the config as its file returned it, before flags; None: it is not from a file."""
    return config.__dict__.get(_AS_IN_FILE)


def config_file(name: str) -> str:
    """Returns the path of a config file, given a path or the name of one of the package's configs.

    If the file `name` exists, its path is returned. Otherwise the package's configs are searched:
    `configs/quickstart.py`, `quickstart.py` and `quickstart` all name the package's config
    `quickstart`, from any current folder. If nothing is found, `name` is returned unchanged.
    """
    stem = name.removeprefix("configs/").removesuffix(".py")
    if os.path.isfile(name) or "/" in stem:
        return name
    shipped = CONFIGS / f"{stem}.py"
    return str(shipped) if shipped.is_file() else name


class _ConfigFault(Exception):
    """Carries a UserError of a config file unchanged through absl's parser of flags.

    absl changes the message of any ValueError, and a UserError is a ValueError.
    """


class _ConfigFile(flags.ArgumentParser):
    """Parser of the flag `--config`. It runs the config's file, `FILE.py` or `FILE.py:ARGUMENT`."""

    syntactic_help = "FILE.py or FILE.py:ARGUMENT"

    def parse(self, path: str) -> ConfigDict:
        name, _, argument = path.partition(":")
        file = config_file(name)
        try:
            check_small(file)
            config = runpy.run_path(file)["get_config"](*([argument] if argument else []))
        except Exception as error:  # A config file is a program and may raise any exception.
            raise _ConfigFault(UserError(_explain_config(file, error))) from error
        if not isinstance(config, ConfigDict):
            returned = f"{file}: get_config returns {type(config).__name__}, not a config"
            raise _ConfigFault(UserError(f"{returned}; start it from vit_jax.config.base_config()"))
        as_made(config)
        object.__setattr__(config, _AS_IN_FILE, config.copy_and_resolve_references())
        return config.lock()


def _explain_config(file: str, error: Exception) -> str:
    """Returns a line with the line number and the cause of an error in a config's file."""
    if isinstance(error, OSError | SyntaxError) and error.filename == file:
        return _explain_file(file, error)
    if isinstance(error, KeyError) and error.args == ("get_config",):
        return f"{file} has no function get_config, which returns the config"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    where = f"{file}, line {lines[-1]}" if lines else file
    if isinstance(error, ConfigMistake):
        return f"{where}: {error}"
    if isinstance(error, UserError):
        return str(error)
    return f"{where}: {type(error).__name__}: {error}"


def _explain_file(file: str, error: OSError | SyntaxError) -> str:
    """Returns a line about an error that occurred when a config's file was read or parsed."""
    if isinstance(error, FileNotFoundError):
        return f"there is no config file {file}; {nearest(Path(file).stem, config_names())}"
    if isinstance(error, SyntaxError):
        return f"{file}, line {error.lineno}: {error.msg}"
    return f"cannot read the config file {file}: {error.strerror}"


def parse_flags() -> list[str]:
    """Parses the command line, and returns the arguments that are not flags.

    Raises:
      UserError: a flag is unknown or malformed, or the config cannot be loaded.
    """
    if "config" in flags.FLAGS:
        _check_keys(sys.argv[1:])
    arguments, unset = _without_unset(sys.argv)
    try:
        rest = flags.FLAGS(arguments)[1:]
        _check_written()
        if unset and (config := flags.FLAGS["config"].value) is not None:
            config.update_from_flattened_dict(dict.fromkeys(unset))
        return rest
    except _ConfigFault as error:
        raise error.args[0] from error
    except flags.UnrecognizedFlagError as error:
        usage = (sys.modules["__main__"].__doc__ or "").partition("\n")[0].rpartition(": ")[2]
        near = re.search(r"Did you mean: (\w+)", str(error))
        meant = f"; did you mean --{near[1]}?" if near else ""
        raise UserError(
            f"there is no flag --{error.flagname}{meant}; the usage is {usage}"
        ) from error
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        # absl raises flags.Error. ml_collections raises the other exceptions if a config value on
        # the command line is invalid.
        raise UserError(str(error).strip().splitlines()[-1]) from error


def _check_keys(arguments: list[str]) -> None:
    """Raises UserError if an argument sets a key that the config does not have."""
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if match is None or match[1] in VALUES:
            continue
        if not any(known.startswith(f"{match[1]}.") for known in VALUES):
            raise UserError(unknown_key(match[1]))


def _without_unset(arguments: list[str]) -> tuple[list[str], set[str]]:
    """Removes `--config.KEY=None`, which ml_collections misreads; returns the rest and the keys."""
    set_arguments, unset = [], set()
    for argument in arguments:
        if key := _unset_key(argument):
            unset.add(key)
        else:
            set_arguments.append(argument)
            unset.discard(argument.lstrip("-").removeprefix("config.").partition("=")[0])
    return set_arguments, unset


def _check_written() -> None:
    """Raises UserError if a flag for an output folder or file is a `gs://` or `s3://` URL."""
    for name in WRITTEN & {*flags.FLAGS}:
        value = flags.FLAGS[name].value
        if re.match("(gs|s3)://", str(value)):
            raise UserError(
                f"--{name}={value}: this is written to a folder; copy it to the bucket then"
            )


def _unset_key(argument: str) -> str | None:
    """Returns KEY for an argument `--config.KEY=None`, if the config value KEY may be None."""
    found = re.fullmatch(r"--?config\.([^=]+)=None", argument) if "config" in flags.FLAGS else None
    value = VALUES.get(found[1]) if found else None
    return found[1] if value and (value.default is None or value.optional) else None


def parse_image_size(text: str | None) -> int | tuple[int, int] | None:
    """Parses `384`, or `256x384` (height, width); None: unset. Raises UserError otherwise."""
    if not text:
        return None
    if not (match := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)):
        raise UserError(f"--image_size={text} is neither a number of pixels nor HEIGHTxWIDTH")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def use_compilation_cache() -> None:
    """Makes JAX cache programs in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def code_version() -> dict[str, str]:
    """Returns the versions of Python and libraries, and a hash of each source file of vit_jax."""
    folder = Path(__file__).parent
    hashes = {
        str(path.relative_to(folder.parent)): hashlib.blake2b(
            path.read_bytes(), digest_size=4
        ).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {name: importlib.metadata.version(name) for name in libraries}
    return {"Python": platform.python_version()} | versions | hashes
