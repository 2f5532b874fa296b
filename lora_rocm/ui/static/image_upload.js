// <image-upload>: sends chosen or dropped files into the folder, a few at a time, and says which were not saved.

import { csrfHeaders } from "/static/page.js";

const MAX_FILES = 20000, FILES_AT_ONCE = 10, BYTES_AT_ONCE = 32 * 1024 * 1024;

class ImageUpload extends HTMLElement {
  connectedCallback() {
    this.input = this.querySelector("input");
    this.bar = this.querySelector("progress");
    this.status = this.querySelector('[role="status"]');
    this.refused = this.querySelector(".refused");
    this.stop = this.querySelector("[data-cancel]");
    this.input.addEventListener("change", () => this.send([...this.input.files]));
    this.stop.addEventListener("click", () => this.abort?.abort());
    // the whole page takes dropped files
    addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      this.classList.add("over");
    });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) this.classList.remove("over"); });
    addEventListener("drop", async (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      this.classList.remove("over");
      this.send(await dropped(event.dataTransfer));
    });
  }

  async send(files) {
    if (!files.length) return;
    if (this.abort) { // sent after those that are on their way
      files.forEach((file) => this.files.push(file));
      return;
    }
    this.abort = new AbortController();
    this.files = files;
    this.refused.textContent = "";
    this.stop.hidden = this.bar.hidden = false;
    let saved = 0, done = 0, refused = 0;
    const say = (text) => { this.status.textContent = [text, this.dataset.sent.replace("{count}", saved), refused ? this.dataset.refused.replace("{count}", refused) : ""].filter(Boolean).join(" "); };
    try {
      while (done < files.length) {
        const batch = nextBatch(files, done);
        this.bar.max = files.length;
        this.bar.value = done;
        say(this.dataset.sending.replace("{done}", done).replace("{total}", files.length));
        const form = new FormData();
        for (const file of batch) form.append("files", file, file.name);
        const answer = await fetch(this.dataset.to, { method: "POST", headers: csrfHeaders(), body: form, signal: this.abort.signal });
        const found = answer.ok ? await answer.json() : { saved: [], refused: batch.map((file) => [file.name, `${this.dataset.failed} (${answer.status})`]) };
        saved += found.saved.length;
        refused += found.refused.length;
        done += batch.length;
        for (const [name, reason] of found.refused) this.add(`${name}: ${reason}`);
      }
      say("");
    } catch (error) {
      say(error.name === "AbortError" ? this.dataset.cancelled : this.dataset.failed);
    }
    this.abort = null;
    this.stop.hidden = this.bar.hidden = true;
    this.input.value = "";
    if (saved) document.getElementById("grid").reload();
  }

  add(text) {
    const line = document.createElement("li");
    line.textContent = text;
    this.refused.append(line);
  }
}

/** The files that are sent next, from a place on: at least one. */
function nextBatch(files, from) {
  let to = from, size = 0;
  do size += files[to++].size;
  while (to < files.length && to - from < FILES_AT_ONCE && size + files[to].size <= BYTES_AT_ONCE);
  return files.slice(from, to);
}

/** All files that were dropped, also those in folders. */
async function dropped(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...data.files];
  const found = [];
  while (entries.length && found.length < MAX_FILES) {
    const entry = entries.shift();
    if (entry.isFile) found.push(await new Promise((take, fail) => entry.file(take, fail)));
    else {
      const reader = entry.createReader();
      for (;;) {
        const some = await new Promise((take, fail) => reader.readEntries(take, fail));
        if (!some.length) break;
        entries.push(...some);
      }
    }
  }
  return found;
}

customElements.define("image-upload", ImageUpload);
