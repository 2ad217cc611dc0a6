"""Writes the ledger as a page, and inserts tables of records into other pages."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError, nearest
from vit_jax.ledger.records import PICTURES, ROOT, how_far, result_of, verdict_of
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, pairs_in_words
from vit_jax.progress import duration

PAGE = ROOT / "LEDGER.md"
BLOCK = re.compile(r"(<!-- (record|verdict) ([\w-]+) -->\n).*?(<!-- end of record -->)", re.DOTALL)


def page(experiments: Mapping[str, Experiment], records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the text of LEDGER.md: a line for each record, then a section for each experiment."""
    names = sorted(experiments, key=lambda name: order(experiments[name].place, name))
    lines = [
        "# The ledger",
        "",
        "Every table, figure and claim of the paper that is a command here, with what came out "
        "of it.",
        "Written by `python -m vit_jax.experiment ledger` from the records in "
        "`experiments/records/`;",
        "`python -m vit_jax.experiment record NAME DIR` makes a record of the runs in a folder.",
        "Laptop scale is small images and models on two processor cores: it can show orderings "
        "and slopes,",
        "never the paper's accuracies, which stand beside ours only where the same thing is "
        "measured.",
        "",
    ]
    sections = {
        "The paper": [name for name in names if experiments[name].place],
        "Follow-ups and methods": [name for name in names if not experiments[name].place],
    }
    for title, chosen in sections.items():
        lines += [f"**{title}**", "", summary(chosen, experiments, records), ""]
    lines.pop()
    for name in names:
        lines += section(name, experiments[name], records)
    return "\n".join(lines) + "\n"


def section(
    name: str, experiment: Experiment, records: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Returns the section of an experiment as lines: its claim, its command and its records."""
    whose = "The paper's claim" if experiment.place else "The claim"
    lines = ["", f"## {heading(name, experiment)}", "", f"{whose}: {experiment.claim}", ""]
    lines.append(f"`python -m vit_jax.experiment {name} --out=DIR`{needs(experiment)}")
    recorded = [records[key] for key in (name, f"{name}-paper") if key in records]
    for record in recorded:
        lines += ["", block(experiment, record)]
    if not recorded:
        lines += ["", "Not recorded yet."]
    return lines


def summary(
    names: Sequence[str],
    experiments: Mapping[str, Experiment],
    records: Mapping[str, Mapping[str, Any]],
) -> str:
    """Returns a table with a line for each record: link, claim, scale, and verdict with reason."""
    lines = []
    for name in names:
        for key in (name, f"{name}-paper"):
            if key in records:
                title = heading(name, experiments[name])
                scale, result = result_of(records[key])
                word = verdict_of(records[key])[0]
                link = f"[{title}](#{anchor(title)})"
                lines.append([link, experiments[name].claim, scale, f"**{word}**: {result}"])
    return markdown_table(("entry", "claim", "scale", "verdict and result"), lines)


def anchor(title: str) -> str:
    """Returns the URL fragment of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def heading(name: str, experiment: Experiment) -> str:
    """Returns a heading: the experiment's place in the paper and its name."""
    return f"{experiment.place}: {name}" if experiment.place else name


def order(place: str, name: str) -> tuple:
    """Returns the sort key: tables, figures, sections, appendices by number, then our own."""
    kinds = ("Table", "Figure", "Section", "Appendix", "")
    kind, _, rest = place.partition(" ")
    numbers = [int(number) for number in re.findall(r"\d+", rest)]
    return (kinds.index(kind) if kind in kinds else len(kinds), numbers, name)


def needs(experiment: Experiment) -> str:
    """Returns a text about the requirements of an experiment: time, and packages or data."""
    if experiment.read is None:
        return " has the paper's scale alone" + (
            f"; needs {experiment.needs}" if experiment.needs else ""
        )
    time = f"about {duration(60 * experiment.minutes)} of two cores"
    return f": {time}" + (f"; needs {experiment.needs}" if experiment.needs else "")


def block(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """Returns a record in Markdown: runs, table of results, finding, verdict and pictures."""
    scaled = experiment.at(record["scale"])
    spent = f", {duration(record['seconds'])} of runs" if record["seconds"] else ""
    seeds = len(record["seeds"])
    spent += f", {seeds} seeds (cells without ± have one)" if seeds > 1 else ", one seed" * seeds
    lines = [
        f"{how_far(record).capitalize()}{spent} on {record['machine']}:",
        "",
        scaled.markdown(record["figures"]),
    ]
    if record["finding"]:
        lines += ["", record["finding"]]
    lines += ["", against_published(scaled, record), "", verdict_in_words(record)]
    pictures = PICTURES.glob(f"{record['experiment']}*.png") if record["scale"] == "laptop" else ()
    for picture in sorted(pictures):
        if re.fullmatch(rf"{record['experiment']}(-.+)?", picture.stem):
            alternative = (
                f"ours: {experiment.place or record['experiment']}, {verdict_of(record)[0]}"
            )
            lines += ["", f"![{alternative}]({picture.relative_to(ROOT)})"]
    return "\n".join(lines)


def against_published(scaled: Experiment, record: Mapping[str, Any]) -> str:
    """Returns a text that compares results with published values, or why there are none."""
    if not record["difference"]:
        return f"Published: {record['published']}."
    apart = [abs(number) for cells in record["difference"].values() for number in cells.values()]
    if not any(apart):
        return f"All {len(apart)} differences to published numbers are 0."
    if scaled.table:
        return f"Ours (and published): {pairs_in_words(record['published'], record['difference'])}"
    shares = {
        f"{row} of {column}": number / record["published"][row][column]
        for row, cells in record["difference"].items()
        for column, number in cells.items()
    }
    widest = max(shares, key=lambda name: abs(shares[name]))
    return (
        f"The widest of {len(shares)} differences to published figures is {shares[widest]:+.1%}, "
        f"{widest}."
    )


def verdict_in_words(record: Mapping[str, Any]) -> str:
    """Formats a record's verdict, such as "**Contradicts the claim.** BiTs lead throughout."."""
    word, reason = verdict_of(record)
    return f"**{word[0].upper()}{word[1:]}.** {reason}"


def with_records(
    text: str, experiments: Mapping[str, Experiment], records: Mapping[str, Mapping[str, Any]]
) -> str:
    """Inserts records' tables and verdicts into the marked blocks of a page.

    Blocks start with `<!-- record NAME -->` (for the table) or `<!-- verdict NAME -->` (for the
    verdict), and end with `<!-- end of record -->`.

    Raises:
      UserError: a record does not exist.
    """

    def table(match: re.Match) -> str:
        kind, name = match[2], match[3]
        if name not in records:
            raise UserError(f"no record {name!r}; {nearest(name, records)}")
        record = records[name]
        scaled = experiments[record["experiment"]].at(record["scale"])
        text = verdict_in_words(record) if kind == "verdict" else scaled.markdown(record["figures"])
        return f"{match[1]}{text}\n{match[4]}"

    return BLOCK.sub(table, text)
