// Engine, budgets, and what is under way.

import { bar, byId, bytes, make } from "./text.js";

const ROOMS = [
  ["staged", "Staged uploads"],
  ["undo", "Undo, per rank"],
  ["kept", "Uploads of versions"],
];
const PROVED = new Map([[true, "found right by their digests"], [false, "replayed; there was nothing to compare them with"]]);
const LIVE = new Set(["open", "preparing", "prepared", "committing"]);
const RECENT = 5;

export function showEngine({ engine, writable, busy }) {
  const layout = engine.parallel;
  const split = layout ? Object.entries(layout).filter(([, n]) => n === true || n > 1).map(([k, n]) => `${k}${n === true ? "" : ` ${n}`}`) : [];
  const facts = [
    ["State", writable ? (busy ? "changing weights" : engine.paused ? "paused" : "serving") : engine.problem ?? "not there"],
    ["Progress", engine.progress && [engine.progress.phase, engine.progress.detail].filter(Boolean).join(": ")],
    ["Model", engine.model && `${engine.model.architecture}, ${engine.model.dtype}`],
    ["Size", engine.model && `${engine.model.layers} layers, ${engine.model.experts} experts`],
    ["Quantisation", engine.model?.quantization],
    ["Parallel", layout && (split.join(", ") || "one rank")],
    ["vLLM", engine.vllm_version],
    ["Weights", PROVED.get(engine.proved)],
    ["Address", engine.url],
  ];
  byId("engine").replaceChildren(...facts.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  byId("model").textContent = engine.model?.model ?? "";
  byId("ranks").hidden = engine.ranks.length === 0;
  byId("ranks").tBodies[0].replaceChildren(
    ...engine.ranks.map((rank) => make("tr", {}, make("th", { scope: "row" }, String(rank.rank)), make("td", {}, rank.version),
      make("td", {}, bytes(rank.undo_nbytes)), make("td", {}, bytes(rank.prepared_nbytes)))),
  );
}

export function showBudgets(storage) {
  byId("budgets").replaceChildren(
    ...ROOMS.filter(([key]) => storage[key]).map(([key, name]) => {
      const { used, budget } = storage[key];
      return make("li", {}, make("span", { class: "pair" }, make("span", {}, name),
        make("span", { class: "number" }, `${bytes(used)} of ${bytes(budget)}`)), bar(used / budget));
    }),
  );
}

/** Those that go on, and the latest that have ended. */
function some(all, live) {
  const ended = all.filter((one) => !live(one)).slice(-RECENT);
  return [...all.filter(live).reverse(), ...ended.reverse()];
}

const work = (state, ...children) => make("li", { class: `work ${state}` }, ...children);
const pair = (left, right) => make("span", { class: "pair" }, make("span", {}, left), make("span", { class: "number" }, right));
const shown = (state) => ({ failed: "failed", refused: "failed", interrupted: "failed", committed: "ended", aborted: "ended", expired: "ended", accepted: "ended", done: "ended", cancelled: "ended" })[state] ?? "";

function transaction(one) {
  const name = one.label ?? one.id;
  const result = one.version ? `version ${one.version}` : one.problem?.title ?? `${one.uploads} ${one.uploads === 1 ? "upload" : "uploads"}, ${bytes(one.nbytes)}`;
  return work(shown(one.state), pair(`${name}: ${one.state}`, result));
}

function upload(one) {
  const place = one.expert === null ? "batch" : `layer ${one.layer}, expert ${one.expert}`;
  const size = one.nbytes && one.state === "receiving" ? `${bytes(one.received)} of ${bytes(one.nbytes)}` : bytes(one.received);
  return work(shown(one.state), pair(`${place}: ${one.state}`, one.code ?? size),
    one.state === "receiving" && one.nbytes ? bar(one.received / one.nbytes) : null);
}

function operation({ operation: one, version }) {
  const files = one.export ? `${one.export.files} of ${one.export.of_files} files` : "";
  return work(shown(one.state), pair(`${one.kind}: ${one.state}`, one.problem?.title ?? (version ? `version ${version}` : files)),
    one.export && one.state === "running" ? bar(one.export.nbytes / one.export.of_nbytes) : null);
}

export function showWork(transactions, uploads, operations) {
  byId("transactions").replaceChildren(...some(transactions, (one) => LIVE.has(one.state)).map(transaction));
  byId("uploads").replaceChildren(...some(uploads, (one) => one.state === "receiving").map(upload));
  byId("operations").replaceChildren(...some(operations, (one) => one.operation.state === "running").map(operation));
  byId("no-work").hidden = transactions.length + uploads.length + operations.length > 0;
  for (const id of ["transactions", "uploads", "operations"]) byId(id).hidden = !byId(id).firstChild;
}
