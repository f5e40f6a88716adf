// The versions, latest first: what each was, how big, how long generation stood still.

import { bar, byId, bytes, make, milliseconds, moment } from "./text.js";

const PAGE = 40;

const stall = ({ timing }) => (timing ? timing.pause_ms + timing.apply_ms + timing.resume_ms : null);

function what(entry) {
  if (entry.kind === "rollback") return `rollback to ${entry.restores}`;
  return entry.kind === "reload" && entry.path ? `reload of ${entry.path}` : entry.kind;
}

export class Timeline {
  constructor(rollBack) {
    this.body = byId("versions").tBodies[0];
    this.shown = PAGE;
    this.rollBack = rollBack;
    byId("older").addEventListener("click", () => {
      this.shown += PAGE;
      this.show(this.entries, this.current, this.writable);
    });
  }

  show(entries, current, writable) {
    [this.entries, this.current, this.writable] = [entries, current, writable];
    const focused = document.activeElement?.closest?.("#versions tr")?.dataset.version;
    const latest = entries.slice(-this.shown).reverse();
    const largest = Math.max(1, ...latest.map((entry) => entry.nbytes?.written ?? 0));
    const longest = Math.max(1, ...latest.map((entry) => stall(entry) ?? 0));
    this.body.replaceChildren(...latest.map((entry) => this.#row(entry, largest, longest)));
    byId("older").hidden = entries.length <= this.shown;
    if (focused) this.find(focused)?.focus();
  }

  find(version) {
    const row = this.body.querySelector(`tr[data-version="${version}"]`);
    return row?.querySelector("button") ?? row;
  }

  #row(entry, largest, longest) {
    const current = entry.version === this.current;
    const size = entry.nbytes?.written;
    const stood = stall(entry);
    return make("tr", { "data-version": entry.version, "aria-current": current && "true", tabindex: "-1" },
      make("th", { scope: "row" }, entry.version),
      make("td", { class: "text" }, what(entry), " ",
        ...(current ? [make("span", { class: "tag" }, "current")] : []),
        ...entry.baselines.map((name) => make("span", { class: "tag" }, `baseline ${name}`))),
      make("td", { class: "text" }, entry.label ?? ""),
      make("td", {}, make("time", { datetime: entry.created_at }, moment(entry.created_at))),
      make("td", {}, entry.experts ? String(entry.experts) : ""),
      make("td", {}, ...(size === undefined ? [""] : [bytes(size), bar(size / largest)])),
      make("td", {}, ...(stood === null ? [""] : [milliseconds(stood), bar(stood / longest)])),
      make("td", {}, current ? "" : this.#action(entry)));
  }

  #action(entry) {
    if (!entry.held) return make("span", { class: "quiet" }, "no longer held");
    const button = make("button", { type: "button", "aria-label": `Roll back to version ${entry.version}` }, "Roll back…");
    button.disabled = !this.writable;
    button.addEventListener("click", () => this.rollBack(entry, this.current));
    return button;
  }
}
