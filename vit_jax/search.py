"""Finds images by text: python -m vit_jax.search --checkpoint=WORKDIR "a red car" PHOTOS...

The checkpoint is an image-text model: the workdir of a run of configs/siglip.py or configs/clip.py,
a folder of CLIP or SigLIP in Transformers' format, or hf://owner/name. PHOTOS are images, folders,
CSVs or patterns. The most similar images are printed with their cosine similarity, and
--page=FILE.html writes a page that shows them.

Embeddings are stored in the user's cache folder. A later search with the same parameters only
computes the embeddings of the text, and of images that are new or have changed.
"""

import hashlib
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
from absl import flags
from flax import nnx

from vit_jax import command
from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.image_files import ImageFiles, find_images
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError, as_text
from vit_jax.models.image_model import ImageModel
from vit_jax.models.image_text import ImageTextModel
from vit_jax.paths import user_cache

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Model of images and texts: a workdir, a folder or hf://owner/name."
)
TOP = flags.DEFINE_integer("top", 20, "Number of images that are shown.", lower_bound=1)
PAGE = flags.DEFINE_string("page", None, "Also write a page with the images to this .html file.")
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Images at once, of all devices.", lower_bound=1
)


def main(arguments: list[str]) -> None:
    if not CHECKPOINT.value or len(arguments) < 2:
        raise UserError(
            'give --checkpoint=WORKDIR, a text such as "a dog on a beach", and a folder'
        )
    text, *places = arguments
    if "-" in places:
        raise UserError("Unsupported: images from standard input (-). Give files or folders.")
    if not text.strip():
        raise UserError('the text is empty: give one, such as "a dog on a beach"')
    page = page_file(PAGE.value)
    images = find_images(places)
    for line in images.note():
        print(line)
    command.use_compilation_cache()
    from vit_jax.checkpoint_crop import checkpoint_crop
    from vit_jax.image_text import load_image_text, towers_place
    from vit_jax.interop.open import open_checkpoint

    place = towers_place(CHECKPOINT.value)
    model = load_image_text(place)
    if model.tokenizer.tokens_of(text) == model.tokenizer.tokens_of(""):
        raise UserError(f"the text {text!r} has no tokens: give one, such as 'a dog on a beach'")
    crop = checkpoint_crop(open_checkpoint(place), model.image.image_size)
    paths, embeddings = embed_images(model, images, crop)
    results = most_similar(model, text, embeddings, TOP.value)
    for index, similarity in results:
        print(f"{similarity:6.3f}  {as_text(paths[index])}")
    if page:
        write_page(page, text, [(paths[index], similarity) for index, similarity in results])
        print(f"page: {page}")


def page_file(name: str | None) -> Path | None:
    """Returns the path of the flag `--page`; None: the flag is not set.

    Raises:
      UserError: the path does not end with .html, its folder does not exist, or the file exists and
        was not written by this command.
    """
    from vit_jax.inspection.html_page import is_page

    if not name:
        return None
    file = Path(name).expanduser()
    if file.suffix != ".html":
        raise UserError(f"--page={name}: give a file that ends in .html")
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for --page={name}")
    if file.exists() and not is_page(file):
        raise UserError(f"{file} exists and is not a page of vit_jax: give another --page")
    return file


def most_similar(
    model: ImageTextModel, text: str, embeddings: np.ndarray, most: int
) -> list[tuple[int, float]]:
    """Returns indices and cosine similarities of the images most similar to a text.

    Args:
      embeddings: embeddings of the images with unit norm, float32 `[images, dim]`.
      most: maximum number of images.
    """
    similarities = embeddings @ np.asarray(model.encode_text(text))[0]
    order = np.argsort(-similarities, kind="stable")[:most]
    return [(int(index), float(similarities[index])) for index in order]


def embed_images(
    model: ImageTextModel, images: ImageFiles, crop: TestCrop
) -> tuple[list[str], np.ndarray]:
    """Returns the paths and embeddings of all readable images.

    Embeddings in the cache are not computed again. If an image is found several times, for example
    in a folder and by its own name, it is returned once.

    Raises:
      UserError: none of the images can be read.
    """
    file = user_cache() / "search" / f"{identity(model.image, crop)}.npz"
    paths: dict[str, str] = {}
    for path in map(images.path, range(len(images))):
        paths.setdefault(image_key(path), path)
    known = read_cache(file)
    new = {key: path for key, path in paths.items() if key not in known}
    print(f"{len(paths) - len(new):,} of {len(paths):,} images are in the cache {file.parent}")
    if new:
        known |= compute_embeddings(model.image, new, crop)
        write_cache(file, known)
    readable = [(path, known[key]) for key, path in paths.items() if key in known]
    if not readable:
        raise UserError(f"none of the {len(paths)} files is an image that can be read")
    return [path for path, _ in readable], np.stack([embedding for _, embedding in readable])


def compute_embeddings(
    model: ImageModel, paths: dict[str, str], crop: TestCrop
) -> dict[str, np.ndarray]:
    """Returns the embedding of each readable image, float32 `[dim]`, by its key in `paths`."""
    from vit_jax.evaluation.features import extractor_of, image_embedding
    from vit_jax.parallel.mesh import make_mesh

    extractor, params = extractor_of(
        model,
        make_mesh(),
        crop,
        compute=image_embedding,
        batch_size=min(BATCH_SIZE.value, len(paths)),
        max_unreadable=len(paths),
        log=print,
    )
    values, masks = [], []
    for batch in extractor.stream(params, ImageFiles([(path, None) for path in paths.values()])):
        values.extend(batch["values"])
        masks.extend(batch["mask"].tolist())
    # `masks` are 0 for unreadable images, and for the images that pad the last batch to the batch
    # size.
    return {key: x for key, x, read in zip(paths, values, masks, strict=False) if read}


def identity(model: ImageModel, crop: TestCrop) -> str:
    """Returns a hash of an image encoder's parameters, its options and the evaluation transform."""
    total = 0
    for path, x in sorted(nnx.to_flat_state(nnx.state(model)), key=lambda item: str(item[0])):
        values = np.ascontiguousarray(x[...]).view(np.uint8)
        total = zlib.crc32(values, zlib.crc32(str(path).encode(), total))
    described = f"{total:08x} {model.options} {crop!r}"
    return hashlib.blake2b(described.encode(), digest_size=12).hexdigest()


def image_key(path: str) -> str:
    """Returns a key that changes if a file changes: its path, size and modification time."""
    try:
        status = os.stat(path)
    except OSError:
        return f"{os.path.abspath(path)} missing"
    return f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"


def read_cache(file: Path) -> dict[str, np.ndarray]:
    """Reads stored embeddings by key; empty if the file does not exist or is damaged."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(zip(arrays["keys"].tolist(), arrays["embeddings"], strict=True))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        return {}


def write_cache(file: Path, embeddings: dict[str, np.ndarray]) -> None:
    """Stores embeddings by key atomically.

    If the disk is full, nothing is stored, because the embeddings can be computed again.
    """
    temporary = file.with_name(f"{file.name}.{os.getpid()}.npz")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, keys=np.array([*embeddings]), embeddings=[*embeddings.values()])
        temporary.replace(file)
    except OSError as error:
        print(f"note: the embeddings are not stored: {error.strerror or error}")
        temporary.unlink(missing_ok=True)


def write_page(file: Path, text: str, results: list[tuple[str, float]]) -> None:
    """Writes an HTML page with the found images and their similarities to the text."""
    from vit_jax.inspection.html_page import render, write_text
    from vit_jax.inspection.page_images import image_address

    shown = {}
    for path, similarity in results:
        try:
            pixels = decode(Path(path).read_bytes())
        except (OSError, Unreadable):  # The image was removed or replaced during the search.
            continue
        shown[f"{as_text(path)}: {similarity:.3f}"] = image_address(np.asarray(pixels))
    write_text(file, render("search.html", title=text, images=shown))


if __name__ == "__main__":
    command.run(main)
