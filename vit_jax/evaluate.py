"""Evaluates a model: python -m vit_jax.evaluate --checkpoint=WORKDIR --suite=fewshot --out=DIR.

--suite is one suite, several suites separated by commas, or `all`:

  imagenet  top-1 and top-5 on ImageNet's validation images, ReaL's labels (--real), ImageNet-v2,
            ObjectNet (--objectnet): for a model with ImageNet's 1,000 classes
  vtab      fine-tuning on the 19 tasks of VTAB-1k with configs/finetune.py (--value changes values)
  fewshot   least squares on the frozen model's features, with 1 to 25 training images per class
  knn       k-NN classification with the frozen model's features of all training images
  probe     a linear probe on the frozen model's features of all training images, by L-BFGS
  sgd_probe DINOv2's linear probe by SGD: the best of several learning rates and feature sets
            (class tokens, with and without patch tokens)
  zero_shot top-1 and top-5 by class names, for an image-text model (--names, --templates)
  retrieval recall of captions and of images at 1, 5 and 10, for an image-text model
  segmentation
            mIoU and pixel accuracies on --set=FOLDER with images and masks. For a checkpoint
            without a segmentation head, a linear layer is trained on the frozen model first
            (--segmentation_steps)
  detection COCO's AP and AR, for a detection run: --set=FOLDER with COCO's files
  depth     RMSE, AbsRel and delta, for a depth run: --set=FOLDER of images and depth maps

The command writes results.json, results.md (with the paper's values for comparison) and
results.png. The last five suites also write pages with pictures. If the same command is run again,
it reuses results for the same checkpoint, step, parameters and data. A missing data set gets a row
that explains how to get it. If no figure could be computed, the exit code is 2.
"""

from collections.abc import Sequence

from absl import flags

from vit_jax import command
from vit_jax.errors import UserError
from vit_jax.evaluation.results import Results, draw
from vit_jax.evaluation.suite import SuiteOption
from vit_jax.evaluation.suites import SUITES
from vit_jax.run_suites import chosen_suites, run_suites

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Checkpoint: a workdir, a file or hf://owner/name, as in load_model."
)
SUITE = flags.DEFINE_list("suite", [], f"Of {', '.join(SUITES)}, or all.")
OUT = flags.DEFINE_string("out", None, "Folder for the results; give it again to resume.")
IMAGE_SIZE = flags.DEFINE_integer(
    "image_size", None, "Pixels, if not the checkpoint's (VTAB's are 384).", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Images at once, of all devices.", lower_bound=1
)
WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "Processes that decode images, if not chosen by cores and images.",
    lower_bound=0,
)
SUITE_OPTIONS = {
    name: option for suite in SUITES.values() for name, option in suite.options.items()
}
FLAGS = {
    name: (flags.DEFINE_multi_string if option.repeated else flags.DEFINE_string)(
        name, None, option.in_words
    )
    for name, option in SUITE_OPTIONS.items()
}


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not CHECKPOINT.value or not OUT.value or not SUITE.value:
        raise UserError("give --checkpoint=WORKDIR, --suite=fewshot and --out=DIR")
    check_applicable([name for name in FLAGS if FLAGS[name].value is not None])
    options = {
        name: parsed(name, option, FLAGS[name].value)
        for name, option in SUITE_OPTIONS.items()
        if FLAGS[name].value is not None
    }
    command.use_compilation_cache()
    results = run_suites(
        CHECKPOINT.value,
        SUITE.value,
        OUT.value,
        options=options,
        image_size=IMAGE_SIZE.value,
        batch_size=BATCH_SIZE.value,
        workers=WORKERS.value,
        log=lambda line: print(line, flush=True),
    )
    text = results.markdown()
    (results.folder / "results.md").write_text(text)
    files = ["results.md", "results.json"]
    if draw(results.folder / "results.png", results.rows):
        files.append("results.png")
    print(f"\n{text}\n{results.folder}: {', '.join(files)}")
    _check_measured(results)


def check_applicable(given: Sequence[str]) -> None:
    """Raises UserError if a suite is unknown, or if no chosen suite has a flag that is given."""
    chosen = chosen_suites(SUITE.value)
    for name in given:
        if not any(name in suite.options for suite in chosen):
            owners = ", ".join(suite.name for suite in SUITES.values() if name in suite.options)
            raise UserError(
                f"--{name} does not apply to --suite={','.join(SUITE.value)}: leave it out, or add "
                f"a suite that has it: {owners}"
            )


def _check_measured(results: Results) -> None:
    """Raises UserError if none of the chosen suites could compute a metric."""
    chosen = {suite.name for suite in chosen_suites(SUITE.value)}
    rows = [row for (suite, _), row in results.rows.items() if suite in chosen]
    if rows and all(row.accuracy is None for row in rows):
        raise UserError(f"nothing was evaluated: {rows[0].note}")


def parsed(name: str, option: SuiteOption, value):
    """Returns a suite's flag, parsed from a text or from texts, or raises UserError."""
    try:
        return option.parse(value)
    except UserError as error:
        shown = f"--{name}" if option.repeated else f"--{name}={value}"
        text = str(error)
        raise UserError(text if text.startswith(f"--{name}") else f"{shown}: {text}") from error
    except ValueError as error:
        raise UserError(f"--{name}={value}: {error}") from error


if __name__ == "__main__":
    command.run(main)
