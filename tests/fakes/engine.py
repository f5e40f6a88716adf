"""A fake engine: the bridge's routes over numpy arrays in checkpoint coordinates, with faults on demand.

Every rank holds the whole model. It is for breadth only: nothing here says how vLLM behaves.
"""

import argparse
import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import httpx
import numpy as np
import uvicorn
from blake3 import blake3
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.failpoints import Failpoints
from loaders.staged import refuse_full_disk
from schemas import bridge
from schemas.bridge import Outcome, RankError, RankReport
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo, Treatment
from schemas.problems import Code, ProblemError
from schemas.transactions import InFlight
from tests.fakes.safetensors import Part, parse, write_file

LAYERS, EXPERTS, HIDDEN, INNER, VOCAB = 2, 4, 8, 6, 16
_FATES = {
    InFlight.RECOMPUTE: "recomputed",
    InFlight.WAIT: "finished",
    InFlight.ABORT: "aborted",
    InFlight.KEEP: "kept",
}
_RAW: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
Piece = tuple[str, Array, Array]
"""Tensor name, flat positions, raw values."""


def tensors(layers: int = LAYERS, experts: int = EXPERTS) -> tuple[CheckpointTensor, ...]:
    """A toy in the style of gpt-oss; one tensor of it can't be updated."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (experts, HIDDEN, 2 * INNER)
        shapes[f"{prefix}.mlp.experts.gate_up_proj_bias"] = (experts, 2 * INNER)
        shapes[f"{prefix}.mlp.experts.down_proj"] = (experts, INNER, HIDDEN)
        shapes[f"{prefix}.mlp.experts.down_proj_bias"] = (experts, HIDDEN)
    made = [
        CheckpointTensor(name=name, dtype=Dtype.BF16, shape=shape, treatment=Treatment.DIRECT)
        for name, shape in shapes.items()
    ]
    odd = CheckpointTensor(
        name="model.odd", dtype=Dtype.F32, shape=(4,), treatment=Treatment.UNSUPPORTED, reason="a fake reason"
    )
    return (*made, odd)


def base_weights(described: Sequence[CheckpointTensor] = tensors()) -> dict[str, Array]:
    """Raw bits of every tensor: finite bf16 numbers, different everywhere."""
    rng = np.random.default_rng(7)
    weights: dict[str, Array] = {}
    for tensor in described:
        floats = rng.standard_normal(prod(tensor.shape)).astype(np.float32).view(np.uint32)
        weights[tensor.name] = (floats >> 16).astype(np.uint16) if tensor.dtype is Dtype.BF16 else floats
    return weights


def write_base(folder: Path, weights: dict[str, Array]) -> None:
    """A checkpoint folder of two files."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {tensor.name: tensor for tensor in tensors()}
    for place, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        parts = {n: (shapes[n].dtype, shapes[n].shape, weights[n].tobytes()) for n in names}
        write_file(folder / f"model-{place}.safetensors", parts)


def read_base(folder: Path) -> dict[str, Array]:
    """The raw bits of a checkpoint folder's tensors."""
    parts: dict[str, Part] = {}
    for path in sorted(folder.glob("*.safetensors")):
        parts |= parse(path.read_bytes())
    return {n: np.frombuffer(bits, _RAW[dtype.nbytes]).copy() for n, (dtype, _, bits) in parts.items()}


@dataclass
class Rank:
    """One worker: weights, undo per version, prepared work."""

    rank: int
    boot: str
    weights: dict[str, Array]
    version: int = 0
    undo: dict[int, list[Piece]] = field(default_factory=dict)
    prepared: dict[str, list[Piece]] = field(default_factory=dict)

    def state(self) -> bridge.RankState:
        """Where it stands."""
        undo = {str(version): _nbytes(pieces) for version, pieces in self.undo.items()}
        return bridge.RankState(
            rank=self.rank,
            boot=self.boot,
            version=self.version,
            prepared=tuple(self.prepared),
            undo=undo,
            undo_nbytes=sum(undo.values()),
            prepared_nbytes=sum(_nbytes(pieces) for pieces in self.prepared.values()),
        )

    def report(self, pieces: Sequence[Piece], error: RankError | None = None) -> RankReport:
        """Its answer about `pieces`."""
        names = sorted({name for name, _, _ in pieces})
        digest = blake3(b"".join(self.weights[name].tobytes() for name in names)).hexdigest()
        return RankReport(
            nonce="",
            rank=self.rank,
            boot=self.boot,
            ok=error is None,
            error=error,
            tensors=len(names),
            elements=sum(len(values) for _, _, values in pieces),
            nbytes=_nbytes(pieces),
            undo_nbytes=_nbytes(pieces),
            digest=digest,
        )

    def write(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Write, and what undoes it, to be written in turn."""
        undo: list[Piece] = []
        for name, where, values in pieces:
            undo.insert(0, (name, where, self.weights[name][where].copy()))
            self.weights[name][where] = values
        return undo


@dataclass
class Faults:
    """What goes wrong next. Ranks are named by number; each fault stays until it is cleared."""

    prepare: dict[int, RankError] = field(default_factory=dict)
    commit: dict[int, str] = field(default_factory=dict)
    """Rank → `before`, `middle` or `after` its writes."""
    refuse: Code | None = None
    """Commits are not begun, for this reason."""
    undo: set[int] = field(default_factory=set)
    """Ranks that can't be brought back."""
    cache: bool = False
    """A cache can't be reset."""
    boast: bool = False
    """A commit is called done whatever the caches say."""
    missing: set[int] = field(default_factory=set)
    """Ranks whose answer to a commit is left out."""
    nonce: bool = False
    """Answers carry another question's nonce."""
    hold: asyncio.Event | None = None
    """Commits wait for it before they touch anything."""
    hold_prepare: asyncio.Event | None = None
    """Prepares wait for it."""
    read: Code | None = None
    """Weights are not read, for this reason."""
    hold_read: asyncio.Event | None = None
    """Reads wait for it before they write."""
    silent: asyncio.Event | None = None
    """Nothing is answered until it is set."""


class FakeEngine:
    """The engine behind the bridge's routes; `app` is the bridge."""

    def __init__(
        self,
        ranks: int = 1,
        secret: str | None = None,
        base: Path | None = None,
        shape: tuple[int, int] = (LAYERS, EXPERTS),
    ) -> None:
        """`base` is a checkpoint folder to load at every start; it is made if it is not there.

        `shape` is how many layers and experts there are, where there is no `base`.
        """
        self._shape = shape
        self.secret = secret
        self.base = base
        self.failpoints = Failpoints()
        self.boot = "boot"
        """What boot ids begin with; other than in tests, every process has its own."""
        self.faults = Faults()
        self.calls: list[str] = []
        self.commits: list[bridge.CommitRequest] = []
        self.final: set[str] = set()
        """Keys of what is prepared without undo."""
        self.paused = False
        self.checkpoint = str(base) if base else None
        """The folder that it says it was loaded from."""
        self.started = 0
        self.ranks: list[Rank] = []
        self._tensors = {tensor.name: tensor for tensor in tensors(*shape)}
        self._count = ranks
        self.restart()
        self.app = self._routes()

    def restart(self) -> None:
        """A new process with base weights and new boot ids."""
        self.started += 1
        self.paused = False
        if self.base is not None and not self.base.exists():
            write_base(self.base, base_weights())
        described = tensors(*self._shape)
        self.ranks = [
            Rank(
                n,
                f"{self.boot}-{self.started}-{n}",
                read_base(self.base) if self.base else base_weights(described),
            )
            for n in range(self._count)
        ]

    def alter(self, name: str, **members: object) -> None:
        """Describe a tensor otherwise, to whoever asks from now on."""
        self._tensors[name] = self._tensors[name].model_copy(update=members)

    def weights(self, name: str, rank: int = 0) -> Array:
        """Raw bits of a tensor, in its shape."""
        return self.ranks[rank].weights[name].reshape(self._tensors[name].shape)

    def _routes(self) -> FastAPI:
        app = FastAPI()
        asked: dict[str, Callable[..., object]] = {
            "prepare": self.prepare,
            "commit": self.commit,
            "drop": self.drop,
            "forget": self.forget,
            "digests": self.digests,
            "read": self.read,
        }
        for name, answer in asked.items():
            app.add_api_route(f"{bridge.PREFIX}/{name}", answer, methods=["POST"], response_model=None)
        app.add_api_route(f"{bridge.PREFIX}/describe", self.describe, response_model=None)
        app.add_api_route(f"{bridge.PREFIX}/state", self.state, response_model=None)

        async def refuse(request: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, ProblemError)
            problem = error.problem()
            return JSONResponse(problem.model_dump(mode="json"), problem.status)

        app.add_exception_handler(ProblemError, refuse)
        return app

    async def _enter(self, name: str, request: Request) -> None:
        if self.secret is not None and request.headers.get("authorization") != f"Bearer {self.secret}":
            raise ProblemError(Code.UNAUTHORIZED, "wrong secret")
        if self.faults.silent:
            await self.faults.silent.wait()
        self.calls.append(name)

    async def describe(self, http: Request) -> bridge.EngineDescription:
        """What the engine is."""
        await self._enter("describe", http)
        return bridge.EngineDescription(
            vllm_version="0.32.0",
            torch_version="2.13.0",
            parallel=bridge.ParallelLayout(tensor=self._count),
            model=ModelInfo(
                model="fake",
                architecture="GptOssForCausalLM",
                dtype="bfloat16",
                quantization=None,
                layers=self._shape[0],
                experts=self._shape[1],
            ),
            tensors=tuple(self._tensors.values()),
            checkpoint=self.checkpoint,
        )

    async def state(self, http: Request) -> bridge.EngineState:
        """Where every rank stands."""
        await self._enter("state", http)
        ranks = tuple(rank.state() for rank in self.ranks)
        return bridge.EngineState(ranks=ranks, paused=self.paused, weight_version=str(ranks[0].version))

    async def prepare(self, request: bridge.PrepareRequest, http: Request) -> dict[str, object]:
        """Phase one."""
        await self._enter("prepare", http)
        if self.faults.hold_prepare:
            await self.faults.hold_prepare.wait()
        if any(rank.version != request.base_version for rank in self.ranks):
            raise ProblemError(Code.VERSION_MOVED, "another version is running")
        self.failpoints.reach("engine.prepare")
        reports = []
        for rank in self.ranks:
            error = self.faults.prepare.get(rank.rank)
            pieces = self._pieces(rank, request)
            if error is None:
                rank.prepared[request.key] = pieces
                if request.replay:
                    self.final.add(request.key)
            reports.append(rank.report(pieces, error))
        outcome = Outcome.DONE if all(report.ok for report in reports) else Outcome.FAILED
        result = bridge.PrepareResult(outcome=outcome, ranks=tuple(reports), prepare_ms=1.5)
        return self._answer(result, request.nonce)

    async def commit(self, request: bridge.CommitRequest, http: Request) -> dict[str, object]:
        """Phase two: all ranks or none; goes on if the caller goes away."""
        await self._enter("commit", http)
        self.commits.append(request)
        if self.faults.refuse:
            return self._answer(_not_begun(self.faults.refuse), request.nonce)
        return await asyncio.shield(asyncio.create_task(self._commit(request)))

    async def _commit(self, request: bridge.CommitRequest) -> dict[str, object]:
        if self.faults.hold:
            self.paused = request.in_flight is InFlight.WAIT  # as while requests run to their end
            await self.faults.hold.wait()
        if any(request.key not in rank.prepared for rank in self.ranks):
            raise ProblemError(Code.BAD_REQUEST, "nothing is prepared under this key")
        self.paused = True
        written: list[tuple[Rank, list[Piece]]] = []
        reports = []
        self.failpoints.reach("engine.commit.before")
        for rank in self.ranks:
            reports.append(self._apply(rank, rank.prepared.pop(request.key), written))
            self.failpoints.reach("engine.commit.middle")
        self.failpoints.reach("engine.commit.after")
        prefix = "mixed" if request.in_flight is InFlight.KEEP else "reset"
        caches = {"prefix": "failed" if self.faults.cache else prefix, "encoder": "none"}
        failed = (self.faults.cache and not self.faults.boast) or not all(report.ok for report in reports)
        outcome = self._undo(written, request.key in self.final) if failed else Outcome.DONE
        if outcome is Outcome.DONE:
            for rank, undo in written:
                rank.version = request.version
                if request.key not in self.final:
                    rank.undo[request.version] = undo
        self.paused = outcome is Outcome.UNKNOWN
        result = bridge.CommitResult(
            outcome=outcome,
            ranks=tuple(report for report in reports if report.rank not in self.faults.missing),
            pause_ms=2.0,
            apply_ms=3.0,
            resume_ms=1.0,
            caches=caches,
            in_flight=_FATES[request.in_flight],
        )
        return self._answer(result, request.nonce)

    async def drop(self, request: bridge.KeyRequest, http: Request) -> dict[str, object]:
        """Let go of prepared work."""
        await self._enter("drop", http)
        for rank in self.ranks:
            rank.prepared.pop(request.key, None)
        return {}

    async def forget(self, request: bridge.ForgetRequest, http: Request) -> dict[str, object]:
        """Let go of undo."""
        await self._enter("forget", http)
        for rank in self.ranks:
            for version in request.versions:
                rank.undo.pop(version, None)
        return {}

    async def digests(self, request: bridge.DigestsRequest, http: Request) -> bridge.DigestsResult:
        """Digests of all tensors."""
        await self._enter("digests", http)
        ranks = tuple(
            bridge.RankDigests(
                rank=rank.rank,
                boot=rank.boot,
                tensors=tuple(
                    bridge.TensorDigest(name=name, blake3=blake3(bits.tobytes()).hexdigest())
                    for name, bits in sorted(rank.weights.items())
                    if name.startswith(request.prefix)
                ),
            )
            for rank in self.ranks
        )
        return bridge.DigestsResult(version=self.ranks[0].version, ranks=ranks)

    async def read(self, request: bridge.ReadRequest, http: Request) -> bridge.ReadResult:
        """Write a safetensors file of what is asked."""
        await self._enter("read", http)
        parts: dict[str, tuple[Dtype, tuple[int, ...], bytes]] = {}
        for one in request.tensors:
            tensor, bits = self._tensors[one.tensor], self.weights(one.tensor)
            bits = bits if one.expert is None else bits[one.expert]
            parts[one.name] = (tensor.dtype, bits.shape, bits.tobytes())
        if self.faults.read is not None:
            raise ProblemError(self.faults.read, "a fake reason")
        if self.faults.hold_read:
            await self.faults.hold_read.wait()
        with refuse_full_disk():
            nbytes = write_file(Path(request.path), parts, request.metadata)
        return bridge.ReadResult(version=self.ranks[0].version, nbytes=nbytes)

    def _pieces(self, rank: Rank, request: bridge.PrepareRequest) -> list[Piece]:
        if request.restore is not None:
            versions = range(request.base_version, request.restore, -1)
            if request.restore > rank.version or any(version not in rank.undo for version in versions):
                raise ProblemError(Code.VERSION_NOT_HELD, "the undo is not held")
            return [piece for version in versions for piece in rank.undo[version]]
        return [self._piece(upload, write) for upload in request.uploads for write in upload.writes]

    def _piece(self, upload: bridge.StagedUpload, write: bridge.TensorWrite) -> Piece:
        tensor = self._tensors[write.tensor]
        values = _load(Path(upload.path), write.values, _RAW[tensor.dtype.nbytes])
        size = prod(tensor.shape if write.expert is None else tensor.shape[1:])
        where = np.arange(size)
        if write.indices is not None:
            kind: type[np.generic] = np.int64 if write.indices.dtype is Dtype.I64 else np.int32
            where = _load(Path(upload.path), write.indices, kind).astype(np.int64)
        where += (write.expert or 0) * size
        return write.tensor, where, values

    def _apply(self, rank: Rank, pieces: list[Piece], written: list[tuple[Rank, list[Piece]]]) -> RankReport:
        fault = self.faults.commit.get(rank.rank)
        done = {"before": pieces[:0], "middle": pieces[: len(pieces) // 2]}.get(fault or "after", pieces)
        written.append((rank, rank.write(done)))
        error = RankError(code=Code.INTERNAL, detail=f"fault {fault}") if fault else None
        return rank.report(pieces, error)

    def _undo(self, written: list[tuple[Rank, list[Piece]]], final: bool) -> Outcome:
        if final:
            return Outcome.UNKNOWN
        for rank, undo in written:
            if rank.rank not in self.faults.undo:
                rank.write(undo)
        return Outcome.UNKNOWN if self.faults.undo else Outcome.FAILED

    def _answer(self, result: bridge.PrepareResult | bridge.CommitResult, nonce: str) -> dict[str, object]:
        said = "0" * 32 if self.faults.nonce else nonce
        document = result.model_dump(mode="json")
        document["ranks"] = [rank | {"nonce": said} for rank in document["ranks"]]
        return document


class Line(httpx.AsyncBaseTransport):
    """The network between admin and engine; it can be cut.

    `cuts` maps the last part of a path to `refused` (nobody listens), `before` (the
    question is lost), `after` (the answer is lost), or `late` (it is lost before it is made).
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.cuts: dict[str, str] = {}
        self.then: str | None = None
        """What becomes of every question after the next one that is cut."""
        self._inner = httpx.ASGITransport(app=engine.app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass the request on, unless the line is cut there."""
        name = request.url.path.rpartition("/")[2]
        cut = self.cuts.get(name, self.cuts.get("*"))
        if cut == "refused":
            raise httpx.ConnectError("refused")
        if cut == "before":
            raise self._cut()
        if cut == "late":
            self._asked = asyncio.create_task(self._inner.handle_async_request(request))
            await asyncio.sleep(0)
            raise self._cut()
        response = await self._inner.handle_async_request(request)
        if self.cuts.get(name) == "after":
            raise self._cut()
        return response

    def _cut(self) -> httpx.ReadError:
        if self.then is not None:
            self.cuts["*"] = self.then
        return httpx.ReadError("cut")


def _not_begun(code: Code) -> bridge.CommitResult:
    return bridge.CommitResult(
        outcome=Outcome.FAILED,
        ranks=(),
        pause_ms=0.0,
        apply_ms=0.0,
        resume_ms=0.0,
        caches={},
        in_flight="kept",
        detail="a fake reason",
        code=code,
    )


def _load(path: Path, span: bridge.Span, kind: type[np.generic]) -> Array:
    return np.frombuffer(path.read_bytes()[span.offset : span.offset + span.nbytes], kind)


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(values.nbytes for _, _, values in pieces)


def main() -> None:
    """Serve a fake engine on a port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--secret", type=lambda path: Path(path).read_text().strip())
    parser.add_argument("--base", type=Path)
    given = parser.parse_args()
    engine = FakeEngine(given.ranks, given.secret, given.base)
    engine.boot = secrets.token_hex(8)
    engine.restart()
    uvicorn.run(engine.app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
