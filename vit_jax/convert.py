"""Writes a checkpoint in another library's format: python -m vit_jax.convert SOURCE DESTINATION.

SOURCE is a workdir, a `.npz` file of Google's, a `.safetensors` file or folder of timm or
Transformers, `hf://owner/name`, or a file of PyTorch's: `.pth`, `.pt`, `.ckpt`, `.pth.tar` or
`.bin`. PyTorch files may come from timm, from Transformers (`pytorch_model.bin` next to its
config.json), from open_clip (`open_clip_pytorch_model.bin` next to its open_clip_config.json), from
the authors of DINO, DINOv2, DINOv3, MAE, DeiT, BEiT, EVA, EVA-02, ConvNeXt or Swin, or from
DALL-E's encoder. They are read with PyTorch. If a file contains several dicts of tensors,
`FILE.pth@teacher` selects the dict `teacher`.

With `--depth_head=FILE.pth` a depth head that DINOv2's authors published (`linear`, `linear4` or
`dpt`) is written next to its backbone, SOURCE: `vit_jax.load_depth(DESTINATION)` loads both.

With `--tower=both` an image-text model is written with its image encoder, text encoder,
preprocessing and tokenizer: for Transformers, or with `--to=open_clip` for open_clip. SOURCE is
then a source as in `load_image_text`. If DESTINATION is `FILE.npz`, a SigLIP is written for
big_vision, without preprocessing and tokenizer. To load the file, copy the tokenizer's files into
its folder.

DESTINATION is `FILE.npz` for Google's format. If it is a new folder, the model is written for
Transformers, or for timm if Transformers does not have the model. DALL-E's encoder is written for
DALL-E's own code. `--to` selects another library.
"""

import dataclasses
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from absl import flags

from vit_jax import command
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.depth_heads import POSITION_RESIZE, read_depth_head
from vit_jax.interop.layout import Entry
from vit_jax.interop.libraries import LIBRARIES, WRITTEN
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.timm.authors import PIXELS
from vit_jax.interop.torch_files import is_torch_file, read_tensors, refuse_module, unpack
from vit_jax.models.image_model import PROBABILITIES
from vit_jax.progress import phase
from vit_jax.save import write_checkpoint

_BOTH_ONLY = ("big_vision", "open_clip")  # Formats of image-text models only.

flags.DEFINE_enum(
    "to",
    None,
    sorted([*WRITTEN, *_BOTH_ONLY]),
    f"format to write; {', '.join(_BOTH_ONLY)}: of --tower=both",
)
flags.DEFINE_enum(
    "tower",
    "image",
    ["image", "both"],
    "what is written of a model of images and texts: the image tower, or both",
)
flags.DEFINE_integer("num_classes", None, "width of the head: another one starts at zero; 0: none")
flags.DEFINE_string(
    "image_size", None, "pixels, 384 or HEIGHTxWIDTH: position embeddings are resized"
)
flags.DEFINE_bool("pre_logits", None, "keep or remove the hidden layer of the head")
flags.DEFINE_enum("gelu", None, ["tanh", "erf"], "kind of GELU, where the formats do not agree")
flags.DEFINE_enum(
    "resnet_epsilons",
    None,
    ["google", "timm"],
    "small constants of a ResNet's norms, where the formats do not agree",
)
flags.DEFINE_enum("position", None, ["1d"], "writes fixed position embeddings as learned ones")
flags.DEFINE_enum("pixels", None, sorted(PIXELS), "mean and std of pixels, for a .pth file")
flags.DEFINE_enum(
    "probabilities",
    None,
    sorted(PROBABILITIES),
    "kind of the classes' probabilities, if no file contains it",
)
flags.DEFINE_float(
    "norm_epsilon", None, "small constant of the layer norms, where the formats do not agree"
)

flags.DEFINE_string(
    "depth_head", None, "head for depth of DINOv2's authors, a .pth file, for the backbone SOURCE"
)
flags.DEFINE_float(
    "max_depth", None, "with --depth_head: greatest depth in metres, if not in the file's name"
)

_OPTIONS = ("num_classes", "pre_logits", "gelu", "norm_epsilon", "position", "resnet_epsilons")


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise UserError(
            f"usage: python -m vit_jax.convert SOURCE DESTINATION [--to={'|'.join(WRITTEN)}]"
        )
    source, destination = arguments[0], Path(arguments[1])
    changes = {name: getattr(flags.FLAGS, name) for name in _OPTIONS}
    changes["image_size"] = command.parse_image_size(flags.FLAGS.image_size)
    changes = {name: value for name, value in changes.items() if value is not None}

    _check_flags()
    refuse_module(source)
    with tempfile.TemporaryDirectory() as folder:
        if is_torch_file(source):
            with phase(f"reading {source}"):
                unpacked, notes = unpack(source, Path(folder), flags.FLAGS.pixels)
            print("\n".join(notes))
            source = str(unpacked)
        elif flags.FLAGS.pixels:
            raise UserError(
                "--pixels is for .pth files, which do not say how their models see pixels"
            )
        if flags.FLAGS.tower == "both":
            convert_towers(source, destination, changes)
        else:
            convert(source, destination, changes)


def _check_flags() -> None:
    """Raises UserError if a flag requires another flag that is not set."""
    if flags.FLAGS.max_depth is not None and not flags.FLAGS.depth_head:
        raise UserError("--max_depth is the range of --depth_head: give both, or neither")
    if flags.FLAGS.to in _BOTH_ONLY and flags.FLAGS.tower != "both":
        raise UserError(f"--to={flags.FLAGS.to} writes both towers: add --tower=both")


def convert_towers(source: str, destination: Path, changes: dict[str, Any]) -> None:
    """Converts the image and the text encoder of an image-text model, and prints descriptions.

    Raises:
      UserError: the library does not have this model, or a flag does not apply to it.
    """
    from vit_jax.image_text import open_towers
    from vit_jax.interop.towers_format import Towers
    from vit_jax.interop.towers_writing import FORMATS, library_of_towers, save_towers

    library = flags.FLAGS.to or library_of_towers(destination)
    if library not in FORMATS:
        raise UserError(
            f"Unsupported: --tower=both with --to={library}. Supported: "
            f"{', '.join(f'--to={name}' for name in FORMATS)}."
        )
    of_images = [name for name in ("depth_head", "probabilities") if getattr(flags.FLAGS, name)]
    if others := {*changes, *of_images} - {"image_size"}:
        raise UserError(f"--{min(others)} does not apply with --tower=both: leave it out")
    with phase(f"reading {source}"):
        checkpoint, text_part = open_towers(source, changes.get("image_size"))
    print(checkpoint.describe())
    print(text_part.describe())
    options, sources, done = fit(checkpoint, changes)
    for line in done.describe():
        print(line)
    with phase(f"writing {destination}"):
        towers = Towers(options, lambda path: sources[path](), checkpoint.preprocessing, text_part)
        notes = save_towers(destination, library, towers)
    for line in notes:
        print(f"note: {line}")
    print(
        f"wrote {destination} for {FORMATS[library].title}; read back, it is the same bit for bit"
    )


def convert(source: str, destination: Path, changes: dict[str, Any]) -> None:
    """Converts a checkpoint with changed model arguments, and prints the parameters' mapping."""
    with phase(f"reading {source}"):
        checkpoint = open_checkpoint(source, changes.get("image_size"))
    if flags.FLAGS.depth_head:
        checkpoint = with_depth_head(checkpoint, flags.FLAGS.depth_head, flags.FLAGS.max_depth)
    if flags.FLAGS.probabilities:
        checkpoint = checkpoint._replace(probabilities=flags.FLAGS.probabilities)
    print(checkpoint.describe())
    notes = []
    with phase(f"writing {destination}"):
        to = flags.FLAGS.to
        written = write_checkpoint(checkpoint, destination, to, notes.append, **changes)
    kept = [f"kept: {written.objective}"] if written.objective else []
    mapping = _mapping(checkpoint.mapped, written.entries)
    print("\n".join([*mapping, *written.fit.describe(), *kept, *notes]))
    title = LIBRARIES[written.library].title
    print(f"wrote {destination} for {title}; read back, it is the same bit for bit")


def with_depth_head(checkpoint: Checkpoint, file: str, max_depth: float | None) -> Checkpoint:
    """Adds a depth head of DINOv2's authors to the checkpoint of a backbone.

    The backbone's position embeddings are then resized as in the authors' code.

    Args:
      max_depth: maximum depth in metres; None: the data set in the file name determines it.

    Raises:
      UserError: the file cannot be read, or its head belongs to another backbone.
    """
    with phase(f"reading {file}"), tempfile.TemporaryDirectory() as folder:
        tensors, _ = read_tensors(file, Path(folder))
    head = read_depth_head(file, tensors, checkpoint.options, max_depth)
    options = checkpoint.options
    if hasattr(options, "position_resize"):
        options = dataclasses.replace(options, position_resize=POSITION_RESIZE)
    return checkpoint._replace(options=options, objective=head)


def _mapping(read: list[Entry], written: list[Entry]) -> list[str]:
    """Returns lines that map parameter names from the source to vit_jax and to the output.

    Parameters that differ only in the number of their layer share a line with their count.
    """

    def kind(*names):
        names = re.sub(r"stages/\d+/\d+", "stages/*/*", ", ".join(names))
        return re.sub(r"(blocks?[/._]?|layers?[._]|stages[.]|unit)\d+", r"\1*", names)

    origin = {entry.path: entry.names for entry in read}
    ways = (
        (kind(e.path), f": {kind(*origin[e.path])}" if e.path in origin else "", kind(*e.names))
        for e in written
    )
    return [
        f"{count:4} x {ours}{theirs} -> {new}"
        for (ours, theirs, new), count in Counter(ways).items()
    ]


if __name__ == "__main__":
    command.run(main)
