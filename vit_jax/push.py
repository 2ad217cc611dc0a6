"""Publishes a model on the Hugging Face Hub: python -m vit_jax.push CHECKPOINT OWNER/NAME.

--licence=LICENCE is required. CHECKPOINT is a source as in load_model: a workdir, WORKDIR@best, a
file, hf://owner/name. It uploads one folder in timm's format, or in Transformers' for a model that
timm does not have; vit_jax reads both. The folder contains parameters, preprocessing, class names,
and a card, README.md, with data, recipe and metrics of the run. The card's code examples for each
installed library are run here before they are published.

    python -m vit_jax.push WORKDIR owner/name --licence=mit --dry_run=/tmp/model # look at it first
"""

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from vit_jax import command
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.interop.checkpoint import Checkpoint
    from vit_jax.publishing.usage import Tried

LICENCE = flags.DEFINE_string(
    "licence",
    None,
    "Licence of the model, by the Hub's identifier: apache-2.0, mit, cc-by-4.0, "
    "cc-by-nc-4.0, other.",
)
DRY_RUN = flags.DEFINE_string(
    "dry_run", None, "Write the folder here for inspection, and upload nothing."
)
TO = flags.DEFINE_enum(
    "to", None, ["timm", "transformers"], "Form of the files, if not as the model allows."
)
PUBLIC = flags.DEFINE_bool("public", False, "Make a new model public; by default it is private.")
REPLACE = flags.DEFINE_bool(
    "replace", False, "Replace the model that is on the Hub under this name."
)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError("usage: python -m vit_jax.push CHECKPOINT OWNER/NAME --licence=LICENCE")
    source, name = arguments
    check_names(name)
    destination = Path(DRY_RUN.value).expanduser().absolute() if DRY_RUN.value else None
    if destination and destination.exists():
        raise UserError(f"{destination} exists; give another --dry_run")
    if destination and not destination.parent.is_dir():
        raise UserError(f"there is no folder {destination.parent} for --dry_run={DRY_RUN.value}")

    from vit_jax.interop.hub import check_upload, upload

    if not destination:
        check_upload(name, REPLACE.value)
    with tempfile.TemporaryDirectory(dir=destination.parent if destination else None) as place:
        folder = Path(place, "model")
        write(source, name, LICENCE.value, folder)
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size:14,} bytes  {file.name}")
        if destination:
            folder.rename(destination)
            print(f"{destination} would be uploaded to {name}; without --dry_run it is")
        else:
            print(f"uploaded to {upload(folder, name, PUBLIC.value, REPLACE.value)}")


def check_names(name: str) -> None:
    """Raises UserError if the model's name or `--licence` is invalid on the Hub."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise UserError(
            f"{name!r} is not a name on the Hub: give OWNER/NAME, such as ada/vit-b16-pets"
        )
    if not LICENCE.value:
        raise UserError(
            "give --licence=LICENCE, under which others may use the model, such as apache-2.0, "
            "mit, cc-by-nc-4.0 or other: https://huggingface.co/docs/hub/repositories-licenses "
            "lists them"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", LICENCE.value):
        raise UserError(
            f"--licence={LICENCE.value}: the Hub's identifiers are such as apache-2.0 or mit"
        )


def write(source: str, name: str, licence: str, folder: Path) -> None:
    """Writes the folder of a checkpoint with its card, and prints notes.

    Args:
      source: the checkpoint, as in `load_model`.
      name: the model's name on the Hub.
      licence: the Hub's identifier of the licence.
      folder: a new folder.

    Raises:
      UserError: the checkpoint cannot be read, or not be published.
    """
    import jax

    from vit_jax.interop.preprocessing import lost
    from vit_jax.publishing.hub_card import Published, card_text
    from vit_jax.publishing.run_facts import read_facts, repository
    from vit_jax.runs.workdir import place_of
    from vit_jax.save import write_checkpoint

    jax.config.update("jax_platforms", "cpu")  # The files do not depend on the machine.
    checkpoint = open_rgb_checkpoint(source)
    facts = read_facts(*place_of(source), checkpoint)
    if facts:
        checkpoint = with_class_names(checkpoint)
    base = facts.base if facts else repository(source)
    if base:
        compare_licence(base, licence)
    form = TO.value or default_form(checkpoint)
    write_checkpoint(checkpoint, folder, form)
    tried = run_examples(checkpoint, folder, name, form)
    size = checkpoint.options.image_size
    differs = lost(checkpoint.preprocessing, checkpoint.probabilities, size, form)
    about = Published(name, form, licence, base, facts, differs, tried)
    (folder / "README.md").write_text(card_text(checkpoint, about))


def open_rgb_checkpoint(source: str) -> "Checkpoint":
    """Opens a checkpoint and prints its description.

    Raises:
      UserError: it does not exist, is damaged, or is of a model for other images than RGB.
    """
    from vit_jax.interop.open import open_checkpoint

    checkpoint = open_checkpoint(source)
    print(checkpoint.describe())
    if (channels := checkpoint.options.channels) != 3:
        raise UserError(
            f"the model takes images of {channels} channels; only RGB models can be published"
        )
    return checkpoint


def with_class_names(checkpoint: "Checkpoint") -> "Checkpoint":
    """Names unnamed classes by their indices; libraries would name a thousand by ImageNet's."""
    numbers = tuple(map(str, range(checkpoint.options.num_classes)))
    return checkpoint._replace(class_names=checkpoint.class_names or numbers)


def compare_licence(base: str, licence: str) -> None:
    """Prints a note if the weights from which the model comes have another licence."""
    from vit_jax.publishing.run_facts import licence_of

    if (known := licence_of(base)) not in (None, licence):
        print(f"note: it comes from {base}, whose licence is {known}, and not {licence}")


def default_form(checkpoint: "Checkpoint") -> str:
    """Returns `timm`, or `transformers` for a model that timm does not have."""
    from vit_jax.interop.libraries import LIBRARIES

    in_timm = LIBRARIES["timm"].has(checkpoint.model, checkpoint.arguments)
    return "timm" if in_timm else "transformers"


def run_examples(checkpoint: "Checkpoint", folder: Path, name: str, form: str) -> "list[Tried]":
    """Runs the card's code examples on the written folder, and prints their errors.

    Args:
      checkpoint: the checkpoint that was written.
      folder: the folder with its files.
      name: the model's name on the Hub.
      form: the library of the files.

    Returns:
      The examples that compute the checkpoint's outputs, with their results.
    """
    from vit_jax.publishing.usage import try_usages, usages

    examples = usages(
        name,
        form,
        checkpoint.options.num_classes,
        bool(checkpoint.class_names),
        checkpoint.probabilities,
    )
    tried = try_usages(examples, checkpoint, folder, name, print)
    for lines in tried:
        print(
            f"ran the card's lines for {lines.usage.title}: {lines.distance:.0e} off "
            f"({lines.versions})"
        )
    return tried


if __name__ == "__main__":
    command.run(main)
