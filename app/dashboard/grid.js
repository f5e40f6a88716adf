// Layers x experts: an ARIA grid with one cell in the order of tabs, coloured by version.

import { byId, make } from "./text.js";

const SHADES = 6;
const PAGE = 8;
const ROOMY = 16; // up to so many experts a cell has room for its version's number

/** Version -> shade: the latest is the strongest, the base the weakest. */
function shadesOf(layers) {
  const seen = new Set(layers.flatMap((layer) => layer.versions));
  const known = [...seen].filter((version) => version !== null).sort((a, b) => Number(b) - Number(a));
  const shades = new Map(known.map((version, place) => [version, version === "0" ? 0 : Math.max(1, SHADES - place)]));
  if (seen.has(null)) shades.set(null, "x");
  return shades;
}

const named = (version) => (version === null ? "before this history" : version === "0" ? "base" : `version ${version}`);

export class Grid {
  constructor(choose) {
    this.element = byId("grid");
    this.rows = [];
    this.at = [0, 0];
    this.versions = [];
    this.element.addEventListener("keydown", (event) => this.#key(event, choose));
    this.element.addEventListener("focusin", (event) => this.#entered(event.target));
    this.element.addEventListener("pointerover", (event) => this.#say(event.target));
    this.element.addEventListener("pointerdown", (event) => event.target.closest("[role=gridcell]")?.focus());
  }

  /** Show the answer of /v1/model/experts; only cells that differ are touched. */
  show({ layers }) {
    const columns = layers[0]?.versions.length ?? 0;
    byId("grid-frame").hidden = byId("grid-help").hidden = columns === 0;
    byId("no-experts").hidden = columns > 0;
    byId("no-experts").textContent = "This model has no experts.";
    if (layers.length !== this.rows.length || columns !== this.rows[0]?.length) this.#build(layers, columns);
    const shades = shadesOf(layers);
    layers.forEach(({ layer, versions }, y) => versions.forEach((version, x) => this.#paint(y, x, layer, version, shades)));
    this.versions = layers.map((layer) => layer.versions);
    this.#legend(layers, shades);
  }

  #build(layers, columns) {
    this.element.style.setProperty("--columns", columns);
    this.element.classList.toggle("roomy", columns <= ROOMY);
    this.element.setAttribute("aria-rowcount", layers.length);
    this.element.setAttribute("aria-colcount", columns + 1);
    this.versions = [];
    this.rows = layers.map(() =>
      Array.from({ length: columns }, (_, x) => make("div", { role: "gridcell", tabindex: "-1", "aria-colindex": x + 2 })),
    );
    this.element.replaceChildren(
      ...layers.map(({ layer }, y) =>
        make("div", { role: "row", "aria-rowindex": y + 1 },
          make("div", { role: "rowheader", "aria-colindex": 1, "aria-label": `layer ${layer}` }, `layer ${layer}`),
          ...this.rows[y])),
    );
    this.rows.forEach((row, y) => row.forEach((cell, x) => (cell.place = [y, x])));
    this.at = [0, 0];
    this.rows[0]?.[0]?.setAttribute("tabindex", "0");
  }

  #paint(y, x, layer, version, shades) {
    const cell = this.rows[y][x];
    const shade = String(shades.get(version));
    if (cell.dataset.shade !== shade) cell.dataset.shade = shade;
    if (this.versions[y]?.[x] === version) return;
    const text = `layer ${layer}, expert ${x}: ${named(version)}`;
    cell.setAttribute("aria-label", text);
    if (this.rows[0].length <= ROOMY) cell.title = text;
  }

  #legend(layers, shades) {
    const counts = new Map();
    for (const version of layers.flatMap((layer) => layer.versions)) counts.set(version, (counts.get(version) ?? 0) + 1);
    const groups = new Map();
    for (const [version, shade] of shades) groups.set(shade, [...(groups.get(shade) ?? []), version]);
    byId("legend").replaceChildren(
      ...[...groups].map(([shade, versions]) => {
        const count = versions.reduce((sum, version) => sum + counts.get(version), 0);
        const text = versions.length === 1 ? named(versions[0]) : `${versions.length} older versions`;
        return make("li", {}, make("i", { "data-shade": shade, "aria-hidden": "true" }), `${text}: ${count}`);
      }),
    );
  }

  #say(target) {
    if (target.place) byId("cell").textContent = target.getAttribute("aria-label");
  }

  #entered(target) {
    if (!target.place) return;
    this.rows[this.at[0]]?.[this.at[1]]?.setAttribute("tabindex", "-1");
    this.at = target.place;
    target.setAttribute("tabindex", "0");
    this.#say(target);
  }

  #key(event, choose) {
    const [y, x] = this.at;
    const [bottom, right] = [this.rows.length - 1, this.rows[0].length - 1];
    const whole = event.ctrlKey || event.metaKey;
    const moves = {
      ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1],
      Home: [whole ? 0 : y, 0], End: [whole ? bottom : y, right], PageUp: [y - PAGE, x], PageDown: [y + PAGE, x],
    };
    if (event.key === "Enter") choose(this.versions[y][x]);
    else if (!(event.key in moves) || event.altKey) return;
    else {
      const [toY, toX] = moves[event.key];
      this.rows[Math.min(bottom, Math.max(0, toY))][Math.min(right, Math.max(0, toX))].focus();
    }
    event.preventDefault();
  }
}
