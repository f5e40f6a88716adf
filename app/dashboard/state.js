// What the page knows: read once after every reset, kept up to date by events.

import { get } from "./api.js";

const REMEMBERED = 200;
const SETTLE_MS = 300;

/** Runs `work` now, or once more after the run that is under way; with `pause_ms`, no more often than that. */
function again(work, pause_ms = 0) {
  let running = false;
  let wanted = false;
  return async function run() {
    wanted = true;
    if (running) return;
    running = true;
    try {
      while (wanted) {
        wanted = false;
        await work();
        if (pause_ms) await new Promise((resolve) => setTimeout(resolve, pause_ms));
      }
    } finally {
      running = false;
    }
  };
}

function bounded(map) {
  for (const key of map.keys()) {
    if (map.size <= REMEMBERED) return;
    map.delete(key);
  }
}

export class State {
  /** `changed` is called with the parts that are other now; `failed` with what went wrong. */
  constructor(changed, failed) {
    this.changed = changed;
    this.clear();
    const guarded = (work) => async () => {
      try {
        await work();
        failed(null);
      } catch (error) {
        failed(error);
      }
    };
    this.readExperts = again(guarded(async () => this.#put("experts", await get("/v1/model/experts"))));
    this.readVersions = again(guarded(async () => this.#put("history", await get("/v1/versions"))), SETTLE_MS);
    this.readAll = again(guarded(() => this.#read()));
  }

  clear() {
    this.engine = this.storage = this.history = this.experts = null;
    this.transactions = new Map();
    this.uploads = new Map();
    this.operations = new Map();
  }

  #put(part, value) {
    this[part] = value;
    this.changed(part);
  }

  async #read() {
    const status = await get("/v1/status");
    const { engine, writable, busy, storage } = status;
    this.clear();
    const open = await Promise.all(status.open_transactions.slice(-20).map((id) => get(`/v1/transactions/${id}`).catch(() => null)));
    for (const one of open.filter(Boolean)) this.#keep("transactions", { ...one, uploads: one.uploads.length });
    this.#put("storage", storage);
    this.#put("engine", { engine, writable, busy });
    this.changed("work");
    await this.readVersions();
  }

  #keep(part, one, id = one.id) {
    this[part].set(id, one);
    bounded(this[part]);
    this.changed("work");
  }

  tell(event) {
    switch (event.type) {
      case "reset": return void this.readAll();
      case "version": return this.#version(event.version);
      case "baseline": return void this.readVersions();
      case "transaction": return this.#keep("transactions", event);
      case "upload": return this.#keep("uploads", event);
      case "operation": return this.#keep("operations", event, event.operation.id);
      case "storage": return this.#put("storage", event.storage);
      case "engine": return this.#put("engine", event);
    }
  }

  #version(entry) {
    if (this.history) {
      const before = this.history.versions.filter((one) => Number(one.version) < Number(entry.version));
      this.#put("history", { ...this.history, current: entry.version, versions: [...before, entry] });
    }
    this.readVersions(); // what of the earlier ones is held has changed
    if (this.experts) this.readExperts();
  }
}
