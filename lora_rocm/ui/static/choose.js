// The keys of the blind test: 1 and 2 for a picture, 0 for a tie. The ranking opens when the votes are enough.

document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.target.closest("input, textarea, select")) return;
  const button = document.querySelector(`#test button[data-key="${CSS.escape(event.key)}"]`);
  if (button === null || document.querySelector("#test .htmx-request") !== null) return;
  event.preventDefault();
  button.click();
});

// The ranking and the named results open by themselves once, when the votes are enough.
let wasEnough = document.querySelector("#test [data-settled]") !== null;
document.addEventListener("htmx:after:swap", () => {
  const isEnough = document.querySelector("#test [data-settled]") !== null;
  if (isEnough && !wasEnough) for (const id of ["answer", "named"]) document.getElementById(id).open = true;
  wasEnough = isEnough;
});
