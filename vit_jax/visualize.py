"""Shows what a ViT sees: python -m vit_jax.visualize --checkpoint=WORKDIR --images=photos --out=DIR

Into DIR: attention rollout over the images (--layers: after each layer; --heads: each head of the last
layer), the heads' mean attention distance, similarity of the position embeddings, principal components of the
patch embedding's filters and, as colours, of the last layer's tokens; all as PNG, the numbers as arrays.npz,
and index.html with all of them. A figure that is not defined for the model is a line that says why.
"""

import html
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import flags

from vit_jax import command
from vit_jax.data.files import find_images
from vit_jax.errors import UserError

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "What load_model takes: a workdir, a file, hf://owner/name."
)
IMAGES = flags.DEFINE_list("images", [], "Images, folders or patterns, with commas; or - for standard input.")
OUT = flags.DEFINE_string("out", None, "Folder for the figures: new, or empty.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Write into a folder that holds files.")
MOST = flags.DEFINE_integer("most", 16, "Images that are shown.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Images at once.", lower_bound=1)
IMAGE_SIZE = flags.DEFINE_string("image_size", None, "Pixels, 384 or HEIGHTxWIDTH, if not the checkpoint's.")
LAYERS = flags.DEFINE_bool("layers", False, "Rollout after each layer.")
HEADS = flags.DEFINE_bool("heads", False, "The last layer's attention, of each head.")

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid #8884; border-radius: 6px; padding: .5rem; background: #fff; }
img { width: 100%; height: auto; display: block; } figcaption { font-size: .85rem; color: #222; }
h1 { font-size: 1.4rem; }
"""


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not CHECKPOINT.value or not IMAGES.value or not OUT.value:
        raise UserError("give --checkpoint=WORKDIR, --images=PATH and --out=DIR")
    out = Path(OUT.value)
    if out.exists() and any(out.iterdir()) and not OVERWRITE.value:
        raise UserError(f"{out} holds files; give --overwrite or another --out")
    found = find_images(IMAGES.value)
    command.use_compilation_cache()

    import vit_jax
    from vit_jax.inspection import attention as looks
    from vit_jax.inspection import embeddings, figures

    changes = {"image_size": image_size(IMAGE_SIZE.value)} if IMAGE_SIZE.value else {}
    model = vit_jax.load_model(CHECKPOINT.value, **changes)
    looks.check_attends(model)
    names, images = read(found, model.image_size)
    arrays, drawn, undefined = {"images": images}, {}, {}

    def draw(name: str, caption: str, make: Callable[[], tuple[dict, object]]) -> None:
        """A figure into the folder and its arrays among the others."""
        try:
            values, figure = make()
        except UserError as error:
            undefined[caption] = str(error)
            print(f"{caption}: not defined: {error}")
            return
        arrays.update(values)
        out.mkdir(parents=True, exist_ok=True)
        figure.savefig(out / f"{name}.png", dpi=110)
        drawn[name] = caption
        print(f"{out / name}.png  {caption}")

    distances, rolled, heads, tokens = look(model, images)

    def overlays(maps):
        return [figures.overlay(image, seen) for image, seen in zip(images, maps, strict=True)]

    draw(
        "rollout",
        "Attention rollout: how much of each patch the output sees",
        lambda: ({"rollout": rolled[:, -1]}, figures.pairs(images, overlays(rolled[:, -1]), names)),
    )
    more = {"layers": ("Rollout after each layer", "layer", rolled)} if LAYERS.value else {}
    if HEADS.value:
        more["heads"] = "The last layer's attention, each head", "head", heads
    for kind, (caption, one, maps) in more.items():
        for number, (name, image, own) in enumerate(zip(names, images, maps, strict=True)):
            shown = [figures.overlay(image, seen) for seen in own]
            titles = [f"{one} {index + 1}" for index in range(len(own))]
            made = {kind: maps}, figures.tiles(shown, 6, titles)
            draw(f"{kind}_{number}", f"{caption}: {name}", lambda made=made: made)
    draw(
        "distance",
        "Mean attention distance of each head",
        lambda: ({"distance": distances}, figures.distance_dots(distances)),
    )

    def positions():
        similarity = embeddings.position_similarity(model)
        return {"position_similarity": similarity}, figures.similarity_tiles(similarity)

    def filters():
        components = embeddings.filters(model)
        return {"filters": components}, figures.tiles(components, 7)

    def colours():
        coloured = embeddings.token_colours(model, tokens)
        return {"token_colours": coloured}, figures.pairs(images, list(coloured), names)

    draw("positions", "Similarity of position embeddings", positions)
    draw("filters", "Principal components of the patch embedding's filters", filters)
    draw("tokens", "The last layer's tokens: their three principal components as colours", colours)
    np.savez_compressed(out / "arrays.npz", **arrays)
    (out / "index.html").write_text(page(drawn, undefined))
    print(f"{out / 'index.html'}")


def look(model, images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of all images: the heads' distances `[layers, heads]`, rollout `[images, layers, rows, columns]`, what
    each head of the last layer sees `[images, heads, rows, columns]`, and the last layer's tokens."""
    import jax
    from flax import nnx

    from vit_jax.inspection.attention import attention_distance, of_patches, rollout
    from vit_jax.models.layers import normalize

    graphdef, params = nnx.split(model)

    @jax.jit
    def captured(params, batch):
        return nnx.merge(graphdef, params)(normalize(batch), capture=("attention", "tokens"))[1]

    distances, rolled, heads, tokens = [], [], [], []
    for start in range(0, len(images), BATCH_SIZE.value):
        batch = images[start : start + BATCH_SIZE.value]
        found = jax.device_get(captured(params, batch))
        distances.append(attention_distance(model, found["attention"]) * len(batch))
        rolled.append(np.stack([of_patches(model, after) for after in rollout(found["attention"])], axis=1))
        last = found["attention"][-1]
        heads.append(np.stack([of_patches(model, last[:, head]) for head in range(last.shape[1])], axis=1))
        tokens.append(found["tokens"][-1])
        if sys.stderr.isatty():
            print(f"\r{start + len(batch)}/{len(images)} images", end="", file=sys.stderr, flush=True)
    return sum(distances) / len(images), *map(np.concatenate, (rolled, heads, tokens))


def read(found: list[tuple[str, bytes | None]], size: tuple[int, int]) -> tuple[list[str], np.ndarray]:
    """Names and pixels of the first readable images, their centres, uint8 `[images, height, width, 3]`.

    Raises:
      UserError: none is readable.
    """
    import cv2

    from vit_jax.data.decode import Unreadable, decode
    from vit_jax.data.files import ImageFiles

    source, names, images = ImageFiles(found), [], []
    for index in range(len(source)):
        if len(images) == MOST.value:
            print(f"note: the first {MOST.value} of {len(source)} images are shown (--most)")
            break
        try:
            pixels = decode(source[index].image)
        except Unreadable:
            print(f"unreadable image skipped: {source.describe(index)}")
            continue
        height, width = pixels.shape[:2]
        scale = min(height / size[0], width / size[1])
        h, w = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        top, left = (height - h) // 2, (width - w) // 2
        kind = cv2.INTER_AREA if scale > 1 else cv2.INTER_LINEAR
        images.append(cv2.resize(pixels[top : top + h, left : left + w], size[::-1], interpolation=kind))
        names.append(Path(source.describe(index)).name)
    if not images:
        raise UserError(f"none of the {len(source)} files is an image that can be read")
    return names, np.stack(images)


def image_size(text: str) -> int | tuple[int, int]:
    """`384` or `256x384`."""
    try:
        sides = tuple(map(int, text.split("x")))
    except ValueError:
        sides = ()
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"--image_size={text}: give pixels, 384 or HEIGHTxWIDTH")
    return sides[0] if len(sides) == 1 else sides


def page(drawn: dict[str, str], undefined: dict[str, str]) -> str:
    """All figures side by side."""
    title = html.escape(f"What {CHECKPOINT.value} sees")
    figures = "".join(
        f'<figure><img src="{name}.png" alt="{html.escape(caption)}"><figcaption>{html.escape(caption)}'
        "</figcaption></figure>\n"
        for name, caption in drawn.items()
    )
    missing = "".join(
        f"<figure><figcaption>{html.escape(caption)}: {html.escape(reason)}</figcaption></figure>\n"
        for caption, reason in undefined.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>\n<main>\n{figures}{missing}</main>\n</body></html>\n"
    )


if __name__ == "__main__":
    command.run(main)
