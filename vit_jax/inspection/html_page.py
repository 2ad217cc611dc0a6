"""Writer of self-contained HTML pages with sections of figures."""

import base64
import hashlib
import html
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

MARK = '<meta name="generator" content="vit_jax">'
STYLE = """
:root { color-scheme: light dark; --line: #8884; --wrong: #c62828; --right: #2e7d32; --muted: #666; }
@media (prefers-color-scheme: dark) { :root { --wrong: #ff8a80; --right: #81c784; --muted: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
td, th { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; }
td, th { vertical-align: top; overflow-wrap: anywhere; }
td:last-child { font-variant-numeric: tabular-nums; padding-right: 0; }
th { font-weight: 600; font-size: .85rem; color: var(--muted); overflow-wrap: normal; }
.compared td, .compared th { overflow-wrap: break-word; padding-right: 1rem; }
.figures td:last-child { text-align: right; }
.facts td:first-child { white-space: nowrap; }
.muted, .samples span { color: var(--muted); } .scroll { overflow-x: auto; }
.curves { display: grid; gap: .8rem; grid-template-columns: repeat(6, 1fr); }
.curves figure { grid-column: span 6; }
@media (min-width: 44rem) {
  .curves figure { grid-column: span 3; }
  .curves figure:last-child:nth-child(2n+3) { grid-column: span 6; }
}
@media (min-width: 62rem) { /* Three in a row, and no row with a gap: two in the first or the first two. */
  .curves figure, .curves figure:last-child:nth-child(2n+3) { grid-column: span 2; }
  .curves figure:first-child:nth-last-child(3n+1):not(:only-child),
  .curves figure:first-child:nth-last-child(3n+4) ~ figure:nth-child(-n+4),
  .curves figure:first-child:nth-last-child(3n+2), .curves figure:first-child:nth-last-child(3n+2) + figure
  { grid-column: span 3; }
}
.pictures { columns: 2 28rem; column-gap: .8rem; }
.pictures figure { break-inside: avoid; margin: 0 0 .8rem; }
.curves figure { margin: 0; } .curves figure, .pictures figure { border: 1px solid var(--line); }
.curves figure, .pictures figure { border-radius: 6px; }
.curves figure, .pictures figure { padding: .4rem; min-width: 0; }
.curves svg, .curves img, .pictures svg, .pictures img { width: 100%; height: auto; display: block; }
.curves img, img[src^="data:image/svg"] { background: #fff; }
.curves figcaption, .pictures figcaption { font-size: .85rem; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(var(--card, 5.2rem), 1fr)); }
.samples { gap: .7rem; } .samples figure { margin: 0; min-width: 0; font-size: .8rem; line-height: 1.35; }
.samples figcaption, .bar span { overflow: hidden; text-overflow: ellipsis; }
.samples img { width: 100%; border-radius: 4px; display: block; }
.samples .small { image-rendering: pixelated; } figcaption { margin-top: .35rem; }
.samples .wrong img { outline: 3px solid var(--wrong); } .samples .wrong b { color: var(--wrong); }
.beside { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; align-items: flex-start; }
.beside > * { min-width: 0; max-width: 100%; } .beside > .scroll { flex: 0 1 auto; }
.matrix { width: 100%; height: auto; display: block; font-size: 11px; } .matrix text { fill: currentColor; }
.matrix .hit { fill: var(--right); } .matrix .miss { fill: var(--wrong); }
.bars { columns: 21rem; column-gap: 2.5rem; min-width: 0; } .beside > .bars { flex: 1 1 21rem; }
.bar { display: flex; flex-wrap: wrap; justify-content: space-between; column-gap: .8rem; }
.bar { break-inside: avoid; padding-bottom: .45rem; font-size: .9rem; line-height: 1.35; }
.bar span { max-width: 100%; } .bar span + span { color: var(--muted); font-variant-numeric: tabular-nums; }
.bar span + span { margin-left: auto; } .bar meter { width: 100%; height: .85rem; }
.warning { border-left: 3px solid var(--wrong); padding-left: .8rem; margin: .6rem 0; }
pre { overflow-x: auto; font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 1rem 0; } summary { cursor: pointer; } details > :not(summary) { margin-top: .6rem; }
"""


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


def page(
    title: str, sections: Iterable[Section], refresh: int | None = None, script: str = ""
) -> str:
    """Returns a page as HTML.

    Args:
      refresh: seconds after which the page reloads itself; None: never.
      script: JavaScript that runs at the end of the page.
    """
    title = html.escape(title)
    body = "\n".join(
        (f"<h2>{html.escape(heading)}</h2>\n" if heading else "")
        + (f'<div class="{kind}">{content}</div>' if kind else content)
        for heading, content, kind in sections
        if content
    )
    runs = f"<script>{script}</script>" if script else ""
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{policy_tag(script)}{again}
<meta name="viewport" content="width=device-width">
{MARK}<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>
{body}{runs}
</body></html>
"""


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
    return re.sub("([_/])", r"\1<wbr>", html.escape(text, quote=True))


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
