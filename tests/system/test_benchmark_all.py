"""The benchmark `all` starts processes, writes JSON files, and prints a table of figures."""

import json
import sys

import jax
import pytest

from vit_jax.benchmarks import bench_all
from vit_jax.benchmarks.figures import Table

HERE = {
    "commit": "0a1b2c",
    "versions": {"jax": "1.0", "timm": "2.0"},
    "platform": "cpu",
    "machine": "2 cores of a test",
}
# A program with three benchmarks. It adds a line to `log` when it starts.
PROGRAM = """
import sys

name, *_, out = sys.argv[1:]
with open(LOG, "a") as file:
    print(name, file=file)
if name == "broken":
    raise RuntimeError("it is broken")
if name == "absent":
    print("error: the package is not installed", file=sys.stderr)
    sys.exit(2)

from vit_jax.benchmarks.figures import Table, write_record

table = Table("program", {"images/s": ",.1f", "MFU": ".1%"})
table.row("ours", 1234.56, None)
table.skip("theirs", "timm has no such model")
write_record(out.removeprefix("--out="), name, table.figures, HERE)
"""
RUNS = {"broken": (), "good": ("--images=2",), "absent": ()}


@pytest.fixture
def benchmarks(tmp_path):
    """Returns a function that runs the three benchmarks and returns the names of started ones."""
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(f"LOG, HERE = {str(log)!r}, {HERE}\n{PROGRAM}")

    def measure(**arguments) -> list[str]:
        log.write_text("")
        arguments = dict(out=tmp_path / "figures", runs=RUNS, here=HERE) | arguments
        try:
            bench_all.measure(**arguments, program=(sys.executable, str(program)))
        finally:
            measure.started = log.read_text().split()
        return measure.started

    measure.file = tmp_path / "figures" / "good.json"
    return measure


def test_a_failure_and_a_missing_package_do_not_stop_the_other_benchmarks(benchmarks, capfd):
    with pytest.raises(SystemExit) as stopped:
        benchmarks()
    assert stopped.value.code == 1 and benchmarks.started == ["broken", "good", "absent"]
    printed = capfd.readouterr().out
    assert printed.splitlines()[-3:] == [
        "broken: failed: RuntimeError: it is broken",
        "good: measured; theirs: skipped, timm has no such model",
        "absent: skipped: the package is not installed",
    ]
    assert "| ours | 1,234.6 |  |" in printed
    record = json.loads(benchmarks.file.read_text())
    assert record.pop("date") in printed
    assert record == HERE | {
        "name": "good",
        "arguments": ["good", "--images=2"],
        "complete": True,
        "figures": {
            "ours": {"images/s": 1234.56},
            "theirs: skipped": {"reason": "timm has no such model"},
        },
    }


@pytest.mark.slow
def test_only_figures_of_the_same_commit_versions_and_flags_are_current(benchmarks, capfd):
    good = dict(only=["good"])
    assert benchmarks(**good) == ["good"]
    assert benchmarks(**good) == []
    assert "| good, ours, images/s | 1,235 |" in (printed := capfd.readouterr().out)
    assert "old" not in printed and "good: not repeated" in printed
    assert benchmarks(**good, again=True) == ["good"]
    assert benchmarks(**good, more=["--images=4"]) == ["good"]
    assert benchmarks(**good, here=HERE | {"versions": {"jax": "1.1"}}) == ["good"]


@pytest.mark.parametrize(
    "change", [{"commit": "3d4e5f"}, {"versions": {}}, {"machine": "another machine"}]
)
def test_figures_of_another_commit_version_or_machine_are_marked_as_old(benchmarks, change, capfd):
    benchmarks.file.parent.mkdir()
    record = HERE | {"name": "good", "date": "2026-01-02 03:04", "figures": {"a": {"b": 1.5}}}
    benchmarks.file.write_text(json.dumps(record))
    assert benchmarks(only=["absent"], here=HERE | change) == ["absent"]
    (row,) = (line for line in capfd.readouterr().out.splitlines() if "good, a, b" in line)
    assert row == f"| good, a, b | 1.5 | 2026-01-02 03:04 | old: other {[*change][0]} |"


def test_nothing_starts_after_the_time_limit(benchmarks, capfd):
    assert benchmarks(minutes=0) == []
    assert capfd.readouterr().out.count("skipped: no time is left (--minutes)") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "benchmark all writes files: give --out=DIR"),
        (
            ["--out=DIR", "--only=inptu"],
            "unknown benchmark 'inptu' (--only); did you mean 'input'?",
        ),
    ],
)
def test_wrong_flags_are_one_line(run, flags, message):
    result = run("all", *flags, module="vit_jax.benchmark")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"error: {message}"


@pytest.mark.slow
def test_a_benchmark_of_this_package_is_measured_and_skipped_without_its_device(run, tmp_path):
    figures = tmp_path / "figures"
    result = run("all", f"--out={figures}", "--only=gpu,overhead", module="vit_jax.benchmark")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [
        "gpu: skipped: JAX finds no GPU",
        "overhead: measured",
    ]
    record = json.loads((figures / "overhead.json").read_text())
    parts = {name: row["ms (median of 100)"] for name, row in record["figures"].items()}
    assert 0 < parts["start the program"] < parts["host overhead, both"]
    assert record["versions"]["jax"] == jax.__version__ and " cores of " in record["machine"]


def test_all_rows_of_equal_names_are_kept():
    first = Table("program", {"images/s": ".1f"})
    for speed in (1.0, 2.0):
        first.row("timm", speed)
        first.skip("flax", "not installed")
    second = Table("program", {"GiB": ".1f"}, first.figures)
    for size in (3.0, 4.0):
        second.row("timm", size)
    assert first.figures["timm"] == {"images/s": 1.0, "GiB": 3.0}
    assert first.figures["timm (2)"] == {"images/s": 2.0, "GiB": 4.0}
    assert {"flax: skipped", "flax: skipped (2)"} < first.figures.keys()
