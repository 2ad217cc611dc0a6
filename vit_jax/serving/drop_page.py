"""Page of the server, on which a photograph is dropped."""

import html
import json

from vit_jax.inspection import viewer
from vit_jax.inspection.html_page import Section, note, page

STYLE = """<style>
.drop { display: block; border: 2px dashed var(--muted); border-radius: 8px; padding: 1.6rem 1rem; }
.drop { text-align: center; cursor: pointer; }
.drop.over, .drop:hover { border-color: #4c8dd6; } .drop:has(:focus-visible) { outline: 2px solid; }
.drop input { position: absolute; opacity: 0; pointer-events: none; }
#said.failed { color: var(--wrong); } #answer[hidden], #near[hidden] { display: none; }
#answer { margin-top: 1.4rem; }
#answer .attention { flex: 1 1 20rem; max-width: 26rem; margin: 0; }
#answer .classes { flex: 1 1 20rem; }
#near .small { image-rendering: pixelated; }
#near .samples { grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); }
</style>"""

BODY = """<label class="drop" id="drop"><input type="file" id="file" accept="image/*">
Drop a photograph here, paste it, or click to choose one.</label>
<p class="muted" id="said" role="status"></p>
<div class="beside" id="answer" hidden>
<div class="attention"><figure><div class="stack">
<img class="photograph" alt="What the model sees of the photograph">{map}</div>
<figcaption></figcaption></figure>{slider}</div>
<div class="classes"></div></div>
<div id="near" hidden><h2>Nearest images of {folder}</h2><div class="samples"></div></div>"""

SCRIPT = """
const what = WHAT, at = id => document.getElementById(id), drop = at("drop"), said = at("said");
let newest = 0;

function made(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function say(text, failed) {
  said.textContent = text;
  said.classList.toggle("failed", Boolean(failed));
}

async function ask(file) {
  const number = ++newest;
  say(`Looking at ${file.name} …`);
  let answer, error;
  const started = performance.now();
  try {
    const response = await fetch(`predict?${what}`, {method: "POST", body: file,
      headers: {"Content-Type": file.type || "application/octet-stream"}});
    answer = await response.json();
    error = answer.error;
  } catch (failure) {
    error = `no answer from the server (${failure.message})`;
  }
  if (number !== newest) return;
  if (error) return say(`${file.name}: ${error}`, true);
  say(`${file.name}: answered in ${Math.round(performance.now() - started)} ms`);
  show(file.name, answer);
}

function sharpen(event) {
  const image = event.target;
  image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) <= 64);
}

function show(name, answer) {
  const box = at("answer"), [photograph, map] = box.querySelectorAll("img");
  photograph.onload = sharpen;
  photograph.src = answer.seen;
  if (answer.heat) map.src = answer.heat.picture;
  box.querySelector("figcaption").textContent = `What the model sees of ${name}`;
  box.querySelector(".classes").replaceChildren(...answer.predictions.map(found => {
    const bar = made("div", undefined, "bar"), meter = made("meter");
    meter.value = found.probability;
    bar.append(made("span", found.class), made("span", `${(100 * found.probability).toFixed(1)}%`), meter);
    return bar;
  }));
  box.hidden = false;
  at("near").hidden = !answer.neighbours;
  at("near").querySelector(".samples").replaceChildren(...(answer.neighbours || []).map(near => {
    const figure = made("figure"), image = made("img"), caption = made("figcaption", near.path);
    image.alt = near.path;
    image.onload = sharpen;
    if (near.picture) image.src = near.picture;
    caption.append(made("br"), made("span", near.similarity.toFixed(3)));
    figure.append(image, caption);
    return figure;
  }));
}

function first(files) {
  if (files.length) ask(files[0]);
}
at("file").onchange = event => { first(event.target.files); event.target.value = ""; };
document.ondragover = event => { event.preventDefault(); drop.classList.add("over"); };
document.ondragleave = () => drop.classList.remove("over");
document.ondrop = event => {
  event.preventDefault();
  drop.classList.remove("over");
  first(event.dataTransfer.files);
};
document.onpaste = event => first(event.clipboardData.files);
"""

FADE_BY_SLIDER = (
    viewer.FADE
    + """
const strength = document.querySelector("[name=strength]");
strength.oninput = () => {
  fade(document.querySelector(".attention"), strength.value / 100);
  strength.nextElementSibling.textContent = `${strength.value}%`;
};
strength.oninput();
"""
)

NEAREST = 8


def drop_page(title: str, about: str, heat: bool, folder: str) -> str:
    """Returns the page as HTML.

    Args:
      about: text below the title.
      heat: show attention rollout over the image.
      folder: folder of the nearest images; empty: none are shown.
    """
    asked = ["seen=1", *["heat=1"] * heat, *[f"neighbours={NEAREST}"] * bool(folder)]
    over, slider = ('<img class="over" alt="">', viewer.strength_slider()) if heat else ("", "")
    body = BODY.format(map=over, slider=slider, folder=html.escape(folder))
    script = SCRIPT.replace("WHAT", json.dumps("&".join(asked))) + FADE_BY_SLIDER * heat
    return page(title, [Section("", note(about) + viewer.STYLE + STYLE + body, "")], script=script)
