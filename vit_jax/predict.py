"""Predicts the classes of images: python -m vit_jax.predict --checkpoint=WORKDIR PATH...

PATH is an image, a folder (all images below it), a CSV that lists files, a pattern such as 'photos/*.jpg', or
- for standard input: one image, or paths, one a line. Each image is a line with its likeliest classes; --csv
makes rows for a spreadsheet of it and --json JSON lines, --out=FILE writes them to a file, and
--embed=FILE.safetensors or FILE.parquet writes what enters the head instead.

What is no image is skipped and named, or counted where it lies in a folder. Exit codes: 0, all images were
read; 2, a mistake, or nothing was; 3, some images were skipped.
"""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.data.image_files import find_images
from vit_jax.data.sources.folder_rules import is_unsupported
from vit_jax.errors import UserError, as_text
from vit_jax.prediction_files import SUFFIXES, most_named, written_to

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "What load_model takes: a workdir, a file, hf://owner/name."
)
TOP = flags.DEFINE_integer(
    "top", None, "Most classes shown of each image; by default 3, or all with --threshold.", lower_bound=1
)
THRESHOLD = flags.DEFINE_float(
    "threshold", None, "Lowest probability of the classes shown, above 0, up to 1."
)
JSON = flags.DEFINE_bool("json", False, "JSON lines, with full precision.")
CSV = flags.DEFINE_bool("csv", False, "Rows of the file, then each class with its probability.")
OUT = flags.DEFINE_string(
    "out", None, "Write the predictions to this file: .csv, .jsonl or, as lines of text, .txt."
)
EMBED = flags.DEFINE_string("embed", None, "Write features to this .safetensors or .parquet file.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace the file of --out or --embed.")
CLASSES = flags.DEFINE_string(
    "classes", None, "File with the classes' names, one a line, if not the checkpoint's."
)
IMAGE_SIZE = flags.DEFINE_string("image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's.")
RESIZE = flags.DEFINE_integer(
    "resize", None, "Short side before the central crop; by default the checkpoint's, or 8/7 of the crop."
)
DECODE = flags.DEFINE_enum(
    "decode", None, ["fast", "exact"], "JPEGs in part, or whole by Pillow; by default as the run, or fast."
)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Images at once, of all devices.", lower_bound=1)
THREADS = flags.DEFINE_integer("threads", 2, "That decode images.", lower_bound=1)


def main(arguments: list[str]) -> None:
    if not CHECKPOINT.value or not arguments:
        raise UserError("give --checkpoint=WORKDIR and at least one image, folder, pattern or -")
    form, out, embed = output_format(), new_file(OUT), new_file(EMBED)
    if embed and embed.suffix not in (".safetensors", ".parquet"):
        raise UserError(f"--embed={embed}: write features to a .safetensors or .parquet file")
    if embed and (out or form != "text"):
        raise UserError("--embed writes features, not predictions: give it without --out, --csv, --json")
    images = find_images(arguments)
    for line in images.note():
        print(line, file=sys.stderr)
    command.use_compilation_cache()

    from vit_jax.classifier import open_classifier
    from vit_jax.evaluation.features import extractor_of, likeliest, reaching, representation, top_of
    from vit_jax.load import TOP as DEFAULT_TOP
    from vit_jax.load import Prediction
    from vit_jax.parallel.mesh import make_mesh

    model, names, crop, probabilities = open_classifier(
        CHECKPOINT.value,
        image_size=command.parse_image_size(IMAGE_SIZE.value) if IMAGE_SIZE.value else None,
        resize=RESIZE.value,
        decode=DECODE.value,
        classes=CLASSES.value,
        say=lambda line: print(line, file=sys.stderr),
    )
    if not names and not embed:
        raise UserError(f"{CHECKPOINT.value} has no head: it has features (--embed), but predicts no classes")
    top = top_of(TOP.value, THRESHOLD.value, len(names), DEFAULT_TOP) if names else 0
    extractor, params = extractor_of(
        model,
        make_mesh(dict(data=None, fsdp=1, tensor=1)),
        crop,
        compute=representation if embed else likeliest(top, probabilities),
        batch_size=min(BATCH_SIZE.value, len(images)),
        threads=THREADS.value,
        max_unreadable=len(images),
        say=lambda line: print(line, file=sys.stderr),
    )
    read, features, done = [], [], 0
    columns = most_named(top, THRESHOLD.value, probabilities)
    with contextlib.nullcontext(str) if embed else written_to(out, form, columns) as write_prediction:
        for part in extractor.stream(params, images):
            mask = part["mask"]
            paths = [images.path(done + row) for row in np.flatnonzero(mask)]
            done, read = done + len(mask), read + paths
            if embed:
                features.append(part["values"][mask])
                continue
            for path, chances, found in zip(paths, *(values[mask] for values in part["values"]), strict=True):
                count = reaching(THRESHOLD.value, chances)
                named = tuple(names[label] for label in found[:count])
                write_prediction(Prediction(path, named, tuple(chances[:count].tolist())))
        if not read:
            raise UserError(f"none of the {len(images)} files is an image that can be read")
    if out:
        print(f"{len(read):,} predictions in {out}", file=sys.stderr)
    if embed:
        write(embed, read, np.concatenate(features))
        print(f"{len(read):,} features of {features[0].shape[1]} numbers in {embed}", file=sys.stderr)
    if len(read) < len(images) or any(map(is_unsupported, images.left_out)):
        sys.exit(3)


def output_format() -> str:
    """Returns the format of the predictions by the flags: `text`, `csv` or `json`.

    Raises:
      UserError: the flags contradict each other, or the file's suffix is of no format.
    """
    asked = [name for name, flag in (("csv", CSV), ("json", JSON)) if flag.value]
    if len(asked) > 1:
        raise UserError("--csv and --json are two formats: give one of them")
    if not OUT.value:
        return asked[0] if asked else "text"
    suffix = Path(OUT.value).suffix
    if (form := SUFFIXES.get(suffix)) is None:
        raise UserError(f"--out={OUT.value}: the suffix is the format, one of {', '.join(SUFFIXES)}")
    if asked not in ([], [form]):
        raise UserError(f"--{asked[0]} and --out={OUT.value} are two formats: leave out --{asked[0]}")
    return form


def new_file(flag: flags.FlagHolder) -> Path | None:
    """Returns the path of a flag, to which a file may be written; None where it is not given.

    Raises:
      UserError: there is such a file, without `--overwrite`, or no folder for it.
    """
    if not flag.value:
        return None
    file = Path(flag.value).expanduser()
    if file.is_dir():
        raise UserError(f"--{flag.name}={flag.value} is a folder: give a file in it")
    if file.exists() and not OVERWRITE.value:
        raise UserError(f"{file} exists; give --overwrite or another --{flag.name}")
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for --{flag.name}={flag.value}")
    return file


def write(file: Path, paths: list[str], features: np.ndarray) -> None:
    """Features with their paths; the file appears when it is whole."""
    temporary = file.with_name(f".{file.name}.tmp")
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        column = pyarrow.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
        pyarrow.parquet.write_table(
            pyarrow.table({"path": [*map(as_text, paths)], "features": column}), temporary
        )
    else:
        from vit_jax.interop.tensor_files import save_safetensors

        save_safetensors(temporary, {"features": features}, {"paths": json.dumps(paths)})
    temporary.replace(file)


if __name__ == "__main__":
    command.run(main)
