// The stream of events, read by fetch: an EventSource could not send the token.

import { ask, Refused } from "./api.js";

const LONGEST_MS = 10_000;
const SILENT_MS = 45_000; // the service says something every 15 s

/** Events of a stream of text, as { id, data }. */
async function* parsed(body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(
          block.split("\n").filter((line) => !line.startsWith(":")).map((line) => {
            const at = line.indexOf(": ");
            return [line.slice(0, at), line.slice(at + 2)];
          }),
        );
        if (fields.data) yield { id: fields.id, data: JSON.parse(fields.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // else the service would go on telling nobody
  }
}

/**
 * Hand every event to `tell`, in order, and stay connected until `signal`; throws Refused if not let in.
 * `show` is told "live", or "lost" and why if the service has said so.
 */
export async function follow(tell, show, signal) {
  let last = null;
  let wait = 0;
  while (!signal.aborted) {
    const silence = new AbortController();
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
    };
    let refusal = null;
    try {
      alive();
      const headers = last ? { "Last-Event-ID": last } : {};
      const response = await ask("/v1/events", { headers, signal: AbortSignal.any([signal, silence.signal]) });
      show("live");
      for await (const event of parsed(response.body, alive)) {
        last = event.id;
        wait = 0; // not before: a stream may open only to end at once
        try {
          tell(event.data);
        } catch (error) {
          reportError(error); // what is wrong with one event is no trouble of the stream
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) throw error;
      if (error instanceof Refused) refusal = error;
    } finally {
      clearTimeout(timer);
    }
    if (signal.aborted) return;
    show("lost", refusal);
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(LONGEST_MS, Math.max(500, wait * 2));
  }
}
