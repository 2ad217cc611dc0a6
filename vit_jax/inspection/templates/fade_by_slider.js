const strength = document.querySelector("[name=strength]");
strength.oninput = () => {
  fade(document.querySelector(".attention"), strength.value / 100);
  strength.nextElementSibling.textContent = `${strength.value}%`;
};
strength.oninput();
