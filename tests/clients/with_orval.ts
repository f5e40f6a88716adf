// A whole transaction with the functions that orval generates for axios. Arguments: URL, folder.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import axios from "axios";

import {
  Code,
  type Problem,
  commitTransaction,
  currentVersion,
  openTransaction,
  postPatches,
  putExpert,
  readExpert,
  rollback,
} from "./graft";

const [url = "", folder = ""] = process.argv.slice(2);
axios.defaults.baseURL = url;
axios.defaults.adapter = "fetch"; // axios's adapter for Node turns binary answers into text

const LAYER = 1;
const EXPERT = 2;

const safetensors = (name: string) => new Blob([readFileSync(join(folder, name))]);
const binary = { headers: { "Content-Type": "application/vnd.safetensors" } };

async function read(name: string): Promise<void> {
  const { data } = await readExpert(LAYER, EXPERT);
  writeFileSync(join(folder, name), new Uint8Array(await data.arrayBuffer()));
}

async function refused(answer: Promise<unknown>, status: number, code: Code): Promise<void> {
  try {
    await answer;
  } catch (error) {
    assert(axios.isAxiosError<Problem>(error));
    assert.deepEqual([error.response?.data.status, error.response?.data.code], [status, code]);
    return;
  }
  assert.fail(`${code} was expected`);
}

async function main(): Promise<void> {
  const before = (await currentVersion()).data;
  await read("before");

  const options = { base_version: before.version, label: "orval", allow_nonfinite: true };
  const once = { headers: { "Idempotency-Key": "orval-1" } };
  const { id } = (await openTransaction(options, once)).data;
  assert.equal((await openTransaction(options, once)).data.id, id);
  const sent = (await putExpert(id, LAYER, EXPERT, safetensors("expert.safetensors"), {}, binary)).data;
  const batch = (await postPatches(id, safetensors("patches.safetensors"), binary)).data;
  await refused(postPatches(id, safetensors("broken.safetensors"), binary), 422, Code.wrong_shape);

  const onto = (version: string) => ({ headers: { "If-Match": `"${version}"` } });
  await refused(commitTransaction(id, {}, onto("999")), 412, Code.precondition_failed);
  const receipt = (await commitTransaction(id, {}, onto(before.version))).data;
  assert("uploads" in receipt);
  assert.deepEqual(
    receipt.uploads.map((upload) => upload.blake3),
    [sent.blake3, batch.blake3],
  );
  await read("committed");

  await refused(commitTransaction(id, {}), 409, Code.transaction_state);
  await refused(commitTransaction("none", {}), 404, Code.unknown_transaction);

  const back = (await rollback({ to_version: before.version })).data;
  assert("restores" in back);
  assert.equal(back.restores, before.version);
  await read("after");
}

void main();
