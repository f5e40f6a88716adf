"""Every request that a client can make, described once: what is sent, and what the answer is read as."""

from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

from pydantic import BaseModel

from app.remote.call import Answer, Call, ReadBack, T, read_json, read_weights
from app.remote.patches import Weights, body_of
from schemas.bridge import DigestsResult
from schemas.operations import ExportRequest, Operation
from schemas.status import Model, Status, TensorPage
from schemas.transactions import (
    ExpertOptions,
    InFlight,
    OneShotExpertOptions,
    Preparation,
    Receipt,
    Transaction,
    TransactionList,
    TransactionOptions,
    Upload,
)
from schemas.versions import (
    Baseline,
    BaselineList,
    BaselineRequest,
    CurrentVersion,
    ReloadRequest,
    RollbackRequest,
    VersionDetail,
    VersionList,
)


class FlightChoices(TypedDict, total=False):
    """What a change does with requests that run, as in `schemas.transactions.FlightOptions`."""

    in_flight: InFlight | str
    drain_timeout_s: float | None


class Choices(FlightChoices, total=False):
    """How to change weights, as in `schemas.transactions.TransactionOptions`."""

    base_version: int | str | None
    label: str | None
    expires_in_s: float | None
    allow_nonfinite: bool


# -- looking ---------------------------------------------------------------------------


def status() -> Call[Status]:
    """Engine, version, open transactions, bytes and their budgets."""
    return _get("/v1/status", Status)


def model() -> Call[Model]:
    """Architecture, size, and the names of an expert's tensors."""
    return _get("/v1/model", Model)


def tensors(prefix: str = "", after: str = "", limit: int = 1000) -> Call[TensorPage]:
    """Checkpoint tensors with dtype, shape and treatment, by name; a page of them."""
    return _get("/v1/model/tensors", TensorPage, prefix=prefix, after=after, limit=limit)


def digests(prefix: str = "") -> Call[DigestsResult]:
    """Digests of what the engine's kernels read, per rank."""
    return _get("/v1/digests", DigestsResult, prefix=prefix)


def versions() -> Call[VersionList]:
    """The history, oldest first."""
    return _get("/v1/versions", VersionList)


def version(number: int | str) -> Call[VersionDetail]:
    """One version with its receipt."""
    return _get(f"/v1/versions/{number}", VersionDetail)


def current() -> Call[CurrentVersion]:
    """The version that the engine serves."""
    return _get("/v1/versions/current", CurrentVersion)


def transactions() -> Call[TransactionList]:
    """All that are open, and the latest that have ended."""
    return _get("/v1/transactions", TransactionList)


def transaction_state(id: str) -> Call[Transaction]:
    """State, uploads and receipt of one transaction."""
    return _get(f"/v1/transactions/{_part(id)}", Transaction)


def baselines() -> Call[BaselineList]:
    """All named versions."""
    return _get("/v1/baselines", BaselineList)


def operation(id: str) -> Call[Operation]:
    """Work that was not waited for: whether it runs, what came of it."""
    return _get(f"/v1/operations/{_part(id)}", Operation)


def read_expert(layer: int, expert: int) -> Call[ReadBack]:
    """One expert as the engine has it, named as in an upload."""
    return Call("GET", f"/v1/experts/{layer}/{expert}", read_weights)


def read_tensor(name: str) -> Call[ReadBack]:
    """One checkpoint tensor as the engine has it."""
    return Call("GET", f"/v1/tensors/{quote(name, safe='/')}", read_weights)


# -- transactions ----------------------------------------------------------------------


def open_transaction(**choices: Unpack[Choices]) -> Call[Transaction]:
    """A transaction to upload into."""
    return _post("/v1/transactions", Transaction, TransactionOptions.model_validate(choices))


def stage_expert(
    id: str, layer: int, expert: int, weights: Weights, *, partial: bool = False
) -> Call[Upload]:
    """One expert for a transaction; the last upload of an expert counts alone."""
    path = f"/v1/transactions/{_part(id)}/experts/{layer}/{expert}"
    return _upload("PUT", path, Upload, weights, ExpertOptions(partial=partial))


def stage_patches(id: str, weights: Weights) -> Call[Upload]:
    """Patches, or tensors that replace those of their names, for a transaction."""
    return _upload("POST", f"/v1/transactions/{_part(id)}/patches", Upload, weights, ExpertOptions())


def prepare(id: str) -> Call[Preparation]:
    """Phase one on every rank, while the engine serves."""
    return _post(f"/v1/transactions/{_part(id)}/prepare", Preparation)


def commit(id: str, *, if_match: int | str | None = None) -> Call[Receipt]:
    """All of a transaction on all ranks, or nothing."""
    return _post(f"/v1/transactions/{_part(id)}/commit", Receipt, if_match=if_match)


def abort(id: str) -> Call[Transaction]:
    """Drop what was staged."""
    return Call("DELETE", f"/v1/transactions/{_part(id)}", partial(read_json, Transaction))


# -- changes in one request ------------------------------------------------------------


def put_expert(
    layer: int, expert: int, weights: Weights, *, partial: bool = False, **choices: Unpack[Choices]
) -> Call[Receipt]:
    """One expert, committed."""
    options = OneShotExpertOptions.model_validate({"partial": partial, **choices})
    return _upload("PUT", f"/v1/experts/{layer}/{expert}", Receipt, weights, options)


def patch(weights: Weights, **choices: Unpack[Choices]) -> Call[Receipt]:
    """Patches, or tensors that replace those of their names, committed."""
    return _upload("POST", "/v1/patches", Receipt, weights, TransactionOptions.model_validate(choices))


def rollback(
    to_version: int | str | None = None,
    *,
    to_baseline: str | None = None,
    if_match: int | str | None = None,
    **choices: Unpack[FlightChoices],
) -> Call[Receipt]:
    """A new version with the weights of an old one, bit for bit: by its number or by a baseline's name."""
    target = {"to_version": to_version} if to_baseline is None else {"to_baseline": to_baseline}
    request = RollbackRequest.model_validate({**target, **choices})
    return _post("/v1/rollback", Receipt, request, if_match=if_match)


def reload(
    path: str | None = None,
    *,
    base_version: int | str | None = None,
    label: str | None = None,
    **choices: Unpack[FlightChoices],
) -> Call[Receipt]:
    """A new version with the weights of a checkpoint folder on the server; none: the same one again."""
    given = {"path": path, "base_version": base_version, "label": label, **choices}
    request = {name: value for name, value in given.items() if value is not None}
    return _post("/v1/reload", Receipt, ReloadRequest.model_validate(request))


def put_baseline(name: str, version: int | str | None = None) -> Call[Baseline]:
    """Name a version, else the current one; what going back to it needs is kept."""
    request = BaselineRequest.model_validate({"version": version})
    return Call("PUT", f"/v1/baselines/{_part(name)}", partial(read_json, Baseline), json=request)


def delete_baseline(name: str) -> Call[None]:
    """Let a name go; its version stays in the history."""
    return Call("DELETE", f"/v1/baselines/{_part(name)}", lambda response: None)


def export(version: int | str, path: str) -> Call[Operation]:
    """Begin to write a version as a checkpoint folder on the server; an operation to follow."""
    return _post(f"/v1/versions/{version}/export", Operation, ExportRequest(path=path))


def cancel(id: str) -> Call[Operation]:
    """End an export, and wait until nothing is left of it."""
    return Call("DELETE", f"/v1/operations/{_part(id)}", partial(read_json, Operation))


def in_background(call: Call[Receipt]) -> Call[Operation]:
    """The same commit, rollback or reload as an operation to follow instead of waiting for its receipt."""
    headers = {**call.headers, "prefer": "respond-async"}
    return Call(call.method, call.path, partial(read_json, Operation), call.query, call.json, None, headers)


def with_key(call: Call[T], key: str) -> Call[T]:
    """The same request under a key of the caller's, for those who repeat it in another process."""
    return replace(call, key=key)


# -- parts -----------------------------------------------------------------------------


def _get(path: str, answer: type[Answer], **query: Any) -> Call[Answer]:
    return Call(
        "GET", path, partial(read_json, answer), {name: value for name, value in query.items() if value}
    )


def _post(
    path: str, answer: type[Answer], json: BaseModel | None = None, *, if_match: int | str | None = None
) -> Call[Answer]:
    headers = {"if-match": f'"{if_match}"'} if if_match is not None else {}
    return Call("POST", path, partial(read_json, answer), json=json, headers=headers)


def _upload(
    method: str, path: str, answer: type[Answer], weights: Weights, options: BaseModel
) -> Call[Answer]:
    query = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in options.model_dump(mode="json", exclude_unset=True, exclude_none=True).items()
    }
    return Call(method, path, partial(read_json, answer), query, body=body_of(weights))


def _part(id: str) -> str:
    """An id as one step of a path."""
    return quote(id, safe="")
