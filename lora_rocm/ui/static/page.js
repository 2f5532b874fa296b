// What every page needs: the live stream, the switch of colours, and buttons that copy.

/** The changes that a stream does not repeat: those before it was opened have to be asked for. */
const LOST = /^(work-|queue|chat)/;

/** A name of a change for each element that follows changes. */
function followed() {
  const found = new Set();
  for (const each of document.querySelectorAll('[hx-trigger*="live:"]')) {
    const names = [...each.getAttribute("hx-trigger").matchAll(/live:([\w-]+)/g)].map(([, name]) => name);
    if (!names.some((name) => found.has(name))) found.add(names.find((name) => LOST.test(name)) ?? names[0]);
  }
  return found;
}

/**
 * The live stream of this tab. Each name in a message becomes an event "live:NAME" of the body; steps are in its detail.
 * A hidden tab has no stream: a browser opens only six connections to a server, and tabs that nobody sees would take
 * them all. When it is shown again, it continues at its place, and everything that follows changes is asked for again.
 */
function follow(address) {
  const lost = document.getElementById("live-lost");
  let stream = null;
  let place = null;
  let wasOpen = false;
  const announce = (name, steps = []) => {
    document.body.dispatchEvent(new CustomEvent(`live:${name}`, { detail: { steps } }));
  };
  const open = () => {
    const url = new URL(address, location.href);
    if (place) url.searchParams.set("from", place);
    stream = new EventSource(url);
    stream.addEventListener("open", () => {
      lost.hidden = true;
      for (const name of followed()) if (wasOpen || LOST.test(name)) announce(name);
      wasOpen = true;
    });
    stream.addEventListener("error", () => {
      if (stream === null) return;
      lost.hidden = false;
      if (stream.readyState === EventSource.CLOSED) {
        stream = null;
        setTimeout(() => { if (!document.hidden && stream === null) open(); }, 3000);
      }
    });
    stream.addEventListener("live", (message) => {
      place = message.lastEventId;
      const { changed, steps } = JSON.parse(message.data);
      for (const name of changed) announce(name, steps);
    });
  };
  const close = () => {
    stream?.close();
    stream = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
    } else if (stream === null) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted && stream === null) open(); });
  if (!document.hidden) open();
}

/** The headers with which a script of this page proves a change: fetch(url, {method: "POST", headers: csrfHeaders()}). */
export function csrfHeaders() {
  return { "X-CSRF": document.querySelector('meta[name="csrf"]').content };
}

// A change that is on its way is not begun again, as by a double click. After an answer that leads to another page, none is.
const changing = new Set(); // forms and buttons
document.addEventListener("htmx:config:request", (event) => {
  const { request, sourceElement } = event.detail.ctx;
  Object.assign(request.headers, csrfHeaders());
  if (request.method === "GET") return;
  if (changing.has(sourceElement)) event.preventDefault();
  changing.add(sourceElement);
});
document.addEventListener("htmx:finally:request", (event) => {
  const { hx, request, sourceElement } = event.detail.ctx;
  if (request.method !== "GET" && !hx?.redirect) changing.delete(sourceElement);
});
addEventListener("pageshow", () => { changing.clear(); isLeaving = false; });

// A page that leads on by itself, once what it waits for is there, is not one that Back leads to. It leads on once: on a
// slow machine a second answer would abort the visit that the first one began.
let isLeaving = false;
document.addEventListener("htmx:before:response", (event) => {
  const { hx, request } = event.detail.ctx;
  if (request.method !== "GET" || !hx.redirect) return;
  event.preventDefault();
  if (!isLeaving) location.replace(hx.redirect);
  isLeaving = true;
});

// An answer is not drawn over the answer to a later question.
const asked = new WeakMap(); // context of a request -> its number
const drawn = new WeakMap(); // target -> number of the newest request whose answer it shows
let count = 0;
document.addEventListener("htmx:before:request", (event) => { asked.set(event.detail.ctx, ++count); });
document.addEventListener("htmx:before:swap", (event) => {
  const { ctx } = event.detail;
  if (!(ctx.target instanceof Element)) return; // a problem, which the answer itself places
  const number = asked.get(ctx) ?? count;
  if (ctx.request.method === "GET" && number < (drawn.get(ctx.target) ?? 0)) event.preventDefault();
  else drawn.set(ctx.target, Math.max(number, drawn.get(ctx.target) ?? 0));
});

// A change that works ends the problem of the attempt before it.
document.addEventListener("htmx:after:request", (event) => {
  const { request, response } = event.detail.ctx;
  if (request.method === "GET" || !response || response.status >= 400) return;
  document.getElementById("problem").replaceChildren();
});

// A plain form is sent once. One with data-keeps stays as it is if it is refused: the problem is shown above it, and
// nothing written is lost.
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (event.defaultPrevented || form.method !== "post") return;
  const keeps = form.matches("form[data-keeps]");
  if (keeps || changing.has(form)) event.preventDefault();
  if (changing.has(form)) return;
  changing.add(form);
  if (!keeps) return; // the browser sends it
  const answer = await fetch(form.action, {
    method: "POST",
    headers: { ...csrfHeaders(), "HX-Request": "true" },
    body: new URLSearchParams(new FormData(form)),
  }).catch(() => null);
  if (answer?.ok) {
    location.assign(answer.url);
    return;
  }
  changing.delete(form);
  if (answer === null) return; // the notice of the lost stream says why
  const box = document.createElement("div");
  box.setAttribute("role", "alert");
  box.dataset.refusal = "";
  box.innerHTML = await answer.text(); // of this server, which escapes every text
  if (form.previousElementSibling?.dataset.refusal !== undefined) form.previousElementSibling.remove();
  form.before(box);
});

/** Leads back to the page before. */
class BackButton extends HTMLElement {
  connectedCallback() {
    if (this.firstChild) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = this.dataset.text;
    button.addEventListener("click", () => { history.back(); });
    this.append(button);
  }
}
customElements.define("back-button", BackButton);

class CopyButton extends HTMLElement {
  connectedCallback() {
    if (this.firstChild) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = this.dataset.copy;
    button.addEventListener("click", async () => {
      const source = this.previousElementSibling;
      const text = source.textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = this.dataset.copied;
      } catch {
        if (source.select) source.select();
        else getSelection().selectAllChildren(source);
        button.textContent = this.dataset.byHand;
      }
      setTimeout(() => { button.textContent = this.dataset.copy; }, 2000);
    });
    this.append(button);
  }
}
customElements.define("copy-button", CopyButton);

const theme = document.getElementById("theme");
theme.value = document.documentElement.dataset.theme ?? "";
theme.addEventListener("change", () => {
  document.documentElement.dataset.theme = theme.value;
  try {
    localStorage.setItem("theme", theme.value);
  } catch {
    // storage is switched off: the choice holds for this page
  }
  document.body.dispatchEvent(new CustomEvent("theme"));
});

follow(document.body.dataset.live);
