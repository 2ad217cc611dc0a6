"""Finds near-duplicate images within and between splits: vit-jax duplicates FOLDER.

FOLDER contains images, folders of classes, or folders of splits that contain folders of classes. If
several folders are given, each folder is a split. A CSV with the columns file, label and split, or
a folder with train.csv and test.csv, can be given in place of FOLDER. The command finds copies that
were resized, compressed, mirrored, brightened or slightly cropped. It writes two files into the
folder --out: duplicates.html shows near-duplicates, and duplicates.csv has a row for each of these
images with its most similar image. No image is deleted. Exit codes: 0, all images were read; 2, a
user error; 3, some images could not be read.
"""

import sys
from pathlib import Path

from absl import flags

from vit_jax import command
from vit_jax.data.sources.folder_rules import is_unsupported
from vit_jax.errors import UserError

OUT = flags.DEFINE_string(
    "out", None, "Folder for the page and the table; by default duplicates_of_FOLDER."
)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a page and a table that are there.")
SIMILARITY = flags.DEFINE_float(
    "similarity", 0.98, "Lowest correlation of the colours of near-duplicates, above 0, up to 1."
)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError("give a folder of images: vit-jax duplicates FOLDER")
    if not 0 < SIMILARITY.value <= 1:
        raise UserError(f"--similarity={SIMILARITY.value} must be above 0, up to 1")

    from vit_jax.preparation.duplicates_page import PAGE, TABLE, find_duplicates, write_duplicates

    out = Path(OUT.value or f"duplicates_of_{Path(arguments[0]).resolve().name}").expanduser()
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give --out=DIR, a folder")
    for file in (out / PAGE, out / TABLE):
        if file.exists() and not OVERWRITE.value:
            raise UserError(f"{file} exists; give --overwrite or another --out")
    duplicates = find_duplicates(
        arguments, SIMILARITY.value, lambda line: print(line, file=sys.stderr)
    )
    write_duplicates(duplicates, out, SIMILARITY.value)
    print(f"{duplicates}: pictures in {out / PAGE}, a table in {out / TABLE}")
    if duplicates.unreadable:
        print(f"could not be read: {duplicates.unreadable:,} files", file=sys.stderr)
    if duplicates.unreadable or any(map(is_unsupported, duplicates.source.left_out)):
        sys.exit(3)


if __name__ == "__main__":
    command.run(main)
