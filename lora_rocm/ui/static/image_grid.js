// <image-grid>: any number of images with at most MAX_TILES elements, and the editor next to it. Only the rows in view
// have elements. They are moved with transform, and take names and pictures of a window that the server sends.

import { csrfHeaders } from "/static/page.js";

const MAX_TILES = 200, WINDOW = 100, TILE_PX = 168, TEXT_PX = 56, GAP_PX = 8;
const REST_MS = 80; // a tile or window that is in view so long gets its picture or names: not while it flies past
const PICTURES_A_FRAME = 12;
const MARKS = { m: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18", c: "M6 2v16h16M2 6h16v16" }; // mask, crop: paths of icons

/** Return an icon with a path in a square of 24. */
function icon(path) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("class", "icon");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  made.append(line);
  return made;
}

class ImageGrid extends HTMLElement {
  connectedCallback() {
    this.tabIndex = 0;
    this.setAttribute("role", "region"); // a listbox as soon as there are images
    this.setAttribute("aria-label", this.dataset.label);
    this.space = document.createElement("div");
    this.space.className = "image-space";
    this.space.setAttribute("role", "presentation");
    this.append(this.space);
    this.tiles = new Map(); // index -> tile
    this.free = [];
    this.windows = new Map(); // number -> rows
    this.waiting = new Map(); // number of a window -> when it came into view
    this.selected = new Set(); // names
    this.total = 0;
    this.active = 0;
    this.query = "";
    this.addEventListener("scroll", () => this.soon(), { passive: true });
    this.addEventListener("keydown", (event) => this.onKey(event));
    this.space.addEventListener("click", (event) => this.onClick(event));
    this.observer = new ResizeObserver(() => this.layout());
    this.observer.observe(this);
    this.reload();
  }

  disconnectedCallback() {
    this.observer.disconnect();
  }

  // Rows of the server

  /** Choose images again. keep: stay at the same place, because only captions have changed. */
  async reload(keep = false) {
    const number = (this.asked = (this.asked ?? 0) + 1);
    if (!this.windows.size) this.say(this.dataset.reading);
    const first = keep ? Math.floor(this.firstIndex() / WINDOW) : 0;
    const answer = await this.fetchRows(first, "");
    if (number !== this.asked) return;
    this.windows.clear();
    this.waiting.clear();
    this.choice = answer?.choice ?? "";
    this.total = answer?.total ?? 0;
    if (answer) this.windows.set(first, answer.rows);
    this.say(answer === null ? this.problem : this.total ? "" : answer.note ?? this.dataset.none);
    if (!keep) {
      this.active = 0;
      this.scrollTop = 0;
    }
    for (const tile of this.tiles.values()) tile.index = -1;
    this.layout();
    this.announce();
  }

  async fetchRows(window, choice) {
    const query = new URLSearchParams(this.query);
    query.set("start", window * WINDOW);
    query.set("count", WINDOW);
    query.set("choice", choice);
    try {
      const answer = await fetch(`${this.dataset.items}&${query}`, { headers: { "HX-Request": "true" } });
      if (answer.ok) return await answer.json();
      const box = document.createElement("template");
      box.innerHTML = await answer.text();
      this.problem = box.content.querySelector("h2")?.textContent ?? this.dataset.failed;
    } catch {
      this.problem = this.dataset.failed;
    }
    return null;
  }

  async load(window) {
    this.windows.set(window, null); // asked for
    const answer = await this.fetchRows(window, this.choice);
    if (answer === null) {
      this.windows.delete(window);
      return;
    }
    if (answer.choice !== this.choice) { // the folder has changed
      this.reload(true);
      return;
    }
    this.windows.set(window, answer.rows);
    for (const tile of this.tiles.values()) if (Math.floor(tile.index / WINDOW) === window) this.fill(tile);
    this.soon();
  }

  row(index) {
    return this.windows.get(Math.floor(index / WINDOW))?.[index % WINDOW];
  }

  /** The names of a range of images; windows that were not in view are asked for. */
  async names(from, to) {
    const found = [];
    for (let index = from; index <= to; index++) {
      const window = Math.floor(index / WINDOW);
      if (!this.windows.get(window)) {
        const answer = await this.fetchRows(window, this.choice);
        if (answer === null) break;
        this.windows.set(window, answer.rows);
      }
      found.push(this.row(index)[0]);
    }
    return found;
  }

  // Layout

  layout() {
    const width = this.clientWidth - 2 * GAP_PX;
    if (width <= 0) return;
    const first = this.firstIndex();
    this.columns = Math.max(2, Math.floor((width + GAP_PX) / (TILE_PX + GAP_PX)));
    this.tileWidth = Math.floor((width - (this.columns - 1) * GAP_PX) / this.columns);
    this.tileHeight = Math.min(this.tileWidth, 220) + TEXT_PX;
    this.step = this.tileHeight + GAP_PX;
    this.space.style.height = `${Math.ceil(this.total / this.columns) * this.step + GAP_PX}px`;
    if (first && Math.floor(first / this.columns) !== Math.floor(this.firstIndex() / this.columns)) {
      this.scrollTop = Math.floor(first / this.columns) * this.step;
    }
    for (const tile of this.tiles.values()) {
      tile.index = -1;
      tile.style.width = "";
    }
    this.height = this.clientHeight;
    this.soon();
  }

  firstIndex() {
    return this.step ? Math.floor(this.scrollTop / this.step) * this.columns : 0;
  }

  soon() {
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      this.draw(now);
    });
  }

  draw(now) {
    if (!this.step) return;
    // the rows in view, and some above and below
    const top = this.scrollTop, around = Math.min(this.height / 2, 400);
    let from = Math.max(0, Math.floor((top - around) / this.step)) * this.columns;
    const end = Math.min(this.total, Math.ceil((top + this.height + around) / this.step) * this.columns);
    from = Math.max(from, end - MAX_TILES);
    // tiles that left the view are used again
    for (const [index, tile] of this.tiles) {
      if (index < from || index >= end || tile.index !== index) {
        this.tiles.delete(index);
        this.free.push(tile);
      }
    }
    for (let index = from; index < end; index++) {
      if (!this.tiles.has(index)) this.tiles.set(index, this.place(this.free.pop() ?? this.made(), index, now));
    }
    for (const tile of this.free) {
      if (tile.index !== -2) {
        tile.index = -2;
        tile.hidden = true;
        tile.removeAttribute("id"); // another tile has it now
        tile.picture.removeAttribute("src");
      }
    }
    this.rest(now, from, end);
  }

  /** Ask for the names and pictures of what has been in view for a moment. */
  rest(now, from, end) {
    let isWaiting = false;
    for (let window = Math.floor(from / WINDOW); window * WINDOW < end; window++) {
      if (this.windows.has(window)) continue;
      const since = this.waiting.get(window) ?? now;
      this.waiting.set(window, since);
      if (now - since >= REST_MS) {
        this.waiting.delete(window);
        this.load(window);
      } else isWaiting = true;
    }
    let left = PICTURES_A_FRAME;
    for (const tile of this.tiles.values()) {
      if (!tile.wanted) continue;
      if (left > 0 && now - tile.since >= REST_MS) {
        left--;
        tile.picture.src = tile.wanted;
        tile.wanted = "";
      } else isWaiting = true;
    }
    for (const window of this.waiting.keys()) {
      if ((window + 1) * WINDOW <= from || window * WINDOW >= end) this.waiting.delete(window);
    }
    if (isWaiting) this.soon();
  }

  made() {
    const tile = document.createElement("div");
    tile.className = "image-tile";
    tile.setAttribute("role", "option");
    tile.picture = document.createElement("img");
    tile.picture.alt = "";
    tile.picture.decoding = "async";
    tile.picture.addEventListener("error", () => tile.picture.removeAttribute("src")); // the caption's place says why
    tile.file = document.createElement("span");
    tile.file.className = "tile-file";
    tile.caption = document.createElement("span");
    tile.caption.className = "tile-caption";
    tile.marks = document.createElement("span");
    tile.marks.className = "tile-marks";
    tile.append(tile.picture, tile.file, tile.caption, tile.marks);
    this.space.append(tile);
    return tile;
  }

  place(tile, index, now) {
    tile.index = index;
    tile.since = now;
    tile.hidden = false;
    tile.id = `image-${index}`;
    if (!tile.style.width || tile.columns !== this.columns) {
      tile.style.width = `${this.tileWidth}px`;
      tile.style.height = `${this.tileHeight}px`;
      tile.columns = this.columns;
    }
    const x = GAP_PX + (index % this.columns) * (this.tileWidth + GAP_PX);
    const y = GAP_PX + Math.floor(index / this.columns) * this.step;
    tile.style.transform = `translate(${x}px, ${y}px)`;
    tile.setAttribute("aria-posinset", index + 1);
    tile.setAttribute("aria-setsize", this.total);
    this.fill(tile);
    return tile;
  }

  fill(tile) {
    const row = this.row(tile.index);
    const [name, caption, marks, version] = row ?? ["", "", "", ""];
    tile.name = name;
    tile.file.textContent = name ? name.slice(name.lastIndexOf("/") + 1) : "…";
    const fault = marks.includes("p") ? this.dataset.unreadable : marks.includes("n") ? this.dataset.noCaption : "";
    tile.caption.textContent = fault || caption;
    tile.caption.classList.toggle("missing", Boolean(fault));
    tile.marks.replaceChildren(...[...marks].filter((letter) => letter in MARKS).map((letter) => icon(MARKS[letter])));
    const address = name ? `${this.dataset.thumb}&${new URLSearchParams({ name, side: 256, v: version })}` : "";
    if (tile.address !== address || tile.picture.getAttribute("src") === null) {
      tile.picture.removeAttribute("src");
      tile.address = tile.wanted = address;
    }
    this.mark(tile);
  }

  mark(tile) {
    tile.setAttribute("aria-selected", this.selected.has(tile.name));
    tile.classList.toggle("active", tile.index === this.active);
    tile.classList.toggle("opened", tile.name !== "" && tile.name === this.opened);
  }

  say(text) {
    this.querySelector(".empty")?.remove();
    this.setAttribute("role", text ? "region" : "listbox");
    this.toggleAttribute("aria-multiselectable", !text);
    if (!text) {
      this.setAttribute("aria-multiselectable", "true");
      return;
    }
    this.removeAttribute("aria-activedescendant");
    const box = document.createElement("p");
    box.className = "empty";
    box.textContent = text;
    this.space.prepend(box);
  }

  // Choosing

  announce() {
    for (const tile of this.tiles.values()) this.mark(tile);
    const parts = [this.dataset.shown.replace("{count}", this.total)];
    if (this.selected.size) parts.push(this.dataset.selected.replace("{count}", this.selected.size));
    document.getElementById("shown").textContent = parts.join(", ");
    document.getElementById("select-none").hidden = this.selected.size === 0;
    document.body.dispatchEvent(new CustomEvent("images:selected", { detail: { names: this.selected, total: this.total } }));
  }

  activate(index) {
    if (!this.total) return;
    this.active = Math.min(this.total - 1, Math.max(0, index));
    const y = Math.floor(this.active / this.columns) * this.step;
    if (y < this.scrollTop) this.scrollTop = y;
    else if (y + this.step > this.scrollTop + this.clientHeight) this.scrollTop = y + this.step + GAP_PX - this.clientHeight;
    this.draw(performance.now());
    for (const tile of this.tiles.values()) this.mark(tile);
    this.setAttribute("aria-activedescendant", `image-${this.active}`);
  }

  async select(to, { range = false } = {}) {
    if (range) {
      const from = this.anchor ?? this.active;
      for (const name of await this.names(Math.min(from, to), Math.max(from, to))) this.selected.add(name);
    } else {
      const [name] = await this.names(to, to);
      if (name !== undefined && !this.selected.delete(name)) this.selected.add(name);
      this.anchor = to;
    }
    this.announce();
  }

  onClick(event) {
    const tile = event.target.closest(".image-tile");
    if (!tile || tile.index < 0) return;
    const isSelecting = event.shiftKey || event.ctrlKey || event.metaKey || this.selects;
    if (isSelecting) this.select(tile.index, { range: event.shiftKey });
    this.activate(tile.index);
    if (!isSelecting) {
      this.anchor = tile.index;
      this.open(tile.index);
    }
  }

  onKey(event) {
    const page = Math.max(1, Math.floor(this.clientHeight / this.step)) * this.columns;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, PageUp: -page, PageDown: page, Home: -this.total, End: this.total };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in moves) {
      if (event.shiftKey) this.anchor ??= this.active;
      else this.anchor = undefined;
      this.activate(this.active + moves[event.key]);
      if (event.shiftKey) this.select(this.active, { range: true });
    } else if (event.key === " ") this.select(this.active);
    else if (event.key === "Enter") this.open(this.active, true);
    else return;
    event.preventDefault();
  }

  /** Open an image in the editor. focuses: whether the keyboard goes there as well. */
  async open(index, focuses = false) {
    const number = ++opening;
    const [name] = await this.names(index, index);
    if (name === undefined || !(await keepText()) || !(await openEditor(name, number))) return;
    if (focuses) editor.querySelector("textarea")?.focus();
    else if (matchMedia("(max-width: 71.99rem)").matches) editor.scrollIntoView({ block: "start" });
  }

  async next(by) {
    const before = this.active;
    this.activate(this.active + by);
    if (this.active !== before) await this.open(this.active, true);
    else if (await keepText()) editor.querySelector("textarea")?.focus(); // the last one stays, and says that it is saved
  }
}

// The editor

const editor = document.getElementById("item");

let opening = 0; // number of the newest wish to open an image

/** Show an image; false if another was wanted meanwhile, or if what was typed meanwhile cannot be saved. */
async function openEditor(name, number) {
  const answer = await fetch(`${editor.dataset.item}&${new URLSearchParams({ name })}`, { headers: { "HX-Request": "true" } });
  const text = await answer.text();
  if (number !== opening || !(await keepText())) return false;
  show(text);
  grid.opened = name;
  for (const tile of grid.tiles.values()) grid.mark(tile);
  return true;
}

function show(html) {
  editor.innerHTML = html; // of this server, which escapes every text
  htmx.process(editor);
}

/** Show an image after one of its captions was saved. What was typed meanwhile stays, other captions and the focus too. */
function showSaved(html, form, sent) {
  if (!editor.contains(form)) return; // another image was opened meanwhile
  const { file, text } = form.elements;
  const others = captions().filter((each) => each !== form && isChanged(each));
  const typed = text.value;
  const at = editor.contains(document.activeElement) ? document.activeElement : null;
  const range = at?.matches("textarea") ? [at.selectionStart, at.selectionEnd] : null;
  show(html);
  const of = (name) => captions().find((each) => each.elements.file.value === name);
  for (const each of others) of(each.elements.file.value)?.replaceWith(each);
  if (typed !== sent && of(file.value)) of(file.value).elements.text.value = typed;
  const now = at?.id ? document.getElementById(at.id) : null;
  now?.focus({ preventScroll: true });
  if (range) now?.setSelectionRange(...range);
}

const captions = () => [...editor.querySelectorAll("form.caption")];

/** The newest change that this page has shown. Only that one is undone. */
const newest = document.getElementById("newest-change");

const isChanged = (form) => form.elements.text.value !== form.elements.text.defaultValue;

/** Save a caption; false if it could not be saved. The editor then shows why, and keeps the text. */
async function save(form) {
  const sent = form.elements.text.value;
  const answer = await fetch(form.getAttribute("action"), {
    method: "POST",
    headers: { ...csrfHeaders(), "HX-Request": "true", "If-Match": `"${form.elements.version.value}"` },
    body: new URLSearchParams(new FormData(form)),
  });
  const text = await answer.text();
  if (answer.ok || answer.status === 409) showSaved(text, form, sent);
  else {
    const box = document.getElementById("problem");
    box.innerHTML = text; // of this server, which escapes every text
    box.scrollIntoView({ block: "start" });
  }
  if (answer.ok) {
    newest.value = JSON.parse(answer.headers.get("HX-Trigger"))["images:changed"].newest;
    grid.reload(true);
  }
  return answer.ok;
}

/** Save the text of the editor before it is replaced; false if it must stay. */
async function keepText() {
  for (const form of captions()) {
    if (isChanged(form) && !(await save(form))) return false;
  }
  return true;
}

editor.addEventListener("submit", (event) => {
  event.preventDefault();
  save(event.target);
});
editor.addEventListener("click", (event) => {
  const form = event.target.closest("form.caption");
  if (event.target.matches("[data-next]")) grid.next(1);
  if (event.target.matches("[data-take-theirs]")) {
    form.elements.text.value = form.querySelector(".theirs")?.textContent ?? "";
    form.elements.text.focus();
  }
});
editor.addEventListener("keydown", (event) => {
  if (event.key === "Escape") grid.focus();
  else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) grid.next(1);
  else if (event.key === "s" && (event.ctrlKey || event.metaKey) && event.target.form) save(event.target.form);
  else return;
  event.preventDefault();
});
addEventListener("beforeunload", (event) => {
  if (captions().some(isChanged)) event.preventDefault();
});

customElements.define("image-grid", ImageGrid);
const grid = document.getElementById("grid");

// What is shown

const filters = document.getElementById("filters");
let timer;
function choose() {
  grid.query = new URLSearchParams(new FormData(filters)).toString();
  grid.reload();
}
filters.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(choose, 200);
});
filters.addEventListener("submit", (event) => {
  event.preventDefault();
  choose();
});
document.getElementById("select-mode").addEventListener("click", (event) => {
  grid.selects = !grid.selects;
  event.currentTarget.setAttribute("aria-pressed", grid.selects);
});
document.getElementById("select-none").addEventListener("click", () => {
  grid.selected.clear();
  grid.announce();
});
document.body.addEventListener("images:changed", async (event) => {
  newest.value = event.detail.newest;
  grid.reload(true);
  if (!event.detail.name && grid.opened && !captions().some(isChanged)) await openEditor(grid.opened, opening);
});

// Changes of many captions

const change = document.getElementById("change");
document.body.addEventListener("images:selected", (event) => {
  document.getElementById("scope-shown").textContent = `(${event.detail.total})`;
  document.getElementById("scope-selected").textContent = `(${event.detail.names.size})`;
});
document.addEventListener("htmx:config:request", (event) => {
  const { body } = event.detail.ctx.request;
  if (body?.get?.("scope") === "selected") body.set("names", JSON.stringify([...grid.selected]));
});
document.body.addEventListener("click", (event) => {
  const button = event.target.closest("[data-show-tag], [data-change], [data-only], [data-open-image]");
  if (!button) return;
  if (button.dataset.openImage !== undefined) {
    openImage(button.dataset.openImage);
    return;
  }
  if (button.dataset.only !== undefined) {
    const { only } = filters.elements;
    [...only.options].find((each) => each.value.startsWith("bucket:"))?.remove();
    const label = filters.dataset.bucket.replace("{bucket}", button.dataset.only.slice("bucket:".length).replace("x", " × "));
    only.add(new Option(label, button.dataset.only, false, true));
    showChosen();
    return;
  }
  if (button.dataset.showTag !== undefined) {
    filters.elements.tag.value = button.dataset.showTag;
    showChosen();
  } else {
    document.getElementById("changes").open = true;
    change.elements.kind.value = button.dataset.change;
    change.elements.find.value = button.dataset.find;
    change.scrollIntoView({ block: "center" });
    change.elements[button.dataset.change === "replace" ? "put" : "find"].focus();
  }
});

function showChosen() {
  choose();
  grid.focus();
  grid.scrollIntoView({ block: "start" });
}

async function openImage(name) {
  const number = ++opening;
  if (!(await keepText()) || !(await openEditor(name, number))) return;
  editor.scrollIntoView({ block: "start" });
  editor.querySelector("textarea")?.focus();
}
