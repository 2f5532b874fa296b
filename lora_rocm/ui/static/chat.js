// The chat: Enter sends, a sent message leaves its field, and the newest answer stays in view.

const form = document.getElementById("chat-form");
const prompt = document.getElementById("field-prompt");

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!event.repeat) form.requestSubmit();
});
let sent = "";
form.addEventListener("htmx:config:request", () => { sent = prompt.value; });
form.addEventListener("htmx:after:request", (event) => {
  const { response } = event.detail.ctx;
  if (event.target !== form || response.status >= 400) return; // a refusal keeps the message
  if (prompt.value === sent) prompt.value = ""; // otherwise the next message is being written
  document.getElementById("problem").replaceChildren();
});

// A reader who scrolled up is not pulled down.
let isAtEnd = true;
const log = () => document.getElementById("chat-log");
document.addEventListener("scroll", (event) => {
  if (event.target.id === "chat-log") isAtEnd = event.target.scrollHeight - event.target.scrollTop - event.target.clientHeight < 60;
}, true);
const follow = () => { if (isAtEnd && log() !== null) log().scrollTop = log().scrollHeight; };
new MutationObserver(follow).observe(document.getElementById("talk"), { childList: true, subtree: true, characterData: true });
follow();
