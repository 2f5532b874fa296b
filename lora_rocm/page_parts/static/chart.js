// Charts of all HTML: <run-chart> of a run's page (run_chart.js) and <still-chart> of a single file. uPlot draws them.

/** Colours and widths of lines by kind. The still charts have the same ones (page.css). */
const KINDS = {
  raw: { color: "--chart-raw", width: 1 },
  plain: { color: "--chart-1", width: 1.5 },
  smooth: { color: "--chart-1", width: 2 },
  dots: { color: "--chart-1", width: 2, dots: true },
  second: { color: "--chart-2", width: 2 },
  third: { color: "--chart-3", width: 2 },
  parent: { color: "--line-strong", width: 1.5, dash: [4, 3] },
};
const short = (value) => Number(value.toPrecision(4)).toString();

/** An element with a chart. show() draws its lines: {label, kind, x, y}. It follows the colours and its width. */
export class ChartElement extends HTMLElement {
  connectedCallback() {
    this.box = document.createElement("div");
    this.box.className = "chart";
    this.append(this.box);
    this.listen(document.body, "theme", () => this.draw());
    this.listen(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.draw());
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this);
  }

  disconnectedCallback() {
    this.left = true;
    this.observer.disconnect();
    for (const [target, kind, work] of this.listening) target.removeEventListener(kind, work);
    this.plot?.destroy();
  }

  listen(target, kind, work) {
    target.addEventListener(kind, work);
    (this.listening ??= []).push([target, kind, work]);
  }

  /** chart: {title, xLabel, lines, named (the line of the label), empty (text without points), isLog, legend, onDraw}. */
  show(chart) {
    this.chart = chart;
    this.draw();
  }

  /** Make the box an image that these words describe. Both at once: an image without words is nothing to a screen reader. */
  describe(words) {
    if (!words) {
      this.box.removeAttribute("role");
      return;
    }
    this.box.setAttribute("aria-label", words);
    this.box.setAttribute("role", "img");
  }

  color(name) {
    return getComputedStyle(this).getPropertyValue(name).trim();
  }

  get width() {
    return Math.max(200, this.clientWidth);
  }

  get height() {
    return Number(this.dataset.height ?? 260);
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.chart) return;
    const { title, xLabel, lines, empty = "", isLog = false, legend = true, onDraw } = this.chart;
    if (!lines[0]?.x.length) {
      this.box.textContent = empty;
      this.describe(empty);
      return;
    }
    this.box.textContent = "";
    const named = lines[this.chart.named ?? 0];
    this.describe(`${title}: ${named.y.at(-1)?.toPrecision(4)} (${xLabel} ${named.x.at(-1)})`);
    const edge = { stroke: this.color("--line"), width: 1 };
    const axis = { stroke: this.color("--soft"), grid: edge, ticks: edge };
    const value = (plot, found) => {
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) return ""; // nothing is pointed at
      return found === null || found === undefined ? "–" : short(found);
    };
    const series = lines.map(({ label, kind, x }) => {
      const { color, width, dash, dots } = KINDS[kind];
      return { label, stroke: this.color(color), width, dash, spanGaps: true, value, points: { show: dots || x.length < 3 } };
    });
    const tables = lines.map((line) => [line.x, line.y]);
    const options = {
      width: this.width,
      height: this.height,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      axes: [axis, { ...axis, size: 64, values: (plot, values) => values.map((value) => (value === null ? "" : short(value))) }],
      legend: { show: legend, live: true },
      cursor: { drag: { x: true, y: false } },
      series: [{ label: xLabel, value }, ...series],
      hooks: { draw: onDraw ? [onDraw] : [], setLegend: [(plot) => this.showPointed(plot)] },
    };
    this.plot = new uPlot(options, tables.length > 1 ? uPlot.join(tables) : tables[0], this.box);
  }

  /** Without a place that is pointed at, the legend has names only. */
  showPointed(plot) {
    this.box.classList.toggle("pointed", typeof plot.cursor.idx === "number");
  }

  resize() {
    if (this.plot && this.clientWidth) this.plot.setSize({ width: this.width, height: this.height });
  }
}

/** A chart with its data. Its SVG remains on paper, and where no script runs. */
class StillChart extends ChartElement {
  connectedCallback() {
    super.connectedCallback();
    this.show(JSON.parse(this.dataset.chart));
    this.classList.add("drawn");
  }
}
customElements.define("still-chart", StillChart);
