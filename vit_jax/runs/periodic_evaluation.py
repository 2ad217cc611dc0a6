"""Evaluations of a run during training and at its end: metrics, log lines, pictures, report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from vit_jax.data.balance import inequality, known_counts
from vit_jax.evaluation.in_training import in_lines
from vit_jax.evaluation.suite import Outputs
from vit_jax.runs.assemble import Parts, evaluation_views
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.evaluator import Evaluator
from vit_jax.runs.predictions import CLASS_FIGURES, keep, metric_in_words
from vit_jax.runs.report_pictures import attention_figures, reconstruction_picture
from vit_jax.runs.retrievals import keep_retrievals
from vit_jax.runs.run_page import write_report
from vit_jax.runs.splits import SPOKEN
from vit_jax.runs.suite_pages import write_suite_page
from vit_jax.runs.workdir import RECONSTRUCTIONS, SEEN_FOLDER
from vit_jax.runs.worst_images import keep_worst
from vit_jax.training.objectives.objective import in_format
from vit_jax.training.program import Evaluated
from vit_jax.training.step import State

# Name of the metric for model selection in self-supervised training: the mean accuracy of all k-NN
# suites.
KNN = "knn"
Figures = dict[str, dict[str, float]]  # The metrics of an evaluation, by split.

# Log lines contain metrics that weight all classes equally, if the largest class has at least 1.5
# times as many images as the smallest class.
UNEQUAL = 1.5
MOST_NEVER = 10  # Maximum number of classes that a note names.


class PeriodicEvaluation:
    """Evaluates a run on the split for model selection, and at the end on the test images.

    Args:
      writer: writes the metrics to `metrics.jsonl`. None: another process writes.

    Attributes:
      chosen_by: name of the split for model selection: `dev`, or `test` without a dev split.
    """

    def __init__(
        self,
        parts: Parts,
        workdir: Path,
        console: Console,
        writer: MetricWriter | None,
        warn: Callable[[str], None],
    ):
        config, program = parts.config, parts.program
        self._parts, self.workdir, self._console, self._writer = parts, workdir, console, writer
        self.chosen_by = parts.splits.chosen_by
        self._evaluate = Evaluator(
            program, parts.splits.named, config, warn, evaluation_views(config)
        )
        places = program.evaluated_places()
        # On balanced splits the balanced accuracy is nearly equal to the accuracy, so it is not
        # logged.
        self._unequal = {
            name
            for name, source in parts.splits.named.items()
            if inequality(known_counts(source)) >= UNEQUAL
        }
        self._suites = parts.suites
        self._suites.attach(
            (program.graphdef, places.params),
            (program.objective, places.objective_params),
            warn,
            self._write_page,
        )

    def __call__(
        self,
        step: int,
        state: State,
        go_on: Callable[[], bool],
        splits: Sequence[str] = (),
        last: bool | None = None,
        kept: int | None = None,
    ) -> Figures | None:
        """Evaluates a training state, writes and logs its metrics, and returns them.

        Args:
          go_on: function that is called before each batch. If it returns False, nothing is written,
            and the result is None.
          splits: splits to evaluate. Empty: the split for model selection, and in the run's last
            evaluation also the test images.
          last: True if this is the run's last evaluation. None: True if `step` is the last step.
          kept: the step of the evaluated parameters, if it differs from `step`.
        """
        last = step == self._parts.steps if last is None else last
        evaluated = self._parts.program.evaluated(state)
        splits = splits or [*dict.fromkeys([self.chosen_by] + ["test"] * last)]
        figures: Figures = {}
        for split in splits:
            if (of_split := self._evaluate(split, evaluated, go_on)) is None:
                return None
            figures[split] = of_split
        row = self._suites(evaluated.params, evaluated.objective_params, step, last, go_on)
        if row is None:
            return None
        for line in (*self.in_words(figures), *in_lines(row)):
            self._console.log(f"step {step} | {line}")
        if last and (never := self._never_predicted(splits[-1])):
            self._console.log(never)
        self._write(step, figures, row, kept)
        worst = self._evaluate.worst([*figures][-1], step, evaluated)
        if worst is not None and self._writer:
            keep_worst(self.workdir, worst)
        self._add_knn(figures, row)
        if self._evaluate.draws:
            self._draw(step, evaluated)
        return figures

    def _write(self, step: int, figures: Figures, row: dict[str, float], kept: int | None) -> None:
        """Writes metrics to `metrics.jsonl`, and the predictions for the last evaluated split.

        Args:
          row: metrics of evaluation suites.
          kept: the step of the evaluated parameters, if it differs from `step`.
        """
        if not self._writer:
            return
        kept_step = {} if kept is None else {"kept/step": kept}
        self._writer.write(step, _by_name(figures) | row | kept_step)
        if predictions := self._evaluate.predictions([*figures][-1], step):
            keep(self.workdir, predictions)
        if retrievals := self._evaluate.retrievals([*figures][-1], step):
            keep_retrievals(self.workdir, retrievals)

    def _write_page(self, outputs: Outputs) -> None:
        """Writes a suite's page, in the process that writes the run's files."""
        if self._writer:
            write_suite_page(self.workdir, outputs)

    def _add_knn(self, figures: Figures, row: dict[str, float]) -> None:
        """Adds the metric for model selection to `figures`: the mean accuracy of k-NN suites."""
        accuracies = [value for key, value in row.items() if key.startswith(f"{KNN}/")]
        if self._parts.config.auto == "pretrain" and accuracies and self.chosen_by in figures:
            figures[self.chosen_by][KNN] = sum(accuracies) / len(accuracies)

    def in_words(self, figures: Figures) -> list[str]:
        """Returns an evaluation in words: a phrase for each split, for a log line."""
        lines = []
        for split, found in figures.items():
            # Metrics that are only computed in training are not in `found`. They are skipped.
            formats = {name: form for name, form in sorted(self._evaluate.metrics.items())}
            if split in self._unequal:
                formats |= CLASS_FIGURES
            parts = [
                f"{split} {metric_in_words(name)} {in_format(found[name], form)}"
                for name, form in formats.items()
                if name in found
            ]
            parts.append(f"{split} loss {found['loss']:.4f} ({found['images']:.0f} images)")
            lines.append(" | ".join(parts))
        return lines

    def _never_predicted(self, split: str) -> str | None:
        """Returns a note on classes that the last evaluation never predicted, if there are any."""
        counts, names = self._evaluate.counts(), self._parts.splits.train.class_names
        if counts is None or not len(never := counts.never_predicted):
            return None
        shown = ", ".join(
            f"{names[label]} (0 of {counts.images[label]:,})" for label in never[:MOST_NEVER]
        )
        more = f" and {len(never) - MOST_NEVER:,} more classes" if len(never) > MOST_NEVER else ""
        return f"note: never predicted in the {SPOKEN[split]} images: {shown}{more}"

    def last_report(self, state: State) -> Callable[[], Path]:
        """Computes the pictures of the final report. All processes must call this method.

        Returns:
          A function that writes the report. Only process 0 calls it.
        """
        params, program = self._parts.program.evaluated(state).params, self._parts.program
        step = int(state["step"])  # With early stopping it is less than `Parts.steps`.
        seen = attention_figures(program.graphdef, params, program.mesh, self._evaluate.images())

        def write() -> Path:
            folder = self.workdir / SEEN_FOLDER
            if seen:
                folder.mkdir(exist_ok=True)
            for name, content in seen.items():
                (folder / name).write_bytes(content)
                if self._writer and name.endswith(".png"):
                    self._writer.picture(step, f"seen/{name.removesuffix('.png')}", content)
            return write_report(self.workdir)

        return write

    def saved(self, figures: Figures) -> dict[str, float]:
        """Returns the metrics to save; those of the split for model selection have no prefix."""
        others = {split: values for split, values in figures.items() if split != self.chosen_by}
        return figures[self.chosen_by] | _by_name(others)

    def restored(self, saved: dict[str, float] | None) -> Figures | None:
        """Converts metrics saved with a checkpoint to metrics by split; the inverse of `saved`."""
        figures = {}
        for name, value in (saved or {}).items():
            split, _, figure = name.rpartition("/")
            figures.setdefault(split or self.chosen_by, {})[figure] = value
        return figures or None

    def _draw(self, step: int, evaluated: Evaluated) -> None:
        """Writes the objective's picture of this step and, except at the last step, a report."""
        images = self._evaluate.pictures(self.chosen_by, evaluated)
        if jax.process_index() != 0:
            return
        file = self.workdir / RECONSTRUCTIONS / f"{step}.png"
        file.parent.mkdir(exist_ok=True)
        picture = reconstruction_picture(images)
        file.write_bytes(picture)
        if self._writer:
            self._writer.picture(step, RECONSTRUCTIONS, picture)
        if step < self._parts.steps:
            write_report(self.workdir)


def _by_name(figures: Figures) -> dict[str, float]:
    """Returns the metrics of all splits in one dict, such as `test/accuracy`."""
    return {f"{split}/{name}": x for split, found in figures.items() for name, x in found.items()}


def since_start(rows: Sequence[Mapping[str, float]], probe: bool) -> list[str]:
    """Returns lines that compare the metrics in `metrics.jsonl` before and after training.

    These are the metrics of self-supervised training or, if the run started from a linear probe
    (`probe`), the test accuracy.
    """
    first = next((row for row in rows if row["step"] == 0), {})
    last = next((row for row in reversed(rows) if "test/loss" in row), {})
    after = "of the kept model" if "kept/step" in last else "after training"
    lines = []
    for key in first:
        if key.startswith(f"{KNN}/"):
            name = key.removeprefix(f"{KNN}/").replace("_", " ")
            words = f"k-NN accuracy on {name}", "before", "after"
        elif key == "test/views_matched":
            words = "test views matched", "before", "after"
        elif key == "test/accuracy" and probe:
            words = "test accuracy", "of the linear probe", after
        else:
            continue
        if key in last:
            lines.append(f"{words[0]}: {first[key]:.2%} {words[1]}, {last[key]:.2%} {words[2]}")
    return lines
