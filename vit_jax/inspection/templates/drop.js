const query = {{ query|tojson }}, at = id => document.getElementById(id), drop = at("drop"), said = at("said");
const colours = {{ colours|tojson }};
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
  const started = performance.now(), names = at("names");
  const named = names && names.value.trim() ? `&names=${encodeURIComponent(names.value)}` : "";
  try {
    const response = await fetch(`predict?${query}${named}`, {method: "POST", body: file,
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
  if (map) map.src = answer.heat ? answer.heat.picture : answer.overlay;
  box.querySelector("figcaption").textContent = `What the model sees of ${name}`;
  const rows = answer.predictions || answer.classes || answer.objects || [], metres = answer.metres || {};
  const depths = Object.entries(metres).map(([place, depth]) => made("div", `${place} ${depth.toFixed(2)} m`));
  box.querySelector(".classes").replaceChildren(...depths, ...rows.map(found => {
    const bar = made("div", undefined, "bar"), meter = made("meter"), title = made("span", found.class);
    meter.value = found.probability ?? found.share ?? found.score;
    if (found.class in colours) {
      const swatch = made("i", undefined, "swatch");
      swatch.style.background = colours[found.class];
      title.prepend(swatch);
    }
    bar.append(title, made("span", `${(100 * meter.value).toFixed(1)}%`), meter);
    return bar;
  }));
  if (!rows.length && !depths.length) box.querySelector(".classes").textContent = "Nothing was found.";
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
