"""Self-contained HTML pages from the Jinja2 templates in `templates`."""

import base64
import functools
import hashlib
import html
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MARK = '<meta name="generator" content="vit_jax">'


def policy(script: str = "") -> str:
    """Returns a Content-Security-Policy that allows only embedded images, and no scripts.

    Args:
      script: a script to allow, which may send requests to the page's own server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = f"script-src 'sha256-{digest}'; connect-src 'self'; " if script else ""
    shows = "img-src data:; style-src 'unsafe-inline'; "
    return f"default-src 'none'; {runs}{shows}base-uri 'none'; form-action 'none'"


@functools.cache
def _environment():
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vit_jax.inspection"),
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"mark": MARK, "policy": policy}
    environment.filters["breakable"] = breakable
    return environment


def render(template: str, **values: Any) -> str:
    """Returns the HTML of a template.

    Args:
      template: file in `templates`. A template that extends `base.html` is a complete page.
      values: the template's variables; text is escaped. A complete page needs `title`. With
        `refresh` the browser reloads the page after this number of seconds.
    """
    return _environment().get_template(template).render(values)


def write_text(path: Path, text: str) -> Path:
    """Writes a file atomically; returns `path`."""
    # The temporary file has a random name, because several processes may write the same page.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return temporary.replace(path)


def is_page(path: Path) -> bool:
    """Returns True if vit_jax has written the file. Only such a page may be overwritten."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def breakable(text: str) -> str:
    """Converts text to HTML with optional line breaks after underscores and slashes."""
    from markupsafe import Markup

    return Markup(re.sub("([_/])", r"\1<wbr>", html.escape(text, quote=True)))


def card_width(names: Iterable[str]) -> str:
    """Returns the CSS variable `--card`: the width of a page's cards, in rem.

    The width fits the longest word of the cards' names, between 5.2 and 10 rem.
    """
    longest = max((len(word) for name in names for word in re.split(r"[\s_/]+", name)), default=0)
    return f"--card: {min(max(5.2, 0.52 * longest + 0.6), 10):.1f}rem"


def inline(encoded: bytes, kind: str = "png") -> str:
    """Returns the data URL of an image."""
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
