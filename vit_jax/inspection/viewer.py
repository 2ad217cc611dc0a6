"""Viewer of photographs under attention maps, as HTML with a script.

Sliders choose the layer and the head. A reader without scripts sees the first view over each
photograph.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.inspection.html_page import breakable
from vit_jax.inspection.map_sheet import MapSheets
from vit_jax.inspection.page_images import SMALL, colours_address, image_address, levels_address

PHOTOGRAPH = 640  # Longest side on the page, in pixels.
STRENGTH = 60  # Initial value in percent.

STYLE = """<style>
.attention { display: grid; gap: 1rem 1.6rem; margin: 1rem 0; }
.attention [hidden] { display: none !important; } .attention figure { margin: 0; min-width: 0; }
.attention .stack { position: relative; display: block; background: #000; border-radius: 5px; }
.attention .stack { overflow: hidden; }
.attention .stack > * { display: block; width: 100%; height: 100%; }
.attention .stack > * + * { position: absolute; inset: 0; }
.attention .photograph { opacity: var(--photograph, 1); } .attention .over { opacity: var(--heat, 1); }
.attention .small { image-rendering: pixelated; }
.attention fieldset { border: 0; padding: 0; margin: 0; min-width: 0; }
.attention legend { padding: 0; color: var(--muted); font-size: .85rem; margin-bottom: .3rem; }
.attention .controls { display: grid; gap: .7rem; align-content: start; }
.attention .views { display: flex; flex-wrap: wrap; gap: .3rem; }
.attention .views label { border: 1px solid var(--line); border-radius: 5px; padding: .1rem .6rem; }
.attention label { cursor: pointer; }
.attention .views label:has(:checked) { background: #2b6cb0; color: #fff; }
.attention label:has([type=radio]:focus-visible) { outline: 2px solid; outline-offset: 2px; }
.attention [type=radio] { position: absolute; opacity: 0; pointer-events: none; }
.attention .slider { display: grid; grid-template-columns: 4.6rem minmax(0, 1fr) 4.4rem; gap: .7rem; }
.attention .slider { align-items: center; } .attention [type=range] { width: 100%; margin: .4rem 0; }
.attention output { font-variant-numeric: tabular-nums; text-align: right; }
.attention figcaption { display: flex; flex-wrap: wrap; gap: 0 1.5rem; justify-content: space-between; }
.attention figcaption span { min-width: 0; overflow-wrap: break-word; }
.attention .card { position: relative; display: block; font-size: .8rem; line-height: 1.35; min-width: 0; }
.cards > div { display: grid; gap: .7rem; }
.cards > div { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); }
.attention .name { display: block; margin-top: .35rem; overflow: hidden; text-overflow: ellipsis; }
.live .card:has(:checked) .stack { box-shadow: 0 0 0 2px Canvas, 0 0 0 5px #4c8dd6; }
@media (max-width: 53.99rem) { /* One row, which scrolls: the photograph above stays in view. */
  .live .cards > div { grid: auto / auto-flow 6.2rem; overflow-x: auto; padding: 6px; }
}
@media (min-width: 54rem) {
  .live .cards > div { grid-template-columns: repeat(auto-fit, minmax(6.4rem, 1fr)); }
  .live div:has(> .card:nth-child(10)) { grid-template-columns: repeat(auto-fit, minmax(5rem, 1fr)); }
  .live { grid-template: auto 1fr / minmax(0, min(44rem, 80vh * var(--ratio))) minmax(17rem, 1fr); }
  .live .stage { grid-row: span 2; }
}
</style>"""

# A strength of 0 shows the photographs alone, 1 the maps alone; photographs fade in the upper half
# only.
FADE = """
function fade(root, share) {
  root.style.setProperty("--heat", Math.min(1, 1.25 * share));
  root.style.setProperty("--photograph", Math.min(1, 2 - 2 * share));
}
"""

SCRIPT = (
    FADE
    + """
const root = document.querySelector(".attention"), layers = JSON.parse(root.dataset.layers);
const at = name => root.querySelector(name), all = name => [...root.querySelectorAll(name)];
const cards = all(".card"), chosen = name => at(`[name=${name}]:checked`);
const layerSlider = at("[name=layer]"), headSlider = at("[name=head]"), strength = at("[name=strength]");

function tell(slider, value, text) {
  slider.nextElementSibling.textContent = value;
  slider.setAttribute("aria-valuetext", text);
}

// The tile of a sheet that a view shows, and words for it.
function chosenTile(view) {
  const layer = layers[layerSlider.value - 1], {number, heads, rows, columns, top, first} = layer;
  headSlider.max = heads;
  const head = +headSlider.value, one = view == "head";
  tell(layerSlider, `${number} of ${layers.at(-1).number}`, `layer ${number}`);
  tell(headSlider, one ? `${head} of ${heads}` : "all", one ? `head ${head}` : "all heads");
  const tile = one ? head - 1 : heads + (view == "rollout");
  const text = one ? `Layer ${number}, head ${head}` : view == "mean" ? `Layer ${number}, mean of its heads`
    : `Rollout up to layer ${number}`;
  return {left: tile * columns, top, width: columns, height: rows, peak: first + tile, text};
}

function paint(canvas, picture, {left, top, width, height}) {
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").drawImage(picture, -left, -top);
}

function draw() {
  const view = chosen("view"), tile = view.value == "colours" ? null : chosenTile(view.value);
  if (!tile && layerSlider) for (const slider of [layerSlider, headSlider]) tell(slider, "–", "not used");
  for (const card of cards) {
    const picture = card.querySelectorAll(tile ? ".sheet" : ".colours")[view.dataset.index || 0];
    const part = tile || {left: 0, top: 0, width: picture.naturalWidth, height: picture.naturalHeight};
    paint(card.querySelector("canvas"), picture, part);
    if (card.contains(chosen("image"))) show(card, picture, part);
  }
  fade(root, strength.value / 100);
  tell(strength, `${strength.value}%`, `${strength.value}%`);
}

function show(card, picture, part) {
  const {src, alt} = card.querySelector(".photograph"), photograph = at(".stage .photograph");
  const [name, words] = all(".stage figcaption span"), peaks = JSON.parse(card.dataset.peaks);
  if (photograph.src != src) photograph.src = src;
  photograph.alt = alt;
  paint(at(".stage canvas"), picture, part);
  name.replaceChildren(...card.querySelector(".name").cloneNode(true).childNodes);
  words.textContent = part.text ? `${part.text}; brightest: ${peaks[part.peak]} × the mean`
    : chosen("view").parentElement.textContent;
}

root.addEventListener("input", event => {
  const view = chosen("view").value, moved = event.target;
  if (moved == headSlider || (moved == layerSlider && view == "colours")) at("[value=head]").checked = true;
  draw();
});
addEventListener("load", () => {
  root.classList.add("live");
  for (const part of all(".stage, .controls, .card canvas")) part.hidden = false;
  for (const part of all(".card .over:not(canvas)")) part.hidden = true;
  at(".cards").hidden = cards.length == 1;
  draw();
});
"""
)


def viewer(
    images: np.ndarray,
    names: Sequence[str],
    sheets: MapSheets | None,
    colours: Mapping[str, np.ndarray],
) -> str:
    """Returns photographs under maps, for a page that runs `SCRIPT`.

    Args:
      images: uint8 `[images, height, width, 3]`.
      sheets: the attention maps; None: the model has none.
      colours: pictures over the photographs, `[images, rows, columns, 3]` in 0 ... 1, by caption.
    """
    cards = "".join(
        _card(
            number,
            image,
            name,
            sheets,
            [colours_address(maps[number]) for maps in colours.values()],
        )
        for number, (image, name) in enumerate(zip(images, names, strict=True))
    )
    rows = html.escape(json.dumps([row._asdict() for row in sheets.rows] if sheets else []))
    ratio = images.shape[2] / images.shape[1]
    small = " small" * (max(images.shape[1:3]) <= SMALL)
    return (
        f'{STYLE}<div class="attention" data-layers="{rows}" style="--ratio: {ratio:.3f}">'
        f'<figure class="stage" hidden><div class="stack"><img class="photograph{small}" alt="">'
        '<canvas class="over"></canvas></div>'
        '<figcaption><span></span><span class="muted" aria-live="polite"></span></figcaption></figure>'
        '<div class="controls" hidden><fieldset class="views"><legend>Over the photograph</legend>'
        f"{_views(sheets, colours)}</fieldset>{_sliders(sheets)}</div>"
        f'<fieldset class="cards"><legend>Photograph</legend><div>{cards}</div></fieldset></div>'
    )


def _views(sheets: MapSheets | None, colours: Iterable[str]) -> str:
    """Returns a radio button for each view, with the first selected."""
    views = [("mean", "mean of heads", ""), ("head", "one head", "")] if sheets else []
    views += [("rollout", "rollout", "")] if sheets and sheets.rollout else []
    views += [
        ("colours", caption, f' data-index="{index}"') for index, caption in enumerate(colours)
    ]
    return "".join(
        f'<label><input type="radio" name="view" value="{value}"{data}{" checked" * (not number)}>'
        f"{html.escape(caption)}</label>"
        for number, (value, caption, data) in enumerate(views)
    )


def _sliders(sheets: MapSheets | None) -> str:
    if sheets is None:
        return strength_slider()
    count, heads = len(sheets.rows), sheets.rows[-1].heads
    return _slider("Layer", 1, count, count) + _slider("Head", 1, heads, 1) + strength_slider()


def strength_slider() -> str:
    """Returns the slider for the argument of `fade`, in percent."""
    return _slider("Strength", 0, 100, STRENGTH)


def _slider(name: str, low: int, high: int, value: int) -> str:
    return (
        f'<label class="slider"><span>{name}</span><input type="range" name="{name.lower()}" '
        f'min="{low}" max="{high}" value="{value}"><output></output></label>'
    )


def _card(
    number: int, image: np.ndarray, name: str, sheets: MapSheets | None, colours: Sequence[str]
) -> str:
    """Returns a selectable photograph with its sheet of maps and its colours.

    Without scripts it is shown under the last map, or else under the first colours.

    Args:
      colours: data URLs of pictures.
    """
    over, sheet, peaks = "", "", []
    if sheets:
        over = levels_address(sheets.last_map(number))
        sheet = f'<img class="sheet" alt="" hidden src="{levels_address(sheets.pixels[number])}">'
        peaks = [float(f"{peak:.3g}") for peak in sheets.peaks[number]]
    pictures = "".join(
        f'<img class="colours" alt="" hidden src="{address}">' for address in colours
    )
    small = " small" * (max(image.shape[:2]) <= SMALL)
    title, checked = html.escape(name, quote=True), " checked" * (not number)
    photograph = (
        f'<img class="photograph{small}" alt="{title}" src="{image_address(image, PHOTOGRAPH)}">'
    )
    return (
        f'<label class="card" title="{title}" data-peaks="{json.dumps(peaks)}">'
        f'<input type="radio" name="image" value="{number}"{checked}>'
        f'<span class="stack">{photograph}<img class="over" alt="" src="{over or colours[0]}">'
        f'<canvas class="over" hidden></canvas></span>{sheet}{pictures}<span class="name">{breakable(name)}'
        "</span></label>"
    )
