"""Fine-tunes a pre-trained model on your own images: vit-jax finetune PHOTOS.

PHOTOS is a folder with a folder of images for each class, or with folders train, val and test that
contain such folders; a CSV with the columns file and label; a prepared TFDS data set; or tfds:NAME.
Splits, image size, batch size, number of steps, learning rate and other values are chosen according
to the data, the checkpoint and the device. They are printed with the reasons.

First a linear probe on the model's features initializes the head. Then all layers are trained, and
the checkpoint that is best on validation images is kept. The report is report.html in the workdir.
"""

import time
from typing import Any

STARTED = time.time()

from vit_jax.huge_pages import restart_with_huge_pages  # noqa: E402

if __name__ == "__main__":
    restart_with_huge_pages()

from absl import flags  # noqa: E402

from vit_jax import command  # noqa: E402
from vit_jax.config import check, given_keys  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402
from vit_jax.published.weights import checkpoint_of  # noqa: E402

COMMON = (
    *("data.classes", "data.image_size", "batch_size", "steps", "optimizer.learning_rate"),
    *("finetune.head", "finetune.train", "early_stopping", "data.flip", "seed"),
)
LEAK_SECONDS = 10.0  # Maximum time for a search for near-duplicates of test images.

CONFIG = command.define_config("The recipe.", "my_images")
FROM = flags.DEFINE_string(
    "from",
    None,
    "The checkpoint: a folder, a file, a workdir, hf://owner/name or a published model; by "
    "default DINOv2.",
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Workdir of the run; by default runs/NAME-1, runs/NAME-2, ..."
)
GROUP = flags.DEFINE_string(
    "group",
    None,
    "Keeps images of a group in one split: a regular expression of the path, or a CSV's column; "
    "none: no groups. By default groups are recognized by file names.",
)
BALANCE = flags.DEFINE_enum(
    "balance",
    None,
    ["none", "sqrt", "full"],
    "How much more often images of rare classes are sampled.",
)
MINUTES = flags.DEFINE_float(
    "minutes", None, "Approximate duration of the run; by default 10 on CPUs."
)


def main(arguments: list[str]) -> None:
    config = CONFIG.value
    if len(arguments) > 1:
        raise UserError(f"unexpected argument {arguments[1]!r}: give one folder, CSV or data set")
    config.update_from_flattened_dict(_of_short_flags(arguments))
    if not config.data.path and config.data.source in ("digits", "folder"):
        raise UserError("name the images: vit-jax finetune PHOTOS")
    command.use_compilation_cache()
    options = check(config, file=command.as_in_file(config))

    from vit_jax.preparation.duplicate_search import leak_note
    from vit_jax.runs.choices import next_workdir, settle
    from vit_jax.runs.choices.finetuning import open_split
    from vit_jax.runs.loop import train
    from vit_jax.runs.workdir import steps_made, workdir_at

    workdir = workdir_at(WORKDIR.value or next_workdir(options.data.path))
    options = settle(options, given_keys(config), workdir)
    if not steps_made(workdir):
        train_split, test_split = (
            open_split(options, split)
            for split in (options.data.train_split, options.data.test_split)
        )
        if line := leak_note(train_split, test_split, "test", LEAK_SECONDS):
            print(f"warning: {line}")
    train(options, workdir, started=STARTED)


def _of_short_flags(arguments: list[str]) -> dict[str, Any]:
    """Returns the config values, by dotted key, that PHOTOS and the short flags set."""
    short = {"data.groups": GROUP.value, "data.balance": BALANCE.value, "minutes": MINUTES.value}
    short["finetune.checkpoint"] = FROM.value and checkpoint_of(FROM.value)
    short["data.path"] = arguments[0] if arguments else None
    values = {key: value for key, value in short.items() if value is not None}
    return values | ({"data.groups": None} if GROUP.value == "none" else {})


if __name__ == "__main__":
    command.run(main, COMMON)
