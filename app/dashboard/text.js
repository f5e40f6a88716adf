// How numbers are written, and how elements are made.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

export const milliseconds = (count) =>
  count >= 10_000 ? `${(count / 1000).toFixed(1)} s` : `${count < 10 ? count.toFixed(1) : Math.round(count)} ms`;

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
export const moment = (iso) => clock.format(new Date(iso));

/** An element with attributes and children; texts are texts, never markup. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** A bar that shows a share of 1; what it says stands beside it as text. */
export function bar(share) {
  const inner = make("span");
  inner.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share || 0)))}%`;
  return make("span", { class: "bar", "aria-hidden": "true" }, inner);
}

export const byId = (id) => document.getElementById(id);
