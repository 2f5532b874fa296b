// After recipes were added, their boxes are cleared, so that nobody adds them twice. A refusal keeps them.

const form = document.getElementById("add-form");
let isSent = false;
const watch = (id, work) => {
  new MutationObserver(work).observe(document.getElementById(id), { childList: true, subtree: true, characterData: true });
};
form?.addEventListener("submit", () => { isSent = true; });
watch("problem", () => { isSent = false; });
watch("queue", () => {
  if (isSent) form.reset();
  isSent = false;
});

// A changed text is discarded only if the user says so. After a conflict, what is shown is not saved either.
const recipe = document.getElementById("queue-recipe");
const isChanged = () => {
  const text = recipe.querySelector("textarea");
  return text !== null && (text.value !== text.defaultValue || recipe.querySelector(".problem") !== null);
};
addEventListener("beforeunload", (event) => { if (isChanged()) event.preventDefault(); });
document.addEventListener("htmx:config:request", (event) => {
  const { request, sourceElement, target } = event.detail.ctx;
  if (request.method !== "GET" || target !== recipe || recipe.contains(sourceElement) || !isChanged()) return;
  if (!confirm(recipe.dataset.discard)) event.preventDefault();
});
