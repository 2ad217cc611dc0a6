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
