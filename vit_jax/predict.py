"""Predicts the classes of images: python -m vit_jax.predict --checkpoint=WORKDIR PATH...

PATH is an image, a folder (all images in it and in its folders), a CSV that lists files, or a
pattern such as 'photos/*.jpg'. The path - means standard input, which contains an image or a path
in each line. For each image, a line with the most likely classes is printed. --csv prints rows for
a spreadsheet, --json prints JSON lines, and --out=FILE writes them to a file.
--embed=FILE.safetensors or FILE.parquet writes features, the inputs of the head, instead.

Runs of these objectives (config.objective.name) write a new folder, --out=FOLDER:
  segmentation  the class of each pixel, by default to `segmented`: masks as PNG files with VOC's
                palette, overlays, and a page, index.html. For each image, the shares of its classes
                are printed.
  detection     objects with a score of at least --threshold (by default 0.3), by default to
                `detected`: a COCO file, objects.json, overlays, and a page.
  depth         depth maps, by default to `depths`: 16-bit PNG files in millimetres (for depths
                above 65 m in 1/256 m, above 255 m in decimetres), pictures in colours, and a page.

Files that are not images are skipped. Their names are printed, or, for files in a folder, their
number. Exit codes: 0, all images were read; 2, a user error, or no image could be read; 3, some
images were skipped.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.data.image_files import ImageFiles, find_images
from vit_jax.data.sources.folder_rules import is_unsupported
from vit_jax.errors import UserError, as_text
from vit_jax.prediction_files import SUFFIXES, most_named, written_to

if TYPE_CHECKING:
    from vit_jax.classifier import Classifier

# Maps a run's objective to the default folder of --out, and to a word for the folder's content.
DENSE = {
    "segmentation": ("segmented", "masks"),
    "detection": ("detected", "objects"),
    "depth": ("depths", "depth maps"),
}

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Checkpoint: a workdir, a file or hf://owner/name, as in load_model."
)
TOP = flags.DEFINE_integer(
    "top",
    None,
    "Most classes shown of each image; by default 3, or all with --threshold.",
    lower_bound=1,
)
THRESHOLD = flags.DEFINE_float(
    "threshold", None, "Lowest probability of the classes shown, above 0, up to 1."
)
JSON = flags.DEFINE_bool("json", False, "JSON lines, with full precision.")
CSV = flags.DEFINE_bool("csv", False, "Rows of the file, then each class with its probability.")
OUT = flags.DEFINE_string(
    "out",
    None,
    "Write the predictions to this file: .csv, .jsonl or, as lines of text, .txt; a folder for a "
    "segmentation, detection or depth run.",
)
EMBED = flags.DEFINE_string("embed", None, "Write features to this .safetensors or .parquet file.")
OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Replace the file of --out or --embed, or the predictions in a folder."
)
CLASSES = flags.DEFINE_string(
    "classes", None, "File with the classes' names, one a line, if not the checkpoint's."
)
NAMES = flags.DEFINE_string(
    "names",
    None,
    "Class names for zero-shot classification by CLIP or SigLIP: 'cat,dog,a red car', or a file "
    "with a name in each line.",
)
TEMPLATE = flags.DEFINE_multi_string(
    "template",
    [],
    "With --names: text with {} for the name; several are averaged. By default 'a photo of a {}.'",
)
IMAGE_SIZE = flags.DEFINE_string(
    "image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's."
)
RESIZE = flags.DEFINE_integer(
    "resize",
    None,
    "Short side before the central crop; by default the checkpoint's, or 8/7 of the crop.",
)
MERGE_TOKENS = flags.DEFINE_integer(
    "merge_tokens",
    0,
    "Patches that each layer of a ViT merges with similar ones (ToMe): faster, less accurate.",
    lower_bound=0,
)
DECODE = flags.DEFINE_enum(
    "decode",
    None,
    ["fast", "exact"],
    "JPEGs in part, or whole by Pillow; by default as the run, or fast.",
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Images at once, of all devices.", lower_bound=1
)
THREADS = flags.DEFINE_integer("threads", 2, "That decode images.", lower_bound=1)
PREDICTION_FLAGS = (OUT, CSV, JSON, TOP, THRESHOLD, CLASSES)


def main(arguments: list[str]) -> None:
    if not CHECKPOINT.value or not arguments:
        raise UserError("give --checkpoint=WORKDIR and at least one image, folder, pattern or -")
    from vit_jax.dense import objective_at

    objective = objective_at(CHECKPOINT.value)
    if not EMBED.value and objective in DENSE:
        return dense(objective, arguments)
    form, out, embed = output_format(), new_file(OUT), new_file(EMBED)
    if embed:
        check_embed(embed, [flag for flag in PREDICTION_FLAGS if flag.present])
    images = find_images(arguments)
    for line in images.note():
        print_line(line)
    command.use_compilation_cache()
    from vit_jax.classifier import open_classifier

    classifier = open_classifier(
        CHECKPOINT.value,
        image_size=command.parse_image_size(IMAGE_SIZE.value),
        resize=RESIZE.value,
        merge_tokens=MERGE_TOKENS.value,
        decode=DECODE.value,
        classes=CLASSES.value,
        names=NAMES.value,
        templates=TEMPLATE.value,
        log=print_line,
    )
    if embed:
        num_read = write_features(embed, classifier, images)
    else:
        num_read = write_predictions(out, form, classifier, images)
    exit_if_skipped(images, num_read)


def exit_if_skipped(images: ImageFiles, num_read: int) -> None:
    """Exits with code 3 if some images could not be read."""
    if num_read < len(images) or any(map(is_unsupported, images.left_out)):
        sys.exit(3)


def dense(objective: str, arguments: list[str]) -> None:
    """Writes the masks, objects or depths of images into a folder.

    Raises:
      UserError: a flag only applies to classifiers, the folder contains files, or no image can be
        read.
    """
    name, what = DENSE[objective]
    unsupported = (TOP, JSON, CSV, CLASSES, NAMES, TEMPLATE, RESIZE, MERGE_TOKENS)
    for flag in unsupported if objective == "detection" else (*unsupported, THRESHOLD):
        if flag.present:
            raise UserError(
                f"--{flag.name} is unsupported with a {objective} run: {what} are written to "
                "--out=FOLDER"
            )
    from vit_jax.mask_files import PAGE, new_folder

    if "-" in arguments:
        raise UserError("Unsupported: images from standard input (-). Give files or folders.")
    folder = new_folder(OUT.value or name, OVERWRITE.value)
    images = find_images(arguments)
    for line in images.note():
        print_line(line)
    command.use_compilation_cache()
    num_read = write_dense(objective, folder, images)
    print_line(f"{what} of {num_read:,} images in {folder}; page: {folder / PAGE}")
    exit_if_skipped(images, num_read)


def write_dense(objective: str, folder: Path, images: ImageFiles) -> int:
    """Writes masks, objects or depths, and returns the number of images that were read."""
    from vit_jax.dense import load_depth, load_detector, load_segmenter

    size = command.parse_image_size(IMAGE_SIZE.value)
    loaded = dict(image_size=size, decode=DECODE.value, log=print_line)

    def report(path: str, words: str) -> None:
        print(f"{path}  {words}")

    if objective == "segmentation":
        from vit_jax.mask_files import write_masks

        segmenter = load_segmenter(CHECKPOINT.value, **loaded)
        return write_masks(folder, segmenter, images, print_line, report)
    if objective == "depth":
        from vit_jax.depth_files import write_depths

        model = load_depth(CHECKPOINT.value, **loaded)
        return write_depths(folder, model, images, print_line, report)
    from vit_jax.models.dense.detector import least_score
    from vit_jax.object_files import write_objects

    detector = load_detector(CHECKPOINT.value, **loaded)
    score = least_score(THRESHOLD.value)
    return write_objects(folder, detector, images, score, print_line, report)


def check_embed(file: Path, others: Sequence[flags.FlagHolder]) -> None:
    """Raises UserError if features cannot be written to `file`, or if flags contradict each other.

    Args:
      file: value of `--embed`.
      others: flags for predictions that the user has given.
    """
    if file.suffix not in (".safetensors", ".parquet"):
        raise UserError(f"--embed={file}: write features to a .safetensors or .parquet file")
    if others:
        names = ", ".join(f"--{flag.name}" for flag in others)
        raise UserError(f"--embed writes features, not predictions: give it without {names}")


def print_line(line: str) -> None:
    """Prints a line on the standard error stream."""
    print(line, file=sys.stderr)


def computed(
    classifier: "Classifier", images: ImageFiles, compute: Callable
) -> Iterator[tuple[list[str], np.ndarray, Any]]:
    """Computes `compute(model, images)` of all images in batches.

    Yields:
      For each batch: the paths of its readable images; a mask, bool `[batch]`, which is True for
      readable images and False for other images and padding; and the result of `compute`.

    Raises:
      UserError: none of the images can be read.
    """
    from vit_jax.evaluation.features import extractor_of
    from vit_jax.parallel.mesh import make_mesh

    extractor, params = extractor_of(
        classifier.model,
        make_mesh(),
        classifier.crop,
        compute=compute,
        batch_size=min(BATCH_SIZE.value, len(images)),
        threads=THREADS.value,
        max_unreadable=len(images),
        log=print_line,
    )
    start, num_read = 0, 0
    for batch in extractor.stream(params, images):
        mask = batch["mask"]
        paths = [images.path(start + row) for row in np.flatnonzero(mask)]
        start, num_read = start + len(mask), num_read + len(paths)
        yield paths, mask, batch["values"]
    if not num_read:
        raise UserError(f"none of the {len(images)} files is an image that can be read")


def write_features(file: Path, classifier: "Classifier", images: ImageFiles) -> int:
    """Writes the features of images to a file, and returns the number of images that were read."""
    from vit_jax.evaluation.features import representation

    read, features = [], []
    for paths, mask, values in computed(classifier, images, representation):
        read += paths
        features.append(values[mask])
    write(file, read, np.concatenate(features))
    print_line(f"{len(read):,} features of {features[0].shape[1]} numbers in {file}")
    return len(read)


def write_predictions(
    file: Path | None, form: str, classifier: "Classifier", images: ImageFiles
) -> int:
    """Writes the predictions of images to a file or standard output; returns how many were read.

    Raises:
      UserError: the model has no head, or none of the images can be read.
    """
    from vit_jax.evaluation.features import likeliest, reaching, top_of
    from vit_jax.inference import TOP as DEFAULT_TOP
    from vit_jax.models.prediction import Prediction

    names, probabilities = classifier.class_names, classifier.probabilities
    if not names:
        raise UserError(
            f"{CHECKPOINT.value} has no head: it has features (--embed), but predicts no classes; "
            "with a text tower it takes --names=cat,dog"
        )
    top = top_of(TOP.value, THRESHOLD.value, len(names), DEFAULT_TOP)
    columns = most_named(top, THRESHOLD.value, probabilities)
    num_read = 0
    with written_to(file, form, columns) as write_prediction:
        for paths, mask, values in computed(classifier, images, likeliest(top, probabilities)):
            num_read += len(paths)
            likely = (array[mask] for array in values)
            for path, chances, labels in zip(paths, *likely, strict=True):
                count = reaching(THRESHOLD.value, chances)
                named = tuple(names[label] for label in labels[:count])
                write_prediction(Prediction(path, named, tuple(chances[:count].tolist())))
    if file:
        print_line(f"{num_read:,} predictions in {file}")
    return num_read


def output_format() -> str:
    """Returns the format of the predictions: `text`, `csv` or `json`.

    Raises:
      UserError: the flags contradict each other, or the file's suffix is unknown.
    """
    asked = [name for name, flag in (("csv", CSV), ("json", JSON)) if flag.value]
    if len(asked) > 1:
        raise UserError("--csv and --json are two formats: give one of them")
    if not OUT.value:
        return asked[0] if asked else "text"
    suffix = Path(OUT.value).suffix
    if (form := SUFFIXES.get(suffix)) is None:
        raise UserError(
            f"--out={OUT.value}: the suffix is the format, one of {', '.join(SUFFIXES)}"
        )
    if asked not in ([], [form]):
        raise UserError(f"--{asked[0]} and --out={OUT.value} are two formats: remove --{asked[0]}")
    return form


def new_file(flag: flags.FlagHolder) -> Path | None:
    """Returns the path of an output flag; None: the flag is not set.

    Raises:
      UserError: the file exists and `--overwrite` is not set, or the file's folder does not exist.
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
    """Writes features and the paths of their images. The file is replaced atomically."""
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
