"""Writer of self-contained HTML pages with sections of figures."""

import base64
import functools
import hashlib
import html
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MARK = '<meta name="generator" content="vit_jax">'


class Section(NamedTuple):
    """Part of a page; empty sections are skipped."""

    heading: str  # As text; empty: none.
    content: str  # HTML.
    # CSS class: `curves` for figures side by side, `pictures` for larger, `samples` for small ones.
    kind: str = "curves"


def policy(script: str = "") -> str:
    """Returns the Content-Security-Policy of a page: its own images only, no loads, no scripts.

    Args:
      script: the script that the page may run; it may send requests to the page's own server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = f"script-src 'sha256-{digest}'; connect-src 'self'; " if script else ""
    shows = "img-src data:; style-src 'unsafe-inline'; "
    return f"default-src 'none'; {runs}{shows}base-uri 'none'; form-action 'none'"


def policy_tag(script: str = "") -> str:
    """Returns the tag with a page's `policy`, which must precede all content."""
    return f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'


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
      template: file in `templates`; one that extends `base.html` is a whole page.
      values: the template's variables; text is escaped. Pages have a `title`, and may have
        `refresh`: the seconds after which the page reloads itself.
    """
    return _environment().get_template(template).render(values)


def page(
    title: str, sections: Iterable[Section], refresh: int | None = None, script: str = ""
) -> str:
    """Returns a page as HTML.

    Args:
      refresh: seconds after which the page reloads itself; None: never.
      script: JavaScript that runs at the end of the page.
    """
    return render("sections.html", title=title, refresh=refresh, sections=sections, code=script)


def write_page(
    path: Path,
    title: str,
    sections: Iterable[Section],
    refresh: int | None = None,
    script: str = "",
) -> Path:
    """Writes a page, see `page`; returns `path`."""
    return write_text(path, page(title, sections, refresh, script))


def write_text(path: Path, text: str) -> Path:
    """Writes a file atomically, so that no reader receives half of it; returns `path`."""
    # Several processes may write the page of one folder.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return temporary.replace(path)


def is_page(path: Path) -> bool:
    """Returns True for a page that vit_jax wrote, which a newer one may replace."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def table(rows: Mapping[str, str], kind: str = "") -> str:
    """Returns a table with two columns: names and values."""
    lines = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}</tr>" for k, v in rows.items())
    return f'<table class="{kind}">{lines}</table>' if kind else f"<table>{lines}</table>"


def breakable(text: str) -> str:
    """Returns text as HTML with optional line breaks after underscores and slashes."""
    from markupsafe import Markup

    return Markup(re.sub("([_/])", r"\1<wbr>", html.escape(text, quote=True)))


def bar(name: str, figures: str, share: float | None = None) -> str:
    """Returns a name and its figures, above a bar of `share` in 0 ... 1 if it is not None."""
    drawn = "" if share is None else f'<meter min="0" max="1" value="{share:.4f}"></meter>'
    title = html.escape(name, quote=True)
    return (
        f'<div class="bar"><span title="{title}">{breakable(name)}</span>'
        f"<span>{html.escape(figures)}</span>{drawn}</div>"
    )


def card_width(names: Iterable[str]) -> str:
    """Returns a style for `samples` with cards as wide as the longest word, within bounds."""
    longest = max((len(word) for name in names for word in re.split(r"[\s_/]+", name)), default=0)
    return f"--card: {min(max(5.2, 0.52 * longest + 0.6), 10):.1f}rem"


def note(text: str) -> str:
    """Returns a paragraph of text."""
    return f'<p class="muted">{html.escape(text)}</p>'


def folded(summary: str, content: str) -> str:
    """Returns HTML that is shown when its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def picture(caption: str, source: str) -> str:
    """Returns a figure of the image at `source`, a relative URL or a data URL of `inline`."""
    caption = html.escape(caption, quote=True)
    return (
        f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>\n'
    )


def remark(text: str) -> str:
    """Returns text in the place of a figure."""
    return f"<figure><figcaption>{html.escape(text)}</figcaption></figure>\n"


def inline(encoded: bytes, kind: str = "png") -> str:
    """Returns the data URL of an image."""
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
