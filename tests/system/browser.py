"""Headless Chromium, for tests of HTML pages."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import HANG

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr"
)
WINDOWS = [(width, scheme) for width in (400, 1300) for scheme in ("light", "dark")]

needed = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# Text whose contrast with its background is below WCAG's minimum of 4.5, and elements that are
# wider than the window.
FAULTS = """page => {
    const view = page.defaultView, dark = view.matchMedia('(prefers-color-scheme: dark)').matches;
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => parts(colour).slice(0, 3).map(part => part / 255).map(
        part => part <= .04 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4
    ).reduce((sum, part, index) => sum + part * [.2126, .7152, .0722][index], 0);
    const behind = element => {
        if (!element) return dark ? 'rgb(18, 18, 18)' : 'rgb(255, 255, 255)';
        const colour = view.getComputedStyle(element).backgroundColor;
        return (parts(colour)[3] ?? 1) > .5 ? colour : behind(element.parentElement);
    };
    const faint = [...page.body.querySelectorAll('*')].filter(element => {
        const words = [...element.childNodes].some(node => node.nodeType == 3 && node.data.trim());
        if (!words || !element.checkVisibility() || element.matches('script, style, template')) return false;
        const style = view.getComputedStyle(element);
        const two = [light(element.ownerSVGElement ? style.fill : style.color), light(behind(element))];
        return (Math.max(...two) + .05) / (Math.min(...two) + .05) < 4.5;
    });
    const wide = page.documentElement.scrollWidth > view.innerWidth;
    return (wide ? 'wide ' : '') + faint.map(element => `faint: ${element.textContent.trim().slice(0, 40)}`);
}"""


def looked_at(text: str, probe: str, folder: Path) -> list[str]:
    """Returns the results of a JavaScript function on a page in each of `WINDOWS`.

    Args:
      text: the page's HTML.
      probe: the JavaScript function; its argument is the page's document.
      folder: a folder for temporary files.
    """
    frames = "".join(
        f'<iframe width="{width}" height="900" style="color-scheme: {scheme}"></iframe>'
        for width, scheme in WINDOWS
    )
    script = f"""<script>
        const probe = {probe};
        const frames = [...document.querySelectorAll('iframe')];
        let left = frames.length;
        for (const frame of frames) {{
            frame.onload = () => {{
                if (--left) return;
                const found = frames.map(frame => probe(frame.contentDocument));
                document.body.innerHTML = '<pre></pre>';
                document.querySelector('pre').textContent = found.map(text => `<<${{text}}>>`).join('');
            }};
            frame.srcdoc = document.querySelector('textarea').value;
        }}
    </script>"""
    file = folder / "looked_at.html"
    file.write_text(f"<!doctype html><textarea hidden>{_escaped(text)}</textarea>{frames}{script}")
    shown = re.findall("&lt;&lt;(.*?)&gt;&gt;", dom(f"file://{file}", folder), re.DOTALL)
    assert len(shown) == len(WINDOWS)
    return shown


def dom(address: str, folder: Path) -> str:
    """Returns a page's HTML after its scripts have run; fails if the page logs to the console."""
    process = subprocess.run(
        [
            *(CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}"),
            *("--window-size=1800,1000", "--virtual-time-budget=5000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"HOME": str(folder)},
    )
    assert "CONSOLE" not in process.stderr, process.stderr[-3000:]
    return process.stdout


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
