// Requests to the service: the token goes into a header, and refusals become errors.

const KEY = "graft-token";

/** A refusal, from the problem document where there is one. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? "");
    this.status = status;
    this.title = problem.title ?? `The service answered ${status}`;
    this.code = problem.code ?? "";
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

/** The response to a request; throws Refused, or TypeError if there is nobody. */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (token.get()) headers.set("Authorization", `Bearer ${token.get()}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  throw new Refused(response.status, await response.json().catch(() => ({})));
}

export const get = async (path) => (await ask(path)).json();

/** Go back to `version`, provided that `current` still is the current one; the receipt. */
export async function rollback(version, current) {
  const random = crypto.getRandomValues(new Uint8Array(16));
  const headers = {
    "Content-Type": "application/json",
    "If-Match": `"${current}"`,
    "Idempotency-Key": Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join(""),
  };
  const body = JSON.stringify({ to_version: version });
  return (await ask("/v1/rollback", { method: "POST", headers, body })).json();
}

/** Say in `element` what went wrong, or with null that nothing did. */
export function explain(element, error) {
  element.hidden = !error;
  element.replaceChildren();
  if (!error) return;
  if (!(error instanceof Refused)) {
    element.append("The service does not answer.");
    return;
  }
  const code = document.createElement("code");
  code.textContent = error.code;
  element.append(error.title, error.code ? " (" : "", code, error.code ? ")" : "", error.message ? `: ${error.message}` : "");
}
