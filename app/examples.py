"""One example of every body in /openapi.json: a gpt-oss whose expert 5 of layer 3 was changed once."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from schemas import model, operations, status, transactions, versions
from schemas.base import Input
from schemas.bridge import DigestsResult, ParallelLayout, RankDigests, TensorDigest
from schemas.dtypes import Dtype
from schemas.problems import STATUS, Code, ProblemError

Json = dict[str, Any]

_BEGUN, _ENDED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
_ID, _BOOT, _LEDGER = "016522e322fad07b", "5b1a0e6f9c24d387", "c2f4810be93d7a65"
_DIGEST = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
_RECOMPUTE = transactions.InFlight.RECOMPUTE
_SIZES = {"tensors": 4, "elements": 24_891_840}

_TENSOR = model.CheckpointTensor(
    name="model.norm.weight", dtype=Dtype.BF16, shape=(2880,), treatment=model.Treatment.DIRECT
)
_MODEL = {
    "model": "gpt-oss-20b-bf16",
    "architecture": "GptOssForCausalLM",
    "dtype": "bfloat16",
    "quantization": None,
    "layers": 24,
    "experts": 32,
}
_UPLOAD = transactions.Upload(
    number=1,
    kind=transactions.UploadKind.EXPERT,
    layer=3,
    expert=5,
    blake3=_DIGEST,
    nbytes=49_784_032,
    **_SIZES,
)
_WORK = transactions.RankWork(
    rank=0, boot=_BOOT, nbytes=49_783_680, undo_nbytes=49_783_680, digest=_DIGEST, **_SIZES
)
_PREPARATION = transactions.Preparation(
    version=6, prepare_ms=61.2, nbytes=_WORK.nbytes, undo_nbytes=_WORK.undo_nbytes, ranks=(_WORK,)
)
_RECEIPT = transactions.Receipt(
    version=7,
    base_version=6,
    transaction=_ID,
    label="step 1200",
    tensors=4,
    experts=1,
    nbytes=transactions.Volume(uploaded=_UPLOAD.nbytes, written=_WORK.nbytes, undo=_WORK.undo_nbytes),
    timing=transactions.Timing(validate_ms=20.1, prepare_ms=61.2, pause_ms=4.2, apply_ms=5.5, resume_ms=1.3),
    ranks=(_WORK,),
    caches={"prefix": "reset", "encoder": "none"},
    in_flight="recomputed",
    uploads=(_UPLOAD,),
)
_TRANSACTION = transactions.Transaction(
    id=_ID,
    state=transactions.State.OPEN,
    label="step 1200",
    base_version=6,
    in_flight=_RECOMPUTE,
    allow_nonfinite=False,
    created_at=_BEGUN,
    expires_at=datetime(2026, 1, 2, 4, 4, 5, tzinfo=UTC),
    nbytes=_UPLOAD.nbytes,
    uploads=(_UPLOAD,),
    preparation=None,
    receipt=None,
    problem=None,
)
_ENTRY = {
    "version": 7,
    "kind": versions.VersionKind.COMMIT,
    "created_at": _ENDED,
    "base_version": 6,
    "transaction": _ID,
    "label": "step 1200",
    "held": True,
    "undo_nbytes": _WORK.undo_nbytes,
    "baselines": ("good",),
    "tensors": _RECEIPT.tensors,
    "experts": _RECEIPT.experts,
    "nbytes": _RECEIPT.nbytes,
    "timing": _RECEIPT.timing,
}
EVENT = (
    "id: 5b1f0c9e-17\nevent: baseline\n"
    'data: {"at":"2026-01-02T03:04:06Z","type":"baseline","name":"good","version":"7"}\n\n'
)
"""What a stream of events looks like."""
_BASELINE = versions.Baseline(name="good", version=7, created_at=_ENDED)
_ENGINE = status.EngineStatus(
    url="http://127.0.0.1:8000",
    reachable=True,
    paused=False,
    vllm_version="0.32.0",
    torch_version="2.13.0",
    parallel=ParallelLayout(),
    model=model.ModelInfo.model_validate(_MODEL),
    ranks=(
        status.RankStatus(
            rank=0, boot=_BOOT, version=7, prepared=0, undo_nbytes=_WORK.undo_nbytes, prepared_nbytes=0
        ),
    ),
    proved=True,
)

_BODIES: tuple[BaseModel, ...] = (
    transactions.TransactionOptions(base_version=6, label="step 1200", expires_in_s=3600),
    transactions.Nothing(),
    versions.RollbackRequest(to_version=6),
    versions.ReloadRequest(path="/models/gpt-oss-20b-step-1200", base_version=7),
    versions.BaselineRequest(version=7),
    operations.ExportRequest(path="/models/gpt-oss-20b-step-1200"),
    status.Alive(),
    status.Ready(version=7),
    status.Status(
        ledger=_LEDGER,
        version=7,
        checkpoint="/models/gpt-oss-20b-bf16",
        writable=True,
        busy=False,
        open_transactions=(_ID,),
        storage=status.Rooms(
            staged=status.Room(used=_UPLOAD.nbytes, budget=17_179_869_184),
            undo=status.Room(used=_WORK.undo_nbytes, budget=4_294_967_296),
            kept=status.Room(used=_UPLOAD.nbytes, budget=68_719_476_736),
        ),
        engine=_ENGINE,
    ),
    status.Model(
        **_MODEL,
        expert_layers=tuple(range(24)),
        expert_tensors=(
            model.ExpertTensor(name="gate_up_proj", dtype=Dtype.BF16, shape=(2880, 5760)),
            model.ExpertTensor(name="gate_up_proj_bias", dtype=Dtype.BF16, shape=(5760,)),
            model.ExpertTensor(name="down_proj", dtype=Dtype.BF16, shape=(2880, 2880)),
            model.ExpertTensor(name="down_proj_bias", dtype=Dtype.BF16, shape=(2880,)),
        ),
    ),
    status.ExpertMap(version=7, layers=(status.LayerExperts(layer=3, versions=(*5 * (0,), 7, *26 * (0,))),)),
    status.TensorPage(tensors=(_TENSOR,), next=None),
    _UPLOAD,
    _PREPARATION,
    _RECEIPT,
    _TRANSACTION,
    transactions.TransactionList(transactions=(_TRANSACTION,)),
    operations.Operation(
        id="7d20f1c4aa95e3b8",
        kind=operations.OperationKind.COMMIT,
        state=operations.OperationState.DONE,
        created_at=_BEGUN,
        ended_at=_ENDED,
        transaction=_ID,
        receipt=_RECEIPT,
    ),
    versions.VersionList(ledger=_LEDGER, current=7, versions=(versions.VersionEntry(**_ENTRY),)),
    versions.CurrentVersion(**_ENTRY, ledger=_LEDGER, receipt=_RECEIPT),
    versions.VersionDetail(**_ENTRY, receipt=_RECEIPT),
    _BASELINE,
    versions.BaselineList(baselines=(_BASELINE,)),
    DigestsResult(
        version=7,
        ranks=(
            RankDigests(
                rank=0, boot=_BOOT, tensors=(TensorDigest(name="model.norm.weight", blake3=_DIGEST),)
            ),
        ),
    ),
)


def bodies() -> dict[str, Json]:
    """Example by name of the model, as it goes over the wire; requests say only what is not the default."""
    return {
        type(body).__name__: body.model_dump(mode="json", exclude_unset=isinstance(body, Input))
        for body in _BODIES
    }


def problem(code: Code, http_status: int) -> Json:
    """The problem document of `code`, answered with `http_status`."""
    document = ProblemError(code, f"{STATUS[code][1]}.").problem()
    return document.model_copy(update={"status": http_status}).model_dump(mode="json")


def give(contents: Iterable[Json]) -> None:
    """Put the example beside each reference to a model; `contents` are OpenAPI's maps of media types."""
    known = bodies()
    for content in contents:
        for media in content.values():
            name = media.get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name in known:
                media["example"] = known[name]
