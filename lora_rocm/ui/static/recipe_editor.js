// <recipe-editor>: the fields and the YAML of a recipe are two views of one text. A change of a field is made in the text
// by the server, which keeps its comments. Nothing is written until Save.

import { csrfHeaders } from "/static/page.js";

const PAUSE_MS = 350;
const PLAN_PAUSE_MS = 900;
const MISSING = "missing"; // the version of a file that does not exist
const LOOK_MS = 4000; // between two looks at the file, which another program may change

class RecipeEditor extends HTMLElement {
  connectedCallback() {
    this.file = this.dataset.file;
    this.version = this.dataset.version;
    this.area = this.querySelector("#recipe-text");
    this.fields = this.querySelector("#recipe-fields");
    this.state = this.querySelector("#saved-state");
    this.savedText = this.area.value;
    this.view = "simple";
    this.order = 0;
    this.chain = this.saving = Promise.resolve();
    this.pending = new Set(); // fields that were typed in a moment ago
    this.asked = {}; // box -> number of its newest question
    this.area.addEventListener("input", () => this.soon());
    this.fields.addEventListener("input", (event) => this.typed(event));
    this.fields.addEventListener("change", (event) => this.changed(event));
    this.fields.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target.id === "find-key") event.preventDefault(); // it would save
    });
    this.addEventListener("click", (event) => this.clicked(event));
    this.querySelector("#recipe-save").addEventListener("submit", (event) => {
      event.preventDefault();
      if (event.submitter?.id === "undo") this.undo(); else this.save();
    });
    addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === "s") { event.preventDefault(); this.save(); }
    });
    addEventListener("beforeunload", (event) => { if (this.isDirty) event.preventDefault(); });
    addEventListener("focus", () => this.look());
    addEventListener("pageshow", () => { this.isStarting = false; });
    this.timer = setInterval(() => { if (!document.hidden) this.look(); }, LOOK_MS);
    this.querySelector("#start").hidden = false;
    this.show();
    this.check();
  }

  disconnectedCallback() { clearInterval(this.timer); }

  get isDirty() { return this.isGone || this.area.value !== this.savedText; }

  address(name) { return `/recipe/${name}?${new URLSearchParams({ file: this.file })}`; }

  /** Post fields; an error of the server is shown in the page's box, and the answer is null. */
  async post(name, fields, headers = {}) {
    const body = new URLSearchParams(fields);
    const send = { method: "POST", body, headers: { ...csrfHeaders(), "HX-Request": "true", ...headers } };
    let answer;
    try {
      answer = await fetch(this.address(name), send);
    } catch {
      this.state.textContent = this.dataset.lost;
      return null;
    }
    const box = document.getElementById("problem");
    const choice = this.querySelector("#conflict-choice");
    if (answer.ok) { // a check that goes on does not end the problem of another request
      if (this.failed === name || name === "save" || name === "undo") box.replaceChildren();
      return answer;
    }
    this.failed = name;
    box.innerHTML = await answer.text();
    box.scrollIntoView({ block: "nearest" });
    const conflict = box.querySelector("[data-version]");
    choice.hidden = conflict === null;
    if (conflict !== null) this.theirs = conflict.dataset.version;
    return null;
  }

  soon() {
    this.show();
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.check(), PAUSE_MS);
  }

  /** Changes are sent one after another, so that each is made in the text that the one before left. */
  check(key = "", value = "") {
    clearTimeout(this.planning); // what it would count has changed
    this.chain = this.chain.then(() => this.checked(key, value));
    return this.chain;
  }

  /** Bring what was typed a moment ago into the text, and wait until no change is on its way. */
  async settled() {
    this.pending.forEach((field) => this.send(field));
    for (let chain = null; chain !== this.chain;) {
      chain = this.chain;
      await chain;
    }
  }

  async checked(key, value) {
    const sent = this.area.value;
    const answer = await this.post("draft", { text: sent, key, value });
    if (answer === null) return;
    const found = await answer.json();
    if (this.area.value !== sent) { // typed meanwhile: that text is checked next
      if (key) this.check(key, value);
      return;
    }
    if (found.text !== sent) this.setText(found.text);
    this.querySelector("#verdict").innerHTML = found.verdict;
    if (found.shape !== this.dataset.shape) await this.renew(found.shape);
    this.fill(found);
    this.show();
    this.isValid = found.is_valid;
    this.show();
    clearTimeout(this.planning);
    if (found.is_valid) this.planning = setTimeout(() => this.plan(found.text), PLAN_PAUSE_MS);
  }

  /** Ask for the estimate and the data of a checked text, unless another was typed meanwhile: that one is checked first. */
  plan(checked) {
    if (this.area.value !== checked) return;
    this.ask("plan", "plan");
    this.ask("check", "check");
  }

  /** Ask for an estimate of the text. Its box follows the work by itself. Answers about an earlier text are not drawn. */
  async ask(name, box, more = {}) {
    const number = (this.asked[box] = (this.asked[box] ?? 0) + 1);
    const answer = await this.post(name, { text: this.area.value, ...more });
    if (answer === null) return;
    const text = await answer.text();
    if (number !== this.asked[box]) return;
    const target = document.getElementById(box);
    for (const each of target.querySelectorAll("[hx-get]")) htmx.trigger(each, "htmx:abort");
    target.innerHTML = text;
    htmx.process(target);
  }

  /** Make the changes of a preset in the text. Nothing is saved. */
  async apply(preset) {
    const sent = this.area.value;
    const answer = await this.post("preset/apply", { text: sent, preset });
    if (answer === null) return;
    if (this.area.value !== sent) { // typed meanwhile
      await this.apply(preset);
      return;
    }
    this.setText((await answer.json()).text);
    await this.check();
    this.ask("preset", "preset", { preset });
  }

  /** Fit the intervals to the number of steps. Nothing is saved. The check that follows renews the box. */
  async fit() {
    const sent = this.area.value;
    const answer = await this.post("check/fit", { text: sent });
    if (answer === null || this.area.value !== sent) return;
    this.setText((await answer.json()).text);
    await this.check();
    this.querySelector("#check-title").focus();
  }

  /** Start a run of what the page shows, once. */
  async start() {
    if (this.isStarting) return;
    this.isStarting = true;
    this.isStarting = await this.started();
  }

  /** Whether the run was started, so that the page leaves. */
  async started() {
    await this.settled();
    if (this.isValid === false || (this.isDirty && !(await this.save()))) return false;
    const answer = await this.post("start", { text: this.area.value }, { "If-Match": `"${this.version}"` });
    if (answer === null) return false;
    location.href = (await answer.json()).address;
    return true;
  }

  setText(text) {
    const { scrollTop, selectionStart } = this.area;
    this.area.value = text;
    this.area.setSelectionRange(selectionStart, selectionStart);
    this.area.scrollTop = scrollTop;
  }

  /** There are other fields now: the family, adapter or optimizer has changed. */
  async renew(shape) {
    const answer = await this.post("fields", { text: this.area.value });
    if (answer === null) return;
    const open = [...this.fields.querySelectorAll("details[open]")].map((each) => each.id);
    const focused = document.activeElement?.id;
    this.fields.innerHTML = await answer.text(); // a chooser of a model processes its own content
    this.dataset.shape = shape;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    this.setView(this.view);
    if (focused) document.getElementById(focused)?.focus();
  }

  fill(found) {
    for (const set of this.fields.querySelectorAll("fieldset")) set.disabled = !found.is_yaml;
    if (!found.is_yaml) return;
    for (const field of this.fields.querySelectorAll("[data-key]")) {
      const { key } = field.dataset;
      const value = found.values[key] ?? "";
      const fault = found.faults[key] ?? "";
      if (field !== document.activeElement || !field.isTyped) this.setField(field, value);
      field.toggleAttribute("aria-invalid", fault !== "");
      if (fault) field.setAttribute("aria-invalid", "true");
      const box = field.closest(".recipe-field");
      if ((value || fault) && box.closest(".view-simple")) box.hidden = false; // a key that is set is never out of sight
      box.classList.toggle("field-wrong", fault !== "");
      box.querySelector(".fault").textContent = fault;
    }
    for (const details of this.fields.querySelectorAll("details")) {
      details.classList.toggle("has-fault", details.querySelector(".field-wrong") !== null);
    }
  }

  setField(field, value) {
    if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) {
      field.add(new Option(value, value));
    }
    if (field.value !== value) field.value = value;
    const slider = this.fields.querySelector(`[data-slider="${CSS.escape(field.id)}"]`);
    if (slider) slider.value = value || field.placeholder;
  }

  typed(event) {
    const field = event.target;
    if (field.id === "find-key") return this.find(field.value);
    if (field.dataset.slider) {
      const target = document.getElementById(field.dataset.slider);
      target.value = field.value;
      this.sendSoon(target);
      return undefined;
    }
    if (!field.dataset.key || field.tagName === "SELECT") return undefined;
    field.isTyped = true;
    this.sendSoon(field);
    return undefined;
  }

  sendSoon(field) {
    clearTimeout(field.pause);
    this.pending.add(field);
    field.pause = setTimeout(() => this.send(field), PAUSE_MS);
  }

  /** Make the change of a field in the text. */
  send(field) {
    clearTimeout(field.pause);
    this.pending.delete(field);
    return this.check(field.dataset.key, field.value);
  }

  changed(event) {
    const field = event.target;
    if (!field.dataset.key) return;
    field.isTyped = false;
    this.send(field);
  }

  clicked(event) {
    const button = event.target.closest("button");
    if (button === null) return;
    if (button.dataset.view) this.setView(button.dataset.view);
    if (button.dataset.line) this.showLine(Number(button.dataset.line));
    if (button.dataset.preset) this.ask("preset", "preset", { preset: button.dataset.preset });
    if (button.dataset.fit !== undefined) this.fit();
    if (button.dataset.apply) this.apply(button.dataset.apply);
    if (button.id === "keep-mine") { this.version = this.theirs; this.savedText = null; this.save(); }
    if (button.id === "measure") this.ask("plan/measure", "measured");
    if (button.id === "start") this.start();
    if (button.id === "take-theirs") this.take();
  }

  setView(view) {
    this.view = view;
    this.fields.querySelector(".view-simple").hidden = view !== "simple";
    this.fields.querySelector(".view-full").hidden = view !== "full";
    for (const each of this.fields.querySelectorAll("[data-view]")) {
      each.setAttribute("aria-pressed", String(each.dataset.view === view));
    }
  }

  /** Show only the fields whose name or meaning contains the words. */
  find(words) {
    const wanted = words.trim().toLowerCase();
    for (const details of this.fields.querySelectorAll(".view-full details")) {
      let count = 0;
      for (const field of details.querySelectorAll(".recipe-field")) {
        const isFound = `${field.dataset.field} ${field.textContent}`.toLowerCase().includes(wanted);
        field.hidden = !isFound;
        count += Number(isFound);
      }
      details.hidden = count === 0;
      if (wanted) details.open = count > 0;
    }
  }

  showLine(number) {
    const lines = this.area.value.split("\n");
    const begin = lines.slice(0, number - 1).reduce((sum, line) => sum + line.length + 1, 0);
    this.area.focus();
    this.area.setSelectionRange(begin, begin + (lines[number - 1] ?? "").length);
    this.area.scrollTop = (number - 4) * parseFloat(getComputedStyle(this.area).lineHeight);
  }

  show() {
    this.state.textContent = this.isDirty ? this.dataset.unsaved : this.dataset.saved;
    this.querySelector("#save").disabled = !this.isDirty;
    this.querySelector("#undo").disabled = this.isDirty; // it would take what is not saved
    const start = this.querySelector("#start");
    start.textContent = this.isDirty ? start.dataset.dirty : start.dataset.clean;
    start.classList.toggle("primary", !this.isDirty);
    start.disabled = this.isValid === false;
  }

  /** Save what the page shows. A second click waits for the first, which leaves it nothing to save. */
  save() {
    const begin = () => this.saveNow();
    this.saving = this.saving.then(begin, begin);
    return this.saving;
  }

  async saveNow() {
    clearTimeout(this.pause);
    await this.settled();
    if (!this.isDirty) return true;
    const text = this.area.value;
    const answer = await this.post("save", { text }, { "If-Match": `"${this.version}"` });
    if (answer === null) return false;
    this.saved(await answer.json(), text);
    return true;
  }

  async undo() {
    if (this.isUndoing) return;
    this.isUndoing = true;
    const shown = this.area.value;
    const answer = await this.post("undo", {}, { "If-Match": `"${this.version}"` });
    this.isUndoing = false;
    if (answer === null) return;
    const found = await answer.json();
    if (this.area.value === shown) this.setText(found.text); // otherwise something was typed meanwhile
    this.saved(found, found.text);
    this.check();
  }

  saved(found, text) {
    this.version = found.version;
    this.savedText = text;
    this.isGone = false;
    this.querySelector("#undo").hidden = !found.can_undo;
    this.querySelector("#conflict-choice").hidden = true;
    this.show();
  }

  /** Look whether another program has changed the file. A text that is not saved stays, and saving names the conflict. */
  async look() {
    const { version } = this;
    let answer;
    try {
      answer = await fetch(this.address("present"));
    } catch {
      return;
    }
    if (!answer.ok) return;
    const found = await answer.json();
    if (this.version !== version) return; // saved or undone meanwhile: this is the file before that
    const wasGone = this.isGone;
    this.isGone = found.version === MISSING && version !== MISSING; // deleted: the text here is the only one
    if (this.isGone !== wasGone) this.show();
    if (this.isGone && !wasGone) this.state.textContent = this.dataset.gone;
    if (this.isGone || found.version === version) return;
    if (this.isDirty) {
      this.state.textContent = this.dataset.changed;
      return;
    }
    this.setText(found.text);
    this.saved(found, found.text);
    this.check();
  }

  async take() {
    document.getElementById("problem").replaceChildren();
    this.savedText = this.area.value;
    this.version = "";
    await this.look();
  }
}
customElements.define("recipe-editor", RecipeEditor);
