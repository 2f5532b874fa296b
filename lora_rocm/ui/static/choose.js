// The keys of the blind test: 1 and 2 for a picture, 0 for a tie. The ranking opens when the votes are enough.

document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.target.closest("input, textarea, select")) return;
  const button = document.querySelector(`#test button[data-key="${CSS.escape(event.key)}"]`);
  if (button === null || document.querySelector("#test .htmx-request") !== null) return;
  event.preventDefault();
  button.click();
});

// The second click of a double click would be a vote on the next pair, which nobody has seen yet.
document.addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest("#test button") !== null) event.stopImmediatePropagation();
}, true);

// The ranking and the named results open by themselves once, when the votes are enough.
let wasEnough = document.querySelector("#test [data-settled]") !== null;
document.addEventListener("htmx:after:swap", () => {
  const isEnough = document.querySelector("#test [data-settled]") !== null;
  if (isEnough && !wasEnough) for (const id of ["answer", "named"]) document.getElementById(id).open = true;
  wasEnough = isEnough;
});

// When the pictures or answers that the user asked for are there, the keys and the focus are at the vote. A user who has
// gone on to write or read elsewhere stays there.
let isAwaited = false;
document.addEventListener("submit", (event) => {
  if (event.target.closest("#draw") !== null) isAwaited = true;
});
function toVote() {
  const isDone = document.querySelector("#drawing .badge-done") !== null && !document.querySelector("#test.htmx-request");
  if (!isAwaited || !isDone) return;
  isAwaited = false;
  const at = document.activeElement;
  if (at === document.body || at.matches("#draw button")) document.getElementById("vote")?.focus();
}
document.addEventListener("htmx:finally:request", () => { setTimeout(toVote); });
