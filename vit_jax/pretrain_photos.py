"""Trains without labels on your own images: vit-jax pretrain PHOTOS.

PHOTOS is a folder of images, which may be in inner folders of any depth. A pre-trained model is
trained further with DINOv2's losses. Image size, crops, batch size, number of steps and learning
rate are chosen according to the images, the checkpoint and the device. They are printed with the
reasons. Some images are held out for evaluation.

If the folders are classes, the accuracy of k-NN is printed before and after training, and the
better features are kept. The labels are not used in training. Then run: vit-jax finetune PHOTOS
--from=WORKDIR
"""

import time

STARTED = time.time()

from vit_jax.huge_pages import restart_with_huge_pages  # noqa: E402

if __name__ == "__main__":
    restart_with_huge_pages()

from absl import flags  # noqa: E402

from vit_jax import command  # noqa: E402
from vit_jax.config import check, given_keys  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402

CONFIG = command.define_config("The recipe.", "my_images_unlabelled")
FROM = flags.DEFINE_string(
    "from",
    None,
    "The checkpoint: DINOv2-S/14, a folder, a file, a workdir or hf://owner/name, by default "
    "DINOv2; scratch: a small ViT with random parameters.",
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Workdir of the run; by default runs/NAME-1, runs/NAME-2, ..."
)
MINUTES = flags.DEFINE_float(
    "minutes", None, "Approximate duration of the run; by default 10 on CPUs."
)


def main(arguments: list[str]) -> None:
    config = CONFIG.value
    if len(arguments) > 1:
        raise UserError(f"unexpected argument {arguments[1]!r}: give one folder")
    short = {"data.path": arguments[0] if arguments else None, "minutes": MINUTES.value}
    config.update_from_flattened_dict(
        {key: value for key, value in short.items() if value is not None}
    )
    if not config.data.path and config.data.source in ("digits", "folder"):
        raise UserError("name the images: vit-jax pretrain PHOTOS")
    command.use_compilation_cache()

    from vit_jax.runs.choices import next_workdir, settle
    from vit_jax.runs.choices.pretraining import start_values
    from vit_jax.runs.loop import train
    from vit_jax.runs.workdir import workdir_at

    config.update_from_flattened_dict(start_values(FROM.value, config.model.name))
    options = check(config, file=command.as_in_file(config))
    workdir = workdir_at(WORKDIR.value or next_workdir(options.data.path))
    train(settle(options, given_keys(config), workdir), workdir, started=STARTED)


if __name__ == "__main__":
    command.run(main)
