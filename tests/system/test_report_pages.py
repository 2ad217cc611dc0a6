"""The report command: pages as files, served by a local server, and rendered by a browser."""

import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.conftest import python_path
from tests.system import browser
from tests.system.conftest import ROOT
from vit_jax.inspection.html_page import render
from vit_jax.inspection.page_charts import curve
from vit_jax.runs.answer_sections import answer_figures
from vit_jax.runs.predictions import Predictions

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


@pytest.fixture(scope="module")
def of(run):
    """Returns a function that starts the command with arguments."""

    environment = run.environment | {"PYTHONPATH": python_path(ROOT)}

    def start(*arguments, **values):
        command = [sys.executable, "-m", "vit_jax.report", *map(str, arguments)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **{"env": environment, "cwd": ROOT} | streams | values)

    return start


def outputs_of(process):
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def begun(finished, tmp_path_factory):
    """Returns the workdir of a run that has no evaluation yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    folder.mkdir()
    for name in ("config.json", "manifest.json", "metrics.jsonl"):
        shutil.copy(finished / name, folder / name)
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(rows[0])
    return folder


@pytest.fixture(scope="module")
def pages(of, finished, begun, tmp_path_factory):
    """Returns a folder with the page of a run and the page of a comparison."""
    out = tmp_path_factory.mktemp("pages")
    one = of(finished, f"--out={out / 'one.html'}")
    several = of(finished, begun, f"--out={out / 'several.html'}")
    assert outputs_of(one)[0] == 0
    code, _, err = outputs_of(several)
    assert code == 0, err
    return out


def test_report_of_a_workdir_is_that_of_its_run(pages, finished):
    def without_times(path):
        return re.sub(r"<td>time<td>.*?</tr>", "", path.read_text())

    assert without_times(pages / "one.html") == without_times(finished / "report.html")
    assert "Worst mistakes" in without_times(pages / "one.html")


def test_comparison_without_a_name_overwrites_only_an_earlier_report(
    of, finished, begun, pages, tmp_path
):
    here, theirs = tmp_path / "comparison.html", tmp_path / "theirs"
    shutil.copy(pages / "one.html", here)
    theirs.mkdir()
    (theirs / here.name).write_text("<p>Two hotels</p>")
    written, refused = of(finished, begun, cwd=tmp_path), of(finished, begun, cwd=theirs)
    code, out, err = outputs_of(written)
    assert code == 0 and out.splitlines()[-1] == str(here), err
    assert here.read_text() == (pages / "several.html").read_text()
    code, _, err = outputs_of(refused)
    assert code == 2 and f"{theirs / here.name} is not a page of vit_jax; give --out=FILE" in err
    assert (theirs / here.name).read_text() == "<p>Two hotels</p>"


def test_run_without_evaluation_is_one_line(of, begun):
    code, out, err = outputs_of(of(begun))
    assert code == 0, err
    note, written = out.splitlines()
    assert note.startswith(f"note: {begun} has no evaluation yet") and written == str(
        begun / "report.html"
    )
    assert "not yet: the first comes at step" in (begun / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "give a workdir"),
        (("{nothing}",), "no run in"),
        (("{run}", "--out={nothing}/a/b.html"), "cannot write"),
        (("{run}", "--serve", "--out=x.html"), "not both"),
    ],
)
def test_mistake_is_one_line(of, finished, tmp_path, arguments, line):
    places = dict(run=finished, nothing=tmp_path / "nothing")
    code, _, err = outputs_of(of(*(argument.format(**places) for argument in arguments)))
    assert code == 2 and err.startswith("error: ") and line in err and err.count("\n") == 1


def test_served_page_follows_the_run(of, finished, begun):
    with of(begun, "--serve", "--port=0") as server:
        try:
            assert "no evaluation yet" in server.stdout.readline()
            address = re.match(r"http://localhost:(\d+)", server.stdout.readline())[0]
            assert (
                'http-equiv="refresh"'
                in urllib.request.urlopen(address, timeout=60).read().decode()
            )
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/config.json", timeout=60)
            port = int(address.rpartition(":")[2])
            # The next request displays changes of the run.
            shutil.copy(finished / "metrics.jsonl", begun / "metrics.jsonl")
            text = urllib.request.urlopen(address, timeout=60).read().decode()
            assert "<td>test accuracy<td>" in text and 'http-equiv="refresh"' not in text
            code, _, err = outputs_of(of(finished, "--serve", f"--port={port}"))
            assert code == 2 and f"error: port {port} cannot be had" in err and err.count("\n") == 1
        finally:
            server.kill()


@browser.needed
@pytest.mark.parametrize("name", ["one", "several"])
def test_page_fits_a_phone_and_a_desk(pages, tmp_path, name):
    """No element exceeds the window or has low contrast, in light and dark mode, and no figure is
    empty.
    """
    probe = f"""page => {{
        page.querySelectorAll('details').forEach(part => part.open = true);
        const figures = [...page.querySelectorAll('figure img, figure svg, svg.matrix')];
        const empty = figures.some(figure => figure.getBoundingClientRect().width < 40);
        return `empty ${{empty}} figures ${{figures.length > 3}} ${{({browser.FAULTS})(page)}}`;
    }}"""
    text = (pages / f"{name}.html").read_text()
    assert browser.looked_at(text, probe, tmp_path) == 4 * ["empty false figures true "]


# Finds layout faults: a word of a class name that is broken over two lines, and a row of charts
# with a gap at its end.
BROKEN = """page => {
    const broken = [];
    for (const part of page.querySelectorAll('.bar span, figcaption')) {
        const words = page.createTreeWalker(part, NodeFilter.SHOW_TEXT);
        for (let node = words.nextNode(); node; node = words.nextNode()) {
            for (const found of node.data.matchAll(/[^\\s_\\/-]+/g)) {
                const range = page.createRange();
                range.setStart(node, found.index);
                range.setEnd(node, found.index + found[0].length);
                const lines = new Set([...range.getClientRects()].map(line => line.top));
                if (lines.size > 1) broken.push(found[0]);
            }
        }
    }
    const charts = [...page.querySelectorAll('.curves')].map(part => {
        const edge = part.getBoundingClientRect().right, rows = new Map();
        for (const chart of part.children) {
            const box = chart.getBoundingClientRect();
            rows.set(box.top, Math.max(rows.get(box.top) || 0, box.right));
        }
        return [...rows.values()].some(right => right < edge - 2);
    });
    return `broken ${broken} gaps ${charts.filter(Boolean).length}`;
}"""


@browser.needed
def test_class_names_only_break_between_words_and_charts_fill_their_rows(tmp_path):
    names = (
        "Lophophorus impejanus, Himalayan monal",
        "Donaudampfschifffahrtsgesellschaft",
        "Cymbidium_goeringii_var_longibracteatum",
        "American Staffordshire Terrier",
    )
    count = 40
    found = Predictions(
        *("test", 1, np.arange(count), np.arange(count, dtype=np.int32)[:, None] % len(names)),
        np.arange(count, dtype=np.int32) // 3 % len(names),
        np.full(count, 0.5, np.float32),
    )
    found = found._replace(shown=np.arange(count), images=np.zeros((count, 80, 80, 3), np.uint8))
    charts = [curve(f"chart {n}", {"": [(1, 1.0), (2, 2.0)]}) for n in range(8)]
    sections = "".join(
        f'<div class="curves">{"".join(f"<figure>{svg}</figure>" for svg in charts[:n])}</div>'
        for n in (2, 3, 4, 5, 7, 8)
    )
    answers = render("answers.html", answers=answer_figures(found, names))
    text = render("base.html", title="A").replace("</body>", f"{answers}{sections}</body>")
    probe = f"page => ({BROKEN})(page) + ({browser.FAULTS})(page)"
    assert browser.looked_at(text, probe, tmp_path) == 4 * ["broken  gaps 0"]
