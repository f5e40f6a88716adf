"""Answers of the service in lines and tables for people."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.filesize import decimal
from rich.table import Table

from app.probe import summary
from schemas.model import CheckpointTensor, ModelInfo
from schemas.operations import Operation
from schemas.status import Model, Room, Status
from schemas.transactions import Receipt, Transaction, Upload
from schemas.versions import VersionDetail, VersionEntry, VersionList


def lines(*shown: str | None) -> str:
    """Those that there are, one under the other."""
    return "\n".join(line for line in shown if line)


def status_text(status: Status) -> str:
    """Everything an operator asks first."""
    engine = status.engine
    doing = "busy" if status.busy else "writable" if status.writable else f"not writable: {engine.problem}"
    model, progress = engine.model, engine.progress
    storage = status.storage
    rooms = {"staged": storage.staged, "undo": storage.undo, "kept": storage.kept}
    return lines(
        f"version      {'?' if status.version is None else status.version}, {doing}",
        f"engine       {engine.url}, {'answers' if engine.reachable else 'does not answer'}"
        + (f", vLLM {engine.vllm_version}" if engine.vllm_version else "")
        + (", paused" if engine.paused else ""),
        "not proved   its version was replayed, and no digests of it were recorded to compare with"
        if engine.proved is False
        else None,
        f"starting     {progress.phase}: {progress.detail or ''}" if progress else None,
        f"model        {model.model}: {_model(model)}" if model else None,
        f"checkpoint   {status.checkpoint}" if status.checkpoint else None,
        *(f"rank {one.rank:<8d}version {one.version}, boot {one.boot}" for one in engine.ranks),
        *(f"{name:<13}{_room(room)}" for name, room in rooms.items() if room),
        f"transactions {', '.join(status.open_transactions) or 'none'} open",
    )


def model_text(model: Model) -> str:
    """The model, and what an expert's upload consists of."""
    layers = ", ".join(str(layer) for layer in model.expert_layers)
    return lines(
        f"{model.model}: {_model(model)}",
        f"layers with experts: {layers}" if layers else "no experts",
        *(f"  {one.name}  {one.dtype} {list(one.shape)}" for one in model.expert_tensors),
    )


def tensors_table(tensors: Sequence[CheckpointTensor]) -> Table:
    """Tensors, those that are alike but for layer and expert as one."""
    table = _table("tensor", "number", "dtype", "shape", "treatment", "reason")
    for pattern, count, first in summary(tensors):
        cells = (str(first.dtype), str(list(first.shape)), str(first.treatment), first.reason or "")
        table.add_row(pattern, str(count), *cells)
    return table


def versions_table(versions: VersionList) -> Table:
    """The history; the current version is marked."""
    table = _table("version", "kind", "made", "on", "label", "back", "baselines")
    for one in versions.versions:
        mark = "*" if one.version == versions.current else ""
        held = "yes" if one.held else "no"
        cells = (time_text(one.created_at), _on(one), one.label or "", held, ", ".join(one.baselines))
        table.add_row(f"{one.version}{mark}", str(one.kind), *cells)
    return table


def version_text(version: VersionDetail) -> str:
    """One version with its receipt."""
    made = time_text(version.created_at)
    return lines(
        f"version {version.version}: {version.kind} of {made} {_on(version)}".rstrip(),
        f"label {version.label}" if version.label else None,
        f"{'can' if version.held else 'can not'} be gone back to",
        f"baselines {', '.join(version.baselines)}" if version.baselines else None,
        receipt_text(version.receipt) if version.receipt else None,
    )


def receipt_text(receipt: Receipt) -> str:
    """What a change did, and how long it took."""
    of = f"of {receipt.experts} experts " if receipt.experts else ""
    back = f", the weights of {receipt.restores}" if receipt.restores is not None else ""
    timing, caches = receipt.timing, ", ".join(f"{name} {what}" for name, what in receipt.caches.items())
    paused = timing.pause_ms + timing.apply_ms + timing.resume_ms
    idle = receipt.restores is not None and receipt.nbytes.written == 0
    return lines(
        f"version {receipt.version} on {receipt.base_version}{back}: {receipt.tensors} tensors {of}"
        f"on {len(receipt.ranks)} ranks",
        f"  {decimal(receipt.nbytes.uploaded)} uploaded, {decimal(receipt.nbytes.written)} written",
        f"  prepared in {timing.prepare_ms:.0f} ms, paused {paused:.0f} ms",
        f"  requests {receipt.in_flight}; caches: {caches}",
        *_uploads(receipt.uploads),
        f"  nothing differed: the engine ran the weights of {receipt.restores} already" if idle else None,
        f"  {receipt.note}" if receipt.note else None,
    )


def transaction_text(transaction: Transaction) -> str:
    """A transaction as it stands."""
    problem = transaction.problem
    return lines(
        f"transaction {transaction.id}: {transaction.state}"
        + (f", {transaction.label}" if transaction.label else ""),
        f"  expires {time_text(transaction.expires_at)}, {decimal(transaction.nbytes)} uploaded",
        *_uploads(transaction.uploads),
        f"  {problem.code}: {problem.detail}" if problem else None,
        receipt_text(transaction.receipt) if transaction.receipt else None,
    )


def operation_text(operation: Operation) -> str:
    """An operation as it stands."""
    export, problem = operation.export, operation.problem
    return lines(
        f"operation {operation.id}: {operation.kind}, {operation.state}",
        f"  version {export.version} to {export.path}: {export.files} of {export.of_files} files, "
        f"{decimal(export.nbytes)} of {decimal(export.of_nbytes)}"
        if export
        else None,
        f"  {problem.code}: {problem.detail}" if problem else None,
        receipt_text(operation.receipt) if operation.receipt else None,
    )


def time_text(moment: datetime) -> str:
    """By the clock and calendar of whoever reads it."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _uploads(uploads: Iterable[Upload]) -> list[str]:
    return [
        f"  {one.number}. {one.kind}"
        + (f" {one.layer}/{one.expert}" if one.expert is not None else "")
        + f": {one.tensors} tensors, {one.elements} elements, {decimal(one.nbytes)}"
        for one in uploads
    ]


def _model(model: ModelInfo) -> str:
    experts = f"{model.experts} experts" if model.experts else None
    parts = (model.architecture, model.dtype, model.quantization, f"{model.layers} layers", experts)
    return ", ".join(part for part in parts if part)


def _on(version: VersionEntry) -> str:
    if version.restores is not None:
        return f"restores {version.restores}"
    if version.path:
        return version.path
    return f"on {version.base_version}" if version.base_version is not None else ""


def _room(room: Room) -> str:
    return f"{decimal(room.used)} of {decimal(room.budget)}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
