// <mask-editor>: paints a mask over an image, with the mouse, a finger, a pen, or the keyboard. The canvas holds what the
// loss ignores: opaque where the mask is black. The rectangle is used as a crop, or to fill the mask.

import { csrfHeaders } from "/static/page.js";

const MAX_UNDOS = 20;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

class MaskEditor extends HTMLElement {
  connectedCallback() {
    this.canvas = document.createElement("canvas");
    this.canvas.width = Number(this.dataset.width);
    this.canvas.height = Number(this.dataset.height);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", this.dataset.label);
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.color = getComputedStyle(this).getPropertyValue("--mask").trim();
    this.frameBox = this.box("crop-frame");
    this.pointer = this.box("brush-pointer");
    this.append(this.canvas, this.frameBox, this.pointer);
    this.at = [this.canvas.width / 2, this.canvas.height / 2];
    this.undos = [];
    this.strokes = 0; // number of changes of the canvas
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", () => this.onUp());
    this.canvas.addEventListener("pointercancel", () => this.onUp());
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("focus", () => this.showPointer());
    new ResizeObserver(() => this.showAll()).observe(this);
    this.load();
  }

  box(name) {
    const made = document.createElement("div");
    made.className = name;
    made.setAttribute("aria-hidden", "true");
    return made;
  }

  get tool() {
    return document.querySelector('input[name="tool"]:checked')?.value ?? "rectangle";
  }

  /** Radius of the brush in pixels of the canvas. */
  get radius() {
    const percent = Number(document.getElementById("brush")?.value ?? 8);
    return (percent / 100) * Math.max(this.canvas.width, this.canvas.height) / 2;
  }

  // Mask

  async load() {
    const answer = await fetch(this.dataset.mask);
    if (!answer.ok) return;
    const picture = await createImageBitmap(await answer.blob());
    const { width, height } = this.canvas;
    const grey = new OffscreenCanvas(width, height).getContext("2d");
    grey.drawImage(picture, 0, 0, width, height);
    const pixels = grey.getImageData(0, 0, width, height);
    for (let at = 0; at < pixels.data.length; at += 4) pixels.data[at + 3] = 255 - pixels.data[at];
    grey.putImageData(pixels, 0, 0);
    this.context.drawImage(grey.canvas, 0, 0);
    this.tint();
    this.showAll();
    this.dataset.loaded = "";
  }

  /** Give all that is ignored the colour of the overlay. */
  tint() {
    this.fill("source-in", 1);
  }

  fill(operation, alpha, [x, y, width, height] = [0, 0, this.canvas.width, this.canvas.height]) {
    this.context.save();
    this.context.globalCompositeOperation = operation;
    this.context.globalAlpha = alpha;
    this.context.fillStyle = this.color;
    this.context.fillRect(x, y, width, height);
    this.context.restore();
  }

  keep() {
    this.undos.push(this.context.getImageData(0, 0, this.canvas.width, this.canvas.height));
    if (this.undos.length > MAX_UNDOS) this.undos.shift();
    this.isChanged = true;
    this.strokes++;
    document.getElementById("mask-state").textContent = this.dataset.changed;
  }

  stroke(from, to) {
    const { context } = this;
    const weight = Number(document.getElementById("weight").value) / 100;
    context.save();
    context.lineCap = "round";
    context.lineWidth = 2 * this.radius;
    context.strokeStyle = this.color;
    const draw = () => {
      context.beginPath();
      context.moveTo(...from);
      context.lineTo(to[0] + 0.01, to[1]);
      context.stroke();
    };
    context.globalCompositeOperation = "destination-out";
    draw();
    if (this.tool === "ignore") {
      context.globalCompositeOperation = "source-over";
      context.globalAlpha = 1 - weight;
      draw();
    }
    context.restore();
  }

  async picture() {
    const made = new OffscreenCanvas(this.canvas.width, this.canvas.height);
    const context = made.getContext("2d");
    context.drawImage(this.canvas, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = "#000";
    context.fillRect(0, 0, made.width, made.height);
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, made.width, made.height);
    return made.convertToBlob({ type: "image/png" });
  }

  /** Save a picture, or remove the mask. Strokes that are painted meanwhile stay, for the next time. */
  async send(making) {
    const { strokes } = this;
    const picture = await making;
    const form = new FormData();
    form.append("version", this.dataset.version);
    if (picture) form.append("mask", picture, "mask.png");
    const answer = await fetch(this.dataset.save, { method: "POST", headers: { ...csrfHeaders(), "HX-Request": "true" }, body: form });
    if (answer.ok && this.strokes === strokes) {
      this.isChanged = false;
      location.reload();
      return;
    }
    if (answer.ok) { // the page after this change has the version of the saved mask
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      this.dataset.version = page.getElementById(this.id).dataset.version;
      return;
    }
    const box = document.getElementById("problem");
    box.innerHTML = await answer.text(); // of this server, which escapes every text
    if (answer.headers.has("x-version")) { // the mask was changed elsewhere: show it, and let the user replace it
      this.dataset.version = answer.headers.get("x-version");
      const other = document.createElement("img");
      other.src = this.dataset.mask;
      other.alt = this.dataset.other;
      other.width = 200;
      box.append(other);
    }
    box.scrollIntoView({ block: "start" });
  }

  // Actions of the buttons

  undo() {
    const before = this.undos.pop();
    if (before === undefined) return;
    this.context.putImageData(before, 0, 0);
    this.strokes++;
  }

  invert() {
    this.keep();
    this.fill("xor", 1);
    this.tint();
  }

  countAll() {
    this.keep();
    this.fill("destination-out", 1);
  }

  ignoreAll() {
    this.keep();
    this.fill("source-over", 1);
  }

  countRectangle() {
    this.ignoreAll();
    this.fill("destination-out", 1, this.scaled(this.rectangle()));
  }

  ignoreRectangle() {
    this.keep();
    this.fill("source-over", 1, this.scaled(this.rectangle()));
  }

  async save() {
    await this.send(this.picture());
  }

  async remove() {
    await this.send(null);
  }

  // Rectangle, in pixels of the image

  fields() {
    const { elements } = document.getElementById("rectangle");
    return [elements.left, elements.top, elements.width, elements.height];
  }

  rectangle() {
    return this.fields().map((field) => Number(field.value));
  }

  get scale() {
    return this.canvas.width / Number(this.dataset.imageWidth);
  }

  scaled(sides) {
    return sides.map((side) => side * this.scale);
  }

  setRectangle(from, to) {
    const limits = [Number(this.dataset.imageWidth), Number(this.dataset.imageHeight)];
    const [one, other] = [from, to].map((place) => place.map((value, axis) => Math.min(limits[axis], Math.max(0, Math.round(value / this.scale)))));
    const start = [Math.min(one[0], other[0]), Math.min(one[1], other[1])];
    const size = [Math.abs(one[0] - other[0]), Math.abs(one[1] - other[1])];
    if (!size[0] || !size[1]) return;
    [...start, ...size].forEach((value, number) => { this.fields()[number].value = value; });
    this.showRectangle();
  }

  showRectangle() {
    const zoom = this.canvas.clientWidth / Number(this.dataset.imageWidth);
    const [left, top, width, height] = this.rectangle().map((side) => side * zoom);
    Object.assign(this.frameBox.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
  }

  showPointer() {
    for (const shown of document.querySelectorAll("output[for]")) shown.value = document.getElementById(shown.htmlFor.value).value;
    const zoom = this.canvas.clientWidth / this.canvas.width;
    const radius = this.tool === "rectangle" ? 4 : this.radius * zoom;
    Object.assign(this.pointer.style, { left: `${this.at[0] * zoom - radius}px`, top: `${this.at[1] * zoom - radius}px`, width: `${2 * radius}px`, height: `${2 * radius}px` });
  }

  showAll() {
    this.showRectangle();
    this.showPointer();
  }

  // Mouse, finger, pen and keys

  place(event) {
    const zoom = this.canvas.width / this.canvas.clientWidth;
    return [event.offsetX * zoom, event.offsetY * zoom];
  }

  onDown(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.canvas.focus();
    this.canvas.setPointerCapture(event.pointerId);
    this.at = this.place(event);
    this.from = this.at;
    this.isDown = true;
    if (this.tool !== "rectangle") {
      this.keep();
      this.stroke(this.at, this.at);
    }
    this.showPointer();
  }

  onMove(event) {
    const to = this.place(event);
    if (this.isDown) {
      if (this.tool === "rectangle") this.setRectangle(this.from, to);
      else this.stroke(this.at, to);
    }
    this.at = to;
    this.showPointer();
  }

  onUp() {
    this.isDown = false;
  }

  onKey(event) {
    if (event.altKey || event.metaKey) return;
    const brush = document.getElementById("brush");
    if (event.key in MOVES) {
      const by = Math.max(2, this.radius / 2) * (event.shiftKey ? 4 : 1);
      const to = MOVES[event.key].map((step, axis) => Math.min(axis ? this.canvas.height : this.canvas.width, Math.max(0, this.at[axis] + step * by)));
      if (event.ctrlKey && this.tool !== "rectangle") {
        this.keep();
        this.stroke(this.at, to);
      }
      if (event.ctrlKey && this.tool === "rectangle") this.setRectangle((this.corner ??= this.at), to);
      else this.corner = undefined;
      this.at = to;
    } else if (event.key === " " && this.tool !== "rectangle") {
      this.keep();
      this.stroke(this.at, this.at);
    } else if (event.key === "z") this.undo();
    else if (event.key === "[" && brush) brush.value = Number(brush.value) - 1;
    else if (event.key === "]" && brush) brush.value = Number(brush.value) + 1;
    else return;
    event.preventDefault();
    this.showPointer();
  }
}
customElements.define("mask-editor", MaskEditor);

const editor = document.getElementById("editor");
document.addEventListener("click", (event) => {
  const action = event.target.closest("[data-do]")?.dataset.do;
  if (action) editor[action]();
});
document.getElementById("rectangle").addEventListener("input", () => editor.showRectangle());
for (const id of ["brush", "weight"]) document.getElementById(id)?.addEventListener("input", () => editor.showPointer());
document.body.addEventListener("images:changed", () => location.reload());
addEventListener("beforeunload", (event) => {
  if (editor.isChanged) event.preventDefault();
});
