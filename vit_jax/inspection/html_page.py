"""The one writer of HTML: a page that needs nothing from outside, with sections of figures."""

import base64
import html
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

STYLE = """
:root { color-scheme: light dark; --line: #8884; --wrong: #c62828; --muted: #666; }
@media (prefers-color-scheme: dark) { :root { --wrong: #ff8a80; --muted: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
table { border-collapse: collapse; }
td { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid var(--line); }
td:last-child { font-variant-numeric: tabular-nums; text-align: right; padding-right: 0; }
.curves { display: grid; gap: .8rem; }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.curves figure { background: #fff; border: 1px solid var(--line); border-radius: 6px; margin: 0; }
.curves figure { padding: .4rem; }
.curves svg, .curves img { width: 100%; height: auto; display: block; }
.curves figcaption { color: #222; font-size: .85rem; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); gap: .7rem; }
.samples figure { margin: 0; font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }
.samples img { width: 100%; border-radius: 4px; display: block; }
.samples .small { image-rendering: pixelated; } figcaption { margin-top: .35rem; }
.samples .wrong img { outline: 3px solid var(--wrong); } .samples .wrong b { color: var(--wrong); }
.samples span { color: var(--muted); } pre { overflow-x: auto; font-size: .85rem; }
"""


class Section(NamedTuple):
    """A part of a page; one without content is left out."""

    heading: str  # As text; empty: none.
    content: str  # HTML.
    kind: str = "curves"  # Large figures side by side, or `samples`: small ones.


def write_page(path: Path, title: str, sections: Iterable[Section]) -> Path:
    """Writes the page in one stroke, so that nobody reads half of it; returns `path`."""
    title = html.escape(title)
    body = "\n".join(
        (f"<h2>{html.escape(heading)}</h2>\n" if heading else "")
        + (f'<div class="{kind}">{content}</div>' if kind else content)
        for heading, content, kind in sections
        if content
    )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
    # Several processes may write the page of one folder.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


def picture(caption: str, source: str) -> str:
    """A figure of the image at `source`, an address relative to the page or `inline`'s."""
    caption = html.escape(caption, quote=True)
    return f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>\n'


def remark(text: str) -> str:
    """A figure's place with words in it."""
    return f"<figure><figcaption>{html.escape(text)}</figcaption></figure>\n"


def inline(png: bytes) -> str:
    """The address of an image that the page itself contains."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
