// <model-picker>: the models on this machine, for the field before it. It opens below the field and changes only it.

import { csrfHeaders } from "/static/page.js";

const PAUSE_MS = 300;
const READING_MS = 150; // between two requests while the server still reads headers

class ModelPicker extends HTMLElement {
  connectedCallback() {
    this.button = this.querySelector("button");
    this.panel = this.querySelector(".model-picker");
    this.addEventListener("click", (event) => this.clicked(event));
    this.addEventListener("input", (event) => this.typed(event));
    this.addEventListener("change", (event) => event.stopPropagation());
    this.addEventListener("keydown", (event) => this.pressed(event));
  }

  disconnectedCallback() { clearTimeout(this.timer); }

  get field() { return this.closest(".field").querySelector("input, textarea"); }

  async ask(name, query = {}, body = null) {
    const url = new URL(`/recipe/models${name}${this.dataset.query}`, location.href);
    for (const [key, value] of Object.entries(query)) url.searchParams.set(key, value);
    const headers = { ...csrfHeaders(), "HX-Request": "true" };
    let answer;
    try {
      answer = await fetch(url, body === null ? { headers } : { method: "POST", headers, body: new URLSearchParams(body) });
    } catch {
      return null;
    }
    const box = document.getElementById("problem");
    const text = await answer.text();
    if (answer.ok) {
      box.replaceChildren();
      return text;
    }
    box.innerHTML = text;
    box.scrollIntoView({ block: "nearest" });
    return null;
  }

  async toggle() {
    const opens = this.panel.hidden;
    this.panel.hidden = !opens;
    this.button.setAttribute("aria-expanded", String(opens));
    clearTimeout(this.timer);
    if (!opens) return;
    const text = await this.ask("");
    if (text === null) {
      this.panel.hidden = true;
      this.button.setAttribute("aria-expanded", "false");
      return;
    }
    this.panel.innerHTML = text;
    htmx.process(this.panel);
    this.panel.querySelector("[data-words]").focus();
    this.later(READING_MS);
  }

  get unread() { return Number(this.panel.querySelector("[data-unread]")?.dataset.unread ?? 0); }

  /** Ask again while there are headers to read. The focus stays, because only the list is replaced. */
  later(pause, always = false) {
    clearTimeout(this.timer);
    if (!this.panel.hidden && (always || this.unread > 0)) this.timer = setTimeout(() => this.list(), pause);
  }

  async list() {
    const words = this.panel.querySelector("[data-words]").value;
    const text = await this.ask("/listed", { words });
    if (text === null || words !== this.panel.querySelector("[data-words]").value) return;
    const { activeElement } = document;
    const picked = activeElement?.dataset?.pick;
    this.panel.querySelector(".models").innerHTML = text;
    if (picked) this.panel.querySelector(`[data-pick="${CSS.escape(picked)}"]`)?.focus();
    this.later(READING_MS);
  }

  async add() {
    const input = this.panel.querySelector("[data-folder]");
    const text = await this.ask("/folder", {}, { folder: input.value });
    if (text === null) return;
    input.value = "";
    this.panel.querySelector(".models").innerHTML = text;
    this.later(READING_MS);
  }

  clicked(event) {
    const button = event.target.closest("button");
    if (button === this.button) this.toggle();
    if (button?.dataset.add !== undefined) this.add();
    if (button?.dataset.pick !== undefined) this.pick(button.dataset.pick);
  }

  pick(value) {
    const { field } = this;
    field.value = value;
    this.toggle();
    field.focus();
    field.dispatchEvent(new Event("change", { bubbles: true }));
  }

  typed(event) {
    event.stopPropagation();
    if (event.target.dataset.words !== undefined) this.later(PAUSE_MS, true);
  }

  pressed(event) {
    if (event.key === "Escape" && !this.panel.hidden) {
      this.toggle();
      this.button.focus();
    }
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault(); // the form around it would be sent
    if (event.target.dataset.folder !== undefined) this.add();
    if (event.target.dataset.repo !== undefined) this.panel.querySelector("[data-ask]").click();
  }
}
customElements.define("model-picker", ModelPicker);
