// <run-chart>: a curve of a run, of the whole run however long it is. The server reduces it to the chart's width and
// smooths it over all steps; new steps arrive by the live stream.

import { ChartElement } from "./chart.js";

const FIELDS = ["updates", "loss", "learning_rate", "memory_bytes", "step_s"];
const MORE_POINTS = 3; // after so many times the points of the first answer, the curve is asked for again

/** Fetch a curve: two lists of numbers. */
async function fetchCurve(dir, field, points, smooth, until = "") {
  const query = new URLSearchParams({ dir, field, points, smooth, until });
  const answer = await fetch(`/runs/curve?${query}`);
  if (!answer.ok) return [[], []];
  const numbers = new Float32Array(await answer.arrayBuffer());
  const half = numbers.length / 2;
  return [Array.from(numbers.subarray(0, half)), Array.from(numbers.subarray(half))];
}

/** The weight of the moving average: 0 on the left of the slider, 0.999 on its right. */
function smoothingWeight() {
  const slider = document.getElementById("curve-smooth");
  return slider ? 1 - 10 ** (-3 * slider.value / 100) : 0;
}

class RunChart extends ChartElement {
  connectedCallback() {
    super.connectedCallback();
    this.isMain = this.dataset.field === "loss";
    this.divisor = Number(this.dataset.divisor ?? 1);
    this.curves = []; // {label, kind, x, y}
    this.listen(document.body, "live:step", (event) => this.append_steps(event.detail.steps));
    this.listen(document.body, "live:reset", () => this.load());
    if (this.isMain) {
      this.listen(document.body, "live:validation", () => this.load());
      for (const [id, kind, work] of [
        ["curve-smooth", "input", () => this.soon()],
        ["curve-other", "change", () => this.load()],
        ["curve-log", "change", () => this.showCurves()],
      ]) {
        const control = document.getElementById(id);
        if (control) this.listen(control, kind, work);
      }
    }
    this.load();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 120);
  }

  async load() {
    const { dir, field, parent, forkStep } = this.dataset;
    const points = Math.round(2 * Math.max(300, this.clientWidth));
    const weight = smoothingWeight();
    this.weight = weight;
    const other = this.isMain ? document.getElementById("curve-other")?.value : "";
    const wanted = [fetchCurve(dir, field, points, 0)];
    if (this.isMain) {
      wanted.push(fetchCurve(dir, field, points, weight), fetchCurve(dir, "held_out", points, 0));
      wanted.push(parent ? fetchCurve(parent, field, points, weight, forkStep) : [[], []]);
      if (other) wanted.push(fetchCurve(other, field, points, weight));
    }
    const number = (this.asked = (this.asked ?? 0) + 1);
    const [raw, smooth, heldOut, trunk, second] = await Promise.all(wanted);
    if (this.left || number !== this.asked) return; // a newer question is on its way
    const shown = (curve) => ({ x: curve[0], y: curve[1].map((value) => value / this.divisor) });
    if (this.isMain) {
      this.curves = [
        { label: this.dataset.raw, kind: "raw", ...shown(raw) },
        { label: this.dataset.smoothed, kind: "smooth", ...shown(smooth) },
      ];
      if (heldOut[0].length) this.curves.push({ label: this.dataset.heldOut, kind: "third", ...shown(heldOut) });
      if (trunk[0].length) this.curves.push({ label: this.dataset.parentLabel, kind: "parent", ...shown(trunk) });
      if (second) this.curves.push({ label: other.split(/[\\/]/).pop(), kind: "second", ...shown(second) });
    } else {
      this.curves = [{ label: this.dataset.title, kind: "plain", ...shown(raw) }];
    }
    this.limit = MORE_POINTS * points;
    this.showCurves();
  }

  append_steps(steps) {
    const at = FIELDS.indexOf(this.dataset.field);
    const [raw, smooth] = this.curves;
    if (!raw || !steps?.length) return;
    for (const step of steps) {
      const value = step[at];
      if (value === null) continue;
      for (const curve of this.isMain ? [raw, smooth] : [raw]) {
        while (curve.x.length && curve.x.at(-1) >= step[0]) { // resumed from an earlier step
          curve.x.pop();
          curve.y.pop();
        }
      }
      raw.x.push(step[0]);
      raw.y.push(value / this.divisor);
      if (this.isMain) {
        const before = smooth.y.at(-1) ?? value;
        smooth.x.push(step[0]);
        smooth.y.push(this.weight * before + (1 - this.weight) * value);
      }
    }
    if (raw.x.length > this.limit) this.load();
    else this.showCurves();
  }

  showCurves() {
    const { title, x, empty } = this.dataset;
    const chart = { title, xLabel: x, lines: this.curves, empty, legend: this.isMain };
    if (this.isMain) {
      const isLog = document.getElementById("curve-log")?.checked;
      const onDraw = (plot) => this.drawSteps(plot, this.color("--accent"), this.color("--line-strong"));
      Object.assign(chart, { named: 1, isLog, onDraw });
    }
    this.show(chart);
  }

  draw() {
    super.draw();
    if (this.plot && this.isMain) this.plot.over.addEventListener("click", (event) => this.chooseStep(event));
  }

  get checkpoints() {
    return (this.dataset.checkpoints || "").split(",").filter(Boolean).map(Number);
  }

  /** Mark the checkpoints at the lower edge, and the step at which a fork left its parent. */
  drawSteps(plot, mark, line) {
    const { ctx, bbox } = plot;
    const bottom = bbox.top + bbox.height;
    const side = 5 * devicePixelRatio;
    const inside = (x) => x >= bbox.left && x <= bbox.left + bbox.width;
    ctx.save();
    ctx.fillStyle = mark;
    for (const step of this.checkpoints) {
      const x = plot.valToPos(step, "x", true);
      if (!inside(x)) continue;
      ctx.beginPath();
      ctx.moveTo(x - side, bottom);
      ctx.lineTo(x + side, bottom);
      ctx.lineTo(x, bottom - 1.6 * side);
      ctx.fill();
    }
    const x = this.dataset.forkStep ? plot.valToPos(Number(this.dataset.forkStep), "x", true) : NaN;
    if (inside(x)) {
      ctx.strokeStyle = line;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Open the form of a fork at the checkpoint that was clicked. */
  async chooseStep(event) {
    const left = event.clientX - this.plot.over.getBoundingClientRect().left;
    const distance = (step) => Math.abs(this.plot.valToPos(step, "x") - left);
    const nearest = this.checkpoints.sort((one, other) => distance(one) - distance(other))[0];
    const form = document.getElementById("fork");
    if (nearest === undefined || distance(nearest) > 12 || !form) return;
    form.open = true;
    for (let tries = 0; tries < 200 && !document.getElementById("fork-step"); tries += 1) {
      await new Promise((done) => setTimeout(done, 50));
    }
    const select = document.getElementById("fork-step");
    if (!select) return;
    select.value = String(nearest);
    form.scrollIntoView();
    select.focus();
  }
}
customElements.define("run-chart", RunChart);
