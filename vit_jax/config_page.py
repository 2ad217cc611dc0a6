"""Documentation of all config values: the page docs/config.md, and a listing for the terminal."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config import SECTIONS, VALUES
from vit_jax.errors import UserError, nearest
from vit_jax.options.option import Option

WIDTH = 100  # Width of listings in characters.
GOES_ON = "May be changed when a run resumes."


def page() -> str:
    """Returns the page `docs/config.md`."""
    lines = [
        "# Every value of a config",
        "",
        "Written by `python docs/write_config.py` from the options in `vit_jax/options/`;",
        "`python -m vit_jax.main --helpfull` lists the same, and `--help=optimizer` one section "
        "of it.",
        "A config file sets a value as `config.optimizer.learning_rate = 1e-3`, the command line "
        "as",
        "`--config.optimizer.learning_rate=1e-3` or, where None is allowed, "
        "`--config.data.dev_split=None`.",
    ]
    for section, title in SECTIONS.items():
        keys = _keys(section)
        lines += ["", f"## {section or 'The run'}", "", f"{_one_line(title)}.", ""]
        lines += ["| value | default | may be | meaning |", "|---|---|---|---|"]
        for key in keys:
            option = VALUES[key]
            cells = f"`{key}`", f"`{option.default!r}`", _may_be(option), _meaning(option)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def types() -> str:
    """Returns the source of `vit_jax/config_types.py`: types of all config values, for editors."""
    lines = [
        '"""The types of a config\'s values, for editors. Written by docs/write_config.py."""',
        "",
        "from collections.abc import Mapping",
        "from typing import Any",
        "",
        "from ml_collections import ConfigDict",
        "",
        "",
        "class Section(ConfigDict):",
        '    """A config, or a section of one."""',
        "",
        "    def update(self, *other: Mapping[str, Any], **values: Any) -> None:",
        '        """Sets several values."""',
        "        super().update(*other, **values)",
    ]
    # The class of the whole config refers to the classes of the sections, so it comes last.
    for section in sorted(SECTIONS, key=lambda section: not section):
        lines += ["", "", f"class {_class_of(section)}(Section):"]
        about = f"Values of `config.{section}`" if section else "All values of a config"
        lines += [f'    """{about}."""', ""]
        lines += [
            f"    {key.rpartition('.')[2]}: {_type_of(VALUES[key])}" for key in _keys(section)
        ]
        lines += [f"    {name}: {_class_of(name)}" for name in SECTIONS if name and not section]
    return "\n".join(lines) + "\n"


def _one_line(title: str) -> str:
    return " ".join(title.split())


def _class_of(section: str) -> str:
    return f"{section.capitalize()}Config" if section else "TypedConfig"


def _type_of(option: Option) -> str:
    kind = "tuple[Any, ...]" if option.rule.kind is tuple else option.rule.kind.__name__
    return f"{kind} | None" if option.default is None or option.optional else kind


def listing(section: str | None = None) -> str:
    """Lists config values, of one section or of all; raises UserError for an unknown one."""
    if section is not None and section not in SECTIONS:
        raise UserError(
            f"there is no section {section!r} in a config; {nearest(section, SECTIONS)}"
        )
    lines = []
    for name, title in SECTIONS.items() if section is None else [(section, SECTIONS[section])]:
        lines += ["", *textwrap.wrap(f"{_one_line(title)}:", WIDTH)]
        for key in _keys(name):
            lines += [*_lines(key, VALUES[key].default)]
    return "\n".join(lines[1:])


def short_listing(values: Mapping[str, Any]) -> str:
    """Returns a listing of some config values, by dotted key, for a terminal."""
    return "\n".join(line for key, value in values.items() for line in _lines(key, value))


def _lines(key: str, value: Any) -> Iterator[str]:
    yield f"  --config.{key}={value}"
    meaning = f"{_meaning(VALUES[key])} ({_may_be(VALUES[key])})"
    yield from textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _keys(section: str) -> list[str]:
    return [key for key in VALUES if key.rpartition(".")[0] == section]


def _may_be(option: Option) -> str:
    none = "None, or " if option.default is None or option.optional else ""
    return f"{option.rule.kind.__name__}: {none}{option.rule.words}"


def _meaning(option: Option) -> str:
    return f"{option.help} {GOES_ON}" if option.operational else option.help
