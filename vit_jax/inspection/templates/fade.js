// A share of 0 shows the photographs alone, 1 the maps alone; photographs fade in the upper half only.
function fade(root, share) {
  root.style.setProperty("--heat", Math.min(1, 1.25 * share));
  root.style.setProperty("--photograph", Math.min(1, 2 - 2 * share));
}
