// What the page knows: read once after every reset, kept up to date by events.

import { get } from "./api.js";

const REMEMBERED = 200;
const SETTLE_MS = 300;
const RETRY_MS = 2000;

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
  /** `changed` is called with a part that is other now; `failed` with a part and what went wrong, or null. */
  constructor(changed, failed) {
    this.changed = changed;
    this.epoch = 0;
    this.clear();
    const reading = (part, work, pause_ms) => {
      const read = again(async () => {
        const { epoch } = this;
        try {
          await work();
          failed(part, null);
        } catch (error) {
          if (epoch !== this.epoch) return;
          failed(part, error);
          setTimeout(() => epoch === this.epoch && read(), RETRY_MS);
        }
      }, pause_ms);
      return read;
    };
    this.readExperts = reading("experts", async () => this.#put("experts", await this.#get("/v1/model/experts")));
    this.readVersions = reading("history", () => this.#readVersions(), SETTLE_MS);
    this.readAll = reading("state", () => this.#readAll());
  }

  /** Forget everything, and what is being read too. */
  clear() {
    this.epoch += 1;
    this.engine = this.storage = this.history = this.experts = null;
    this.transactions = new Map();
    this.uploads = new Map();
    this.operations = new Map();
  }

  #put(part, value) {
    this[part] = value;
    this.changed(part);
  }

  /** An answer, unless all was forgotten while it came: then it is about the time before. */
  async #get(path) {
    const { epoch } = this;
    const answer = await get(path);
    if (epoch !== this.epoch) throw new Error("too late");
    return answer;
  }

  /** Fill in what no event has told since the reset: what they tell is newer. */
  async #readAll() {
    const { engine, writable, busy, storage, open_transactions } = await this.#get("/v1/status");
    if (!this.storage) this.#put("storage", storage);
    if (!this.engine) this.#put("engine", { engine, writable, busy });
    void this.readVersions();
    const unknown = open_transactions.slice(-20).filter((id) => !this.transactions.has(id));
    const open = await Promise.all(unknown.map((id) => this.#get(`/v1/transactions/${id}`).catch(() => null)));
    for (const one of open) {
      if (one && !this.transactions.has(one.id)) this.#keep("transactions", { ...one, uploads: one.uploads.length });
    }
    this.changed("work");
  }

  async #readVersions() {
    const history = await this.#get("/v1/versions");
    const passed = this.history && Number(this.history.current) > Number(history.current);
    if (!passed) this.#put("history", history); // else it is being read again, for that version
  }

  #keep(part, one, id = one.id) {
    this[part].set(id, one);
    bounded(this[part]);
    this.changed("work");
  }

  tell(event) {
    switch (event.type) {
      case "reset":
        this.clear();
        return void this.readAll();
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
    if (this.engine?.engine.model) this.readExperts();
  }
}
