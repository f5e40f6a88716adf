"""Bad input to the real service: a 4xx with a stable code, nothing applied, no version used, no file left."""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.e2e.bodies import Dense, Sparse, batch, plain
from tests.e2e.stack import SAFETENSORS, Stack
from tests.e2e.weights import Weights
from tests.loaders.attacks import ATTACKS, Attack

PROMPT = [10, 20, 30, 40, 50]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Bad:
    """A request that must be refused with this status and code."""

    status: int
    code: str
    method: str
    path: str
    body: Callable[[Weights], bytes] | None = None
    headers: tuple[tuple[str, str], ...] = tuple(SAFETENSORS.items())


def sparse(
    indices: list[int], values: int, shape: tuple[int, ...] | None = None
) -> Callable[[Weights], bytes]:
    def make(weights: Weights) -> bytes:
        return batch(
            Sparse(
                Q_PROJ,
                shape or tuple(weights.tensors[Q_PROJ].shape),
                torch.tensor(indices, dtype=torch.int64),
                torch.ones(values, dtype=BF16),
            )
        )

    return make


def dense(name: str, values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], bytes]:
    return lambda weights: batch(Dense(name, values(weights.tensors[Q_PROJ])))


def listed(text: str) -> Callable[[Weights], bytes]:
    return lambda weights: save({"v": torch.ones(1, dtype=BF16)}, {"patches": text})


def expert(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Weights], bytes]:
    return lambda weights: plain(change(weights.expert(0, 0)))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().fill_(float("nan"))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


PATCHES = ("POST", "/v1/patches")
EXPERT = ("PUT", "/v1/experts/0/0")
OWN = expert(lambda tensors: tensors)
BAD = {
    "unknown name": Bad(422, "unknown_tensor", *PATCHES, dense("model.model.norm.weight", lambda t: t)),
    "trailing space": Bad(422, "unknown_tensor", *PATCHES, dense(Q_PROJ + " ", lambda t: t)),
    "wrong shape": Bad(422, "wrong_shape", *PATCHES, dense(Q_PROJ, lambda t: t[:-1])),
    "transposed": Bad(422, "wrong_shape", *PATCHES, dense(Q_PROJ, lambda t: t.t())),
    "wrong dtype": Bad(422, "wrong_dtype", *PATCHES, dense(Q_PROJ, lambda t: t.float())),
    "nan": Bad(422, "nonfinite", *PATCHES, dense(Q_PROJ, with_nan)),
    "huge shape": Bad(422, "wrong_shape", *PATCHES, sparse([0], 1, (2**20, 2**20))),
    "negative index": Bad(422, "bad_index", *PATCHES, sparse([-1], 1)),
    "index of numel": Bad(422, "bad_index", *PATCHES, sparse([128 * 64], 1)),
    "largest index": Bad(422, "bad_index", *PATCHES, sparse([2**63 - 1], 1)),
    "repeated index": Bad(422, "bad_index", *PATCHES, sparse([3, 3], 2)),
    "more indices than values": Bad(422, "wrong_shape", *PATCHES, sparse([1, 2, 3], 1)),
    "no elements": Bad(422, "nothing_to_apply", *PATCHES, sparse([], 0)),
    "patches not json": Bad(422, "bad_patch", *PATCHES, listed("{")),
    "patches not a list": Bad(422, "bad_patch", *PATCHES, listed('{"a": 1}')),
    "patches empty": Bad(422, "nothing_to_apply", *PATCHES, listed("[]")),
    "no tensors": Bad(422, "nothing_to_apply", *PATCHES, lambda weights: save({})),
    "empty body": Bad(400, "body_empty", *PATCHES, lambda weights: b""),
    "missing bias": Bad(422, "missing_tensor", *EXPERT, expert(without("down_proj_bias"))),
    "one too many": Bad(422, "unknown_tensor", *EXPERT, expert(lambda t: t | {"x": torch.ones(1)})),
    "no such expert": Bad(404, "unknown_expert", "PUT", "/v1/experts/0/8", OWN),
    "no such layer": Bad(404, "unknown_expert", "PUT", "/v1/experts/2/0", OWN),
    "expert written oddly": Bad(422, "bad_value", "PUT", "/v1/experts/0/1.0", OWN),
    "expert not a number": Bad(422, "bad_value", "PUT", "/v1/experts/0/x", OWN),
    "form": Bad(415, "content_type", *EXPERT, OWN, (("content-type", "application/x-www-form-urlencoded"),)),
    "no type": Bad(415, "content_type", *EXPERT, OWN, ()),
    "gzip": Bad(415, "content_encoding", *EXPERT, OWN, (*SAFETENSORS.items(), ("content-encoding", "gzip"))),
    "wrong digest": Bad(
        400,
        "body_digest",
        *EXPERT,
        OWN,
        (*SAFETENSORS.items(), ("content-digest", f"sha-256=:{'A' * 43}=:")),
    ),
    "stale base": Bad(409, "version_moved", "PUT", "/v1/experts/0/0?base_version=999999", OWN),
    "if-match": Bad(
        412, "precondition_failed", *EXPERT, OWN, (*SAFETENSORS.items(), ("if-match", '"999999"'))
    ),
    "no transaction": Bad(404, "unknown_transaction", "POST", "/v1/transactions/none/patches", OWN),
    "no version": Bad(404, "unknown_version", "GET", "/v1/versions/999999"),
    "no tensor": Bad(404, "unknown_tensor", "GET", "/v1/tensors/model.nothing"),
}


@pytest.fixture(scope="module")
def weights(gptoss_model: Path) -> Weights:
    return Weights(gptoss_model)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_request_is_refused(gptoss: Stack, weights: Weights, bad: Bad) -> None:
    """A wrong name, shape, dtype, index, value, type, state or id is refused with its code."""
    version = gptoss.version()
    body = bad.body(weights) if bad.body else None
    answer = gptoss.call(bad.method, bad.path, content=body, headers=dict(bad.headers))
    assert (answer.status_code, answer.json()["code"]) == (bad.status, bad.code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert gptoss.version() == version
    assert gptoss.staged_files() == []


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.id)
def test_malformed_safetensors_is_refused(gptoss: Stack, attack: Attack) -> None:
    """Every malformed safetensors file of the corpus is refused, and nothing of it stays."""
    version = gptoss.version()
    answer = gptoss.call("POST", "/v1/patches", content=attack.body, headers=SAFETENSORS)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["code"] == (attack.code if attack.body else "body_empty")
    assert gptoss.version() == version
    assert gptoss.staged_files() == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_client_gone_mid_body_leaves_nothing(gptoss: Stack, weights: Weights) -> None:
    """A client that goes away in the middle of its body leaves no file and uses no version."""
    version = gptoss.version()
    body = plain(weights.expert(0, 0))
    host, port = gptoss.admin.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"PUT /v1/experts/0/0 HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(f"{head}content-type: application/octet-stream\r\n\r\n".encode() + body[:1000])
        wait_until(lambda: gptoss.staged_files() != [])
    wait_until(lambda: gptoss.staged_files() == [])
    assert gptoss.staged_files() == []
    assert gptoss.version() == version


def test_states_of_a_transaction_are_kept(gptoss: Stack, weights: Weights) -> None:
    """Uploads into, and commits of, a transaction that is over are refused; so is an empty commit."""
    body = plain(weights.expert(0, 0))
    with gptoss.transaction() as transaction:
        empty = transaction.commit()
        assert (empty.status_code, empty.json()["code"]) == (422, "nothing_to_apply")
        gptoss.json("DELETE", f"/v1/transactions/{transaction.id}")
        for method, path in (("PUT", "experts/0/0"), ("POST", "commit")):
            late = gptoss.call(
                method,
                f"/v1/transactions/{transaction.id}/{path}",
                content=body if method == "PUT" else None,
                headers=SAFETENSORS if method == "PUT" else {},
            )
            assert (late.status_code, late.json()["code"]) == (409, "transaction_state")
    assert json.loads(empty.content)["type"].startswith("urn:graft:problem:")


def test_after_all_of_it_a_correct_commit_works(gptoss: Stack, weights: Weights) -> None:
    """The service that refused so much still serves the old weights and takes a correct upload."""
    before = gptoss.complete(PROMPT)
    version = gptoss.version()
    assert int(gptoss.put_expert(0, 0, plain(weights.expert(0, 0)))["version"]) == version + 1
    assert gptoss.complete(PROMPT) == before
