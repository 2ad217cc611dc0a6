"""Publishes a model on the Hugging Face Hub: python -m vit_jax.push CHECKPOINT OWNER/NAME.

--licence=LICENCE is required. CHECKPOINT is a source as in load_model: a workdir, WORKDIR@best, a
file, or hf://owner/name. The command uploads a folder in timm's format, or in Transformers' format
if timm does not have the model. vit_jax reads both formats. The folder contains parameters,
preprocessing, class names, and a model card, README.md, with data, recipe and metrics of the run.
The card's code examples for each installed library are run on this machine before they are
published. A run of configs/siglip.py is uploaded for Transformers, with image encoder, text encoder
and tokenizer. The same is done for another CLIP or SigLIP with --tower=both.

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
    import numpy as np

    from vit_jax.interop.checkpoint import Checkpoint
    from vit_jax.publishing.run_facts import RunFacts
    from vit_jax.publishing.usage import Tried, Usage

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
TOWER = flags.DEFINE_enum(
    "tower",
    None,
    ["both", "image"],
    "Towers of a model of images and texts to upload; by default both of a run, else the image's.",
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
    """Raises UserError if the Hub does not accept the model's name or `--licence`."""
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
    """Writes the folder of a checkpoint with its model card, and prints notes.

    Raises:
      UserError: the checkpoint cannot be read, or cannot be published.
    """
    import jax

    from vit_jax.interop.open import open_checkpoint
    from vit_jax.interop.preprocessing import lost
    from vit_jax.publishing.hub_card import Published, card_text, properties_of
    from vit_jax.publishing.usage import expected_output, usages, usages_of_depth
    from vit_jax.save import write_checkpoint

    jax.config.update("jax_platforms", "cpu")  # The files must not depend on the machine.
    if has_both_towers(source):
        write_towers(source, name, licence, folder)
        return
    checkpoint = open_checkpoint(source)
    print(checkpoint.describe())
    check_channels(checkpoint)
    facts, base = read_origin(source, checkpoint, licence)
    if facts:
        checkpoint = with_class_names(checkpoint)
    form = TO.value or default_form(checkpoint)
    write_checkpoint(checkpoint, folder, form)
    examples = usages(
        name,
        form,
        checkpoint.options.num_classes,
        bool(checkpoint.class_names),
        checkpoint.probabilities,
    )
    picture, expected = expected_output(checkpoint)
    tried = run_examples(examples, picture, expected, folder, name)
    if checkpoint.objective and checkpoint.objective.name == "depth":
        expected = expected_depth(source, picture)
        tried += run_examples(usages_of_depth(name), picture, expected, folder, name)
    size = checkpoint.options.image_size
    differs = lost(checkpoint.preprocessing, checkpoint.probabilities, size, form)
    about = Published(name, form, *properties_of(checkpoint), licence, base, facts, differs, tried)
    (folder / "README.md").write_text(card_text(about))


def expected_depth(source: str, picture: "np.ndarray") -> "np.ndarray":
    """Returns the depth that a depth run predicts, float32 `[pixels]`.

    Args:
      picture: the image, uint8 `[height, width, 3]`.
    """
    from vit_jax.dense import load_depth

    model = load_depth(source, log=lambda line: None, dtype="float32")
    return model.predict(picture)[0].reshape(-1)


def has_both_towers(source: str) -> bool:
    """Returns True if image and text encoder of an image-text model are to be written.

    Raises:
      UserError: the library `--to` does not support this.
    """
    from vit_jax.dense import objective_at

    tower = TOWER.value
    if tower is None and objective_at(source) == "contrastive":
        tower = "both"
        print("both towers, since it is a run of images and texts; --tower=image for one")
    if tower == "both" and TO.value == "timm":
        raise UserError("Unsupported: both towers with --to=timm. Supported: --to=transformers.")
    return tower == "both"


def write_towers(source: str, name: str, licence: str, folder: Path) -> None:
    """Writes an image-text model as `write` does; raises UserError if Transformers lacks it."""
    from vit_jax.image_text import open_towers
    from vit_jax.interop.adapting import fit
    from vit_jax.interop.towers_format import Towers
    from vit_jax.interop.towers_writing import save_towers
    from vit_jax.publishing.hub_card import Published, card_text, properties_of_towers
    from vit_jax.publishing.usage import expected_of_towers, usages_of_towers

    checkpoint, text_part = open_towers(source)
    print(checkpoint.describe())
    print(text_part.describe())
    check_channels(checkpoint)
    facts, base = read_origin(source, checkpoint, licence)
    options, sources, _ = fit(checkpoint, {})
    try:
        towers = Towers(options, lambda path: sources[path](), checkpoint.preprocessing, text_part)
        notes = save_towers(folder, "transformers", towers)
    except UserError as error:
        raise UserError(f"{error}; --tower=image uploads the image tower alone") from error
    for line in notes:
        print(f"note: {line}")
    examples = usages_of_towers(name, text_part.tower.options.length, text_part.probabilities)
    tried = run_examples(examples, *expected_of_towers(checkpoint, text_part), folder, name)
    differs = [line.removeprefix("not written: ") for line in notes if line.startswith("not")]
    about = Published(
        name,
        "transformers",
        *properties_of_towers(checkpoint, text_part),
        licence,
        base,
        facts,
        differs,
        tried,
    )
    (folder / "README.md").write_text(card_text(about))


def read_origin(
    source: str, checkpoint: "Checkpoint", licence: str
) -> "tuple[RunFacts | None, str | None]":
    """Returns facts about a checkpoint's run, and the name of its base model on the Hub.

    Returns:
      The facts, or None if the checkpoint is not from a run; and the name `owner/name` of the base
      model, or None. The base model of a run is the model on the Hub from which the run was
      initialized. The base model of another checkpoint is the checkpoint itself, if it is on the
      Hub.
    """
    from vit_jax.publishing.run_facts import read_facts, repository
    from vit_jax.runs.workdir import place_of

    facts = read_facts(*place_of(source), checkpoint)
    base = facts.base if facts else repository(source)
    if base:
        compare_licence(base, licence)
    return facts, base


def check_channels(checkpoint: "Checkpoint") -> None:
    """Raises UserError if the model's images are not RGB."""
    if (channels := checkpoint.options.channels) != 3:
        raise UserError(
            f"the model takes images of {channels} channels; only RGB models can be published"
        )


def with_class_names(checkpoint: "Checkpoint") -> "Checkpoint":
    """Returns the checkpoint with class names. If it has none, class indices become the names.

    Without class names in the files, libraries may show ImageNet's class names.
    """
    numbers = tuple(map(str, range(checkpoint.options.num_classes)))
    return checkpoint._replace(class_names=checkpoint.class_names or numbers)


def compare_licence(base: str, licence: str) -> None:
    """Prints a note if the licence of the base model is not `licence`."""
    from vit_jax.publishing.run_facts import licence_of

    if (known := licence_of(base)) not in (None, licence):
        print(f"note: it comes from {base}, whose licence is {known}, and not {licence}")


def default_form(checkpoint: "Checkpoint") -> str:
    """Returns `timm`, or `transformers` if timm does not have the model."""
    from vit_jax.interop.libraries import LIBRARIES
    from vit_jax.models import family_of

    in_timm = LIBRARIES["timm"].has(family_of(checkpoint.options).model, checkpoint.arguments)
    return "timm" if in_timm else "transformers"


def run_examples(
    examples: "list[list[Usage]]",
    picture: "np.ndarray",
    expected: "np.ndarray",
    folder: Path,
    name: str,
) -> "list[Tried]":
    """Runs the model card's code examples on the written folder.

    Args:
      examples: for each library, the examples to try until one runs and computes the expected
        output.

    Returns:
      The first successful example of each library, with its difference from the expected output.
    """
    from vit_jax.publishing.usage import try_usages

    tried = try_usages(examples, picture, expected, folder, name, print)
    for lines in tried:
        print(
            f"ran the card's lines for {lines.usage.title}: {lines.distance:.0e} off "
            f"({lines.versions})"
        )
    return tried


if __name__ == "__main__":
    command.run(main)
