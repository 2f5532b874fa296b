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
