"""Running requests in every mode, reload and export: a toy gpt-oss of two files behind `graft serve`."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loaders.engine.toy_model import make_toy_gptoss
from tests.e2e.bodies import Dense, batch
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack, until
from tests.e2e.weights import Weights, same_bits

pytestmark = pytest.mark.long

LONG = [7, 3, 9, 200, 41] * 60
"""Longer than two KV blocks of 128, so that its prefix is cached."""
MODEL_LEN = 32_768
ENDLESS = 32_000
"""Tokens of a request that outlasts whatever a test does meanwhile."""
ENDING = 6_000
"""Tokens of a request that a test waits for."""
STREAMS = 3


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    """A toy whose weights lie in two files with an index, for long answers."""
    folder = root / "modes"
    make_toy_gptoss(folder, hidden=64, intermediate=96)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": MODEL_LEN}))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_sharded(folder, tensors)
    return folder


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number, chosen in ((1, names[::2]), (2, names[1::2])):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def stack(stacks: Stacks, model: Path) -> Stack:
    """With the base's weights, whatever an earlier test has left."""
    stack = stacks.on(model, max_model_len=MODEL_LEN)
    for armed in stack.failpoints.iterdir():
        armed.unlink()
    stack.rollback(0)
    return stack


@pytest.fixture
def body(model: Path) -> bytes:
    """A commit that changes what every layer thinks of every prompt."""
    return batch(*(Dense(name, tensor) for name, tensor in changed(model).items() if "self_attn" in name))


def changed(model: Path) -> dict[str, torch.Tensor]:
    """All tensors with other values."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (t.float() * (0.7 + 0.5 * torch.rand(t.shape, generator=generator))).to(t.dtype)
        for name, t in Weights(model).tensors.items()
    }


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


class Load:
    """Requests that run, started together."""

    def __init__(self, stack: Stack, pool: ThreadPoolExecutor, tokens: int = ENDLESS) -> None:
        self._stack = stack
        self._tokens = tokens
        self._running: list[Future[dict[str, Any]]] = [
            pool.submit(generate, stack, [*LONG, index], tokens) for index in range(STREAMS)
        ]
        until(lambda: in_flight(stack) == STREAMS)

    def full(self) -> list[list[str]]:
        """All get their full length; the versions that made each, in order."""
        return self._results("length")

    def cut(self, version: int) -> list[list[str]]:
        """All run on until a rollback to `version` ends them; the versions that made each, in order."""
        assert not any(one.done() for one in self._running)
        self._stack.json("POST", "/v1/rollback", json={"to_version": version, "in_flight": "abort"})
        return self._results("abort")

    def cut_short(self) -> list[list[str]]:
        """All were ended; the versions that made each, in order."""
        return self._results("abort")

    def _results(self, reason: str) -> list[list[str]]:
        results = [one.result(300) for one in self._running]
        assert {one["finish_reason"] for one in results} == {reason}
        for one in results:
            assert (len(one["token_ids"]) == self._tokens) is (reason == "length")
        return [[span["version"] for span in one["weight_versions"]] for one in results]


def generate(stack: Stack, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One request, token in and token out, with the versions that made its tokens."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = stack.http.post(
        f"{stack.inference}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}
    )
    choice: dict[str, Any] = answer.raise_for_status().json()["choices"][0]
    return choice


def in_flight(stack: Stack) -> int:
    """Requests that the engine runs, as it says itself."""
    return metric(stack, "num_requests_running")


def generated_by(stack: Stack, version: str) -> bool:
    """Whether tokens come from this version now; so a request that runs beside has some of them, too."""
    return stack.stamped_version(LONG) == {version}


def metric(stack: Stack, name: str) -> int:
    for line in stack.http.get(f"{stack.inference}/metrics").text.splitlines():
        if line.startswith(f"vllm:{name}{{"):
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError(f"the engine has no metric {name}")


def with_hits(stack: Stack) -> tuple[Answer, int]:
    """The answer to the long prompt, and how many of its tokens were found in the prefix cache."""
    asked, hit = (metric(stack, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    answer = stack.complete(LONG)
    until(lambda: metric(stack, "prefix_cache_queries_total") >= asked + len(LONG))
    return answer, metric(stack, "prefix_cache_hits_total") - hit


def resets(stack: Stack) -> int:
    """How often vLLM says that it has reset the prefix cache."""
    return (stack.folder / "state" / "engine.log").read_text().count("Successfully reset prefix cache")


def paused(stack: Stack) -> bool:
    """Whether generation is, as the admin last saw it; asking whether it is ready makes it look."""
    stack.call("GET", "/health/ready")
    return bool(stack.json("GET", "/v1/status")["engine"]["paused"])


def test_recompute_loses_nobody(stack: Stack, body: bytes, pool: ThreadPoolExecutor) -> None:
    """Requests that a commit meets go on with the new weights until they are ended."""
    before = stack.version()
    load = Load(stack, pool)
    receipt = stack.patch(body, in_flight="recompute")
    assert (receipt["in_flight"], receipt["caches"]["prefix"]) == ("recomputed", "reset")
    until(lambda: generated_by(stack, receipt["version"]))
    assert load.cut(before) == [[str(before), receipt["version"]]] * STREAMS


def test_recomputed_requests_have_their_full_length(
    stack: Stack, body: bytes, pool: ThreadPoolExecutor
) -> None:
    """Preempted and computed again, each ends with as many tokens as it asked for."""
    before = stack.version()
    load = Load(stack, pool, ENDING)
    stack.patch(body, in_flight="recompute")
    assert all(versions[0] == str(before) for versions in load.full())
    stack.rollback(before)


def test_wait_lets_them_end_first(stack: Stack, body: bytes, pool: ThreadPoolExecutor) -> None:
    """They are made by the old weights alone, one that comes meanwhile by the new ones alone."""
    before = stack.version()
    load = Load(stack, pool, ENDING)
    commit = pool.submit(stack.patch, body, in_flight="wait", drain_timeout_s=300)
    until(lambda: paused(stack))
    late = pool.submit(generate, stack, LONG, 8)
    assert not commit.done() and not late.done()
    receipt = commit.result(300)
    assert (receipt["in_flight"], receipt["caches"]["prefix"]) == ("finished", "reset")
    assert load.full() == [[str(before)]] * STREAMS
    assert [span["version"] for span in late.result(60)["weight_versions"]] == [receipt["version"]]
    stack.rollback(before)


def test_wait_is_bounded(stack: Stack, body: bytes, pool: ThreadPoolExecutor) -> None:
    """Time is up: no weight has changed, the requests go on, and the next commit works."""
    before, digests = stack.version(), stack.digests()
    load = Load(stack, pool)
    with stack.transaction(in_flight="wait", drain_timeout_s=0.3) as transaction:
        transaction.patches(body)
        answer = transaction.commit()
        assert (answer.status_code, answer.json()["code"]) == (503, "drain_timeout")
        assert "0.3" in answer.json()["detail"]
        assert stack.call("GET", "/health/ready").json()["version"] == str(before)
        assert stack.digests() == digests
        assert load.cut(before) == [[str(before)]] * STREAMS
        assert transaction.commit().status_code == 200  # nobody runs any more
    stack.rollback(before)
    assert stack.digests() == digests


def test_abort_ends_them(stack: Stack, body: bytes, pool: ThreadPoolExecutor) -> None:
    """They end at once, with what they have, and say why; the next one is answered by the new weights."""
    before = stack.version()
    load = Load(stack, pool)
    receipt = stack.patch(body, in_flight="abort")
    assert (receipt["in_flight"], receipt["caches"]["prefix"]) == ("aborted", "reset")
    assert load.cut_short() == [[str(before)]] * STREAMS
    assert {span["version"] for span in generate(stack, LONG, 8)["weight_versions"]} == {receipt["version"]}
    stack.rollback(before)


def test_keep_mixes_until_the_last_has_ended(stack: Stack, body: bytes, pool: ThreadPoolExecutor) -> None:
    """Requests go on with old KV, and new ones hit it; when the last has ended it is gone."""
    before = stack.version()
    load = Load(stack, pool, ENDING)
    reset = resets(stack)
    receipt = stack.patch(body, in_flight="keep")
    assert (receipt["in_flight"], receipt["caches"]["prefix"]) == ("kept", "mixed")
    _, mixed = with_hits(stack)
    assert mixed >= 256 and resets(stack) == reset
    assert load.full() == [[str(before), receipt["version"]]] * STREAMS
    until(lambda: resets(stack) > reset, seconds=20)
    answer, hits = with_hits(stack)
    assert hits == 0
    stack.rollback(receipt["version"])  # the same weights, and all caches reset
    assert stack.complete(LONG) == answer
    stack.rollback(before)


def test_keep_with_nobody_there_resets_at_once(stack: Stack, body: bytes) -> None:
    """There is nothing to mix."""
    before = stack.version()
    receipt = stack.patch(body, in_flight="keep")
    assert receipt["caches"]["prefix"] == "reset"
    stack.rollback(before)


@pytest.mark.parametrize("mode", ["recompute", "wait", "keep"])
def test_a_failure_in_every_mode_loses_nobody(
    stack: Stack, body: bytes, pool: ThreadPoolExecutor, mode: str
) -> None:
    """A worker that fails is undone; the requests go on, made by the old weights to their end."""
    before, digests = stack.version(), stack.digests()
    load = Load(stack, pool, ENDING if mode == "wait" else ENDLESS)
    (stack.failpoints / "apply.middle").touch()
    with stack.transaction(in_flight=mode, drain_timeout_s=300) as transaction:
        transaction.patches(body)
        answer = transaction.commit()
    assert (answer.status_code, answer.json()["code"]) == (503, "commit_undone"), answer.text
    assert stack.digests() == digests and stack.version() == before
    versions = load.full() if mode == "wait" else load.cut(before)
    assert versions == [[str(before)]] * STREAMS


def test_a_reload_that_fails_leaves_everything(stack: Stack, model: Path, root: Path) -> None:
    """In the worker, by another model, or by a damaged file: old weights, version and path."""
    folder = root / "modes-failing"
    Weights(model).save(folder)
    (folder / "model.safetensors.index.json").unlink()
    before, digests, answer = stack.version(), stack.digests(), stack.complete(LONG)
    (stack.failpoints / "apply.after").touch()
    failed = stack.call("POST", "/v1/reload", json={"path": str(folder)})
    assert (failed.status_code, failed.json()["code"]) == (503, "commit_undone")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-2])
    failed = stack.call("POST", "/v1/reload", json={"path": str(folder)})
    assert (failed.status_code, failed.json()["code"]) == (422, "bad_checkpoint")
    make_toy_gptoss(root / "modes-wider", hidden=64, intermediate=128)
    failed = stack.call("POST", "/v1/reload", json={"path": str(root / "modes-wider")})
    assert (failed.status_code, failed.json()["code"]) == (422, "checkpoint_mismatch")
    assert (stack.version(), stack.digests(), stack.complete(LONG)) == (before, digests, answer)
    assert stack.json("POST", "/v1/reload")["path"] == str(model)
    assert (stack.digests(), stack.complete(LONG)) == (digests, answer)


def test_reload_and_export_equal_a_fresh_engine(
    stack: Stack, stacks: Stacks, model: Path, root: Path, pool: ThreadPoolExecutor
) -> None:
    """Another folder, reloaded under load, is what is read back, exported, and started afresh."""
    base, digests = stack.version(), stack.digests()
    tensors = changed(model)
    weights = Weights(model)
    weights.tensors = tensors
    folder = weights.save(root / "modes-changed")
    (folder / "model.safetensors.index.json").unlink()
    load = Load(stack, pool)
    receipt = stack.json("POST", "/v1/reload", json={"path": str(folder), "label": "epoch 2"})
    until(lambda: generated_by(stack, receipt["version"]))
    assert load.cut(int(receipt["version"])) == [[str(base), receipt["version"]]] * STREAMS
    assert stack.json("GET", f"/v1/versions/{receipt['version']}")["path"] == str(folder)
    assert stack.digests().keys() == digests.keys() and stack.digests() != digests

    patched = torch.full_like(tensors["model.norm.weight"], 1.25)
    version = stack.patch(batch(Dense("model.norm.weight", patched)))["version"]
    tensors["model.norm.weight"] = patched
    out = root / "modes-out"
    stack.export(int(version), out)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in model.iterdir())
    exported = Weights(out).tensors
    assert exported.keys() == tensors.keys()
    assert all(same_bits(exported[name], tensor) for name, tensor in tensors.items())

    final, answer = stack.digests(), stack.complete(LONG)
    assert stack.json("POST", "/v1/reload")["path"] == str(folder)  # without the patch
    assert stack.digests() != final
    stack.json("POST", "/v1/reload", json={"path": str(out)})
    assert (stack.digests(), stack.complete(LONG)) == (final, answer)
    oracle = stacks.on(out)
    assert (oracle.digests(), oracle.complete(LONG)) == (final, answer)
    stack.rollback(base)
    assert stack.digests() == digests
