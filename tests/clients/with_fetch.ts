// A whole transaction with openapi-fetch over the types of openapi-typescript. Arguments: URL, folder.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import createClient from "openapi-fetch";

import type { components, paths } from "./graft";

type Problem = components["schemas"]["Problem"];

const [url = "", folder = ""] = process.argv.slice(2);
const graft = createClient<paths>({ baseUrl: url });
const place = { layer: 1, expert: 2 };

/** A binary body: openapi-typescript has but the type `string` for it, and openapi-fetch would write JSON. */
const safetensors = (name: string) => ({
  body: readFileSync(join(folder, name)) as unknown as string,
  bodySerializer: (body: string): string => body,
  headers: { "Content-Type": "application/vnd.safetensors" },
});

async function read(name: string): Promise<void> {
  const { data, error } = await graft.GET("/v1/experts/{layer}/{expert}", {
    params: { path: place },
    parseAs: "arrayBuffer",
  });
  assert(data, error?.detail);
  writeFileSync(join(folder, name), new Uint8Array(data));
}

function refused(problem: Problem | undefined, status: number, code: Problem["code"]): void {
  assert.deepEqual([problem?.status, problem?.code], [status, code]);
}

async function main(): Promise<void> {
  const before = (await graft.GET("/v1/versions/current")).data;
  assert(before);
  await read("before");

  const open = () =>
    graft.POST("/v1/transactions", {
      params: { header: { "Idempotency-Key": "fetch-1" } },
      body: {
        base_version: before.version,
        label: "fetch",
        in_flight: "recompute",
        allow_nonfinite: true,
      },
    });
  const opened = (await open()).data;
  assert(opened);
  assert.equal((await open()).data?.id, opened.id);
  const path = { id: opened.id };
  const sent = await graft.PUT("/v1/transactions/{id}/experts/{layer}/{expert}", {
    params: { path: { ...path, ...place } },
    ...safetensors("expert.safetensors"),
  });
  const patches = "/v1/transactions/{id}/patches";
  const batch = await graft.POST(patches, { params: { path }, ...safetensors("patches.safetensors") });
  assert(sent.data && batch.data);
  const broken = await graft.POST(patches, { params: { path }, ...safetensors("broken.safetensors") });
  refused(broken.error, 422, "wrong_shape");

  const commit = (id: string, ifMatch?: string) =>
    graft.POST("/v1/transactions/{id}/commit", {
      params: { path: { id }, header: { "If-Match": ifMatch } },
    });
  refused((await commit(opened.id, '"999"')).error, 412, "precondition_failed");
  const receipt = (await commit(opened.id, `"${before.version}"`)).data;
  assert(receipt && "uploads" in receipt);
  assert.deepEqual(
    receipt.uploads.map((upload) => upload.blake3),
    [sent.data.blake3, batch.data.blake3],
  );
  await read("committed");

  refused((await commit(opened.id)).error, 409, "transaction_state");
  refused((await commit("none")).error, 404, "unknown_transaction");

  const back = await graft.POST("/v1/rollback", {
    body: { to_version: before.version, in_flight: "recompute" },
  });
  assert(back.data && "restores" in back.data);
  assert.equal(back.data.restores, before.version);
  await read("after");
}

void main();
