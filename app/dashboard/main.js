// Puts the page together.

import { ask, explain, Refused, rollback, token } from "./api.js";
import { follow } from "./events.js";
import { Grid } from "./grid.js";
import { showBudgets, showEngine, showWork } from "./panels.js";
import { State } from "./state.js";
import { byId, moment } from "./text.js";
import { Timeline } from "./timeline.js";

const CONNECTION = { live: "live", lost: "reconnecting", off: "not connected" };
let session = new AbortController();
let seenModel = null;
const troubles = new Map();
let toldTrouble = null;
let asked = 0; // how often it was asked whether to roll back

const grid = new Grid((version) => {
  const found = version !== null && timeline.find(version);
  if (found) found.focus();
});
const timeline = new Timeline(confirmRollback);
const pending = new Set();
const state = new State(
  (part) => {
    if (!pending.size) requestAnimationFrame(draw);
    pending.add(part);
  },
  (part, error) => (error instanceof Refused && error.status === 401 ? signIn(error) : trouble(part, error)),
);

/** Show what is wrong, of several things the first; what is said already is not said again. */
function trouble(part, error) {
  if (error) troubles.set(part, error);
  else troubles.delete(part);
  const [first = null] = troubles.values();
  const told = first && `${first.code}: ${first.message}`;
  if (told !== toldTrouble) explain(byId("trouble"), first);
  toldTrouble = told;
}

function draw() {
  const parts = new Set(pending);
  pending.clear();
  if (parts.has("storage") && state.storage) showBudgets(state.storage);
  if (parts.has("engine") && state.engine) drawEngine();
  if (parts.has("work")) showWork([...state.transactions.values()], [...state.uploads.values()], [...state.operations.values()]);
  if (parts.has("experts") && state.experts) grid.show(state.experts);
  if ((parts.has("history") || parts.has("engine")) && state.history) {
    timeline.show(state.history.versions, state.history.current, Boolean(state.engine?.writable));
    byId("current").hidden = false;
    byId("current").querySelector("strong").textContent = state.history.current;
  }
}

function drawEngine() {
  showEngine(state.engine);
  const { model } = state.engine.engine;
  const known = JSON.stringify(model);
  if (model && (known !== seenModel || !state.experts)) state.readExperts();
  seenModel = known;
}

function show(connection, refusal = null) {
  trouble("events", refusal);
  byId("connection").dataset.state = connection;
  byId("connection").textContent = CONNECTION[connection];
}

function announce(event, before) {
  const text = {
    version: () => `Version ${event.version.version} is current: ${event.version.kind}${event.version.label ? `, ${event.version.label}` : ""}`,
    transaction: () => event.state === "failed" && `A transaction failed: ${event.problem?.title ?? ""}`,
    upload: () => event.state === "refused" && `An upload was refused: ${event.code}`,
    engine: () => before && before.writable !== event.writable && (event.writable ? "The engine is ready" : `The engine can't be changed: ${event.engine.problem}`),
  }[event.type]?.();
  if (text) byId("announcer").textContent = text;
}

async function watch() {
  session.abort();
  session = new AbortController();
  const { signal } = session;
  byId("login").hidden = true;
  byId("board").hidden = false;
  byId("sign-out").hidden = !token.get();
  try {
    await follow((event) => {
      announce(event, state.engine);
      state.tell(event);
    }, show, signal);
  } catch (error) {
    if (!signal.aborted) signIn(error);
  }
}

function signIn(error) {
  const tried = Boolean(token.get());
  session.abort();
  token.clear();
  state.clear();
  troubles.clear();
  show("off");
  byId("rollback").close();
  byId("board").hidden = byId("sign-out").hidden = byId("current").hidden = true;
  byId("login").hidden = false;
  explain(byId("login").querySelector(".problem"), tried ? error : null);
  byId("token").focus();
}

byId("login").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  token.set(byId("token").value.trim());
  byId("token").value = "";
  try {
    await ask("/v1/status");
    watch();
  } catch (error) {
    signIn(error);
  }
});
byId("sign-out").addEventListener("click", () => {
  token.clear();
  signIn(null);
});

function confirmRollback(entry, current) {
  const dialog = byId("rollback");
  const problem = dialog.querySelector(".problem");
  const go = byId("rollback-go");
  const question = (asked += 1);
  byId("rollback-title").textContent = `Roll back to version ${entry.version}?`;
  byId("rollback-text").textContent =
    `The engine runs version ${current}. The weights of version ${entry.version}` +
    `${entry.label ? ` (${entry.label})` : ""}, ${entry.kind} of ${moment(entry.created_at)}, are put back on every rank as a new version. ` +
    "Running requests go on and are computed again.";
  explain(problem, null);
  go.disabled = false;
  go.onclick = async () => {
    go.disabled = true;
    explain(problem, null);
    try {
      await rollback(entry.version, current);
      if (question === asked) dialog.close();
    } catch (error) {
      if (question !== asked) return; // it was closed, and another one may be open
      explain(problem, error);
      go.disabled = false;
    }
  };
  dialog.onclose = () => {
    asked += 1;
    if (!dialog.contains(document.activeElement) && document.activeElement !== document.body) return;
    timeline.find(entry.version)?.focus(); // the button that was pressed may have been drawn anew since
  };
  dialog.showModal();
}

watch();
