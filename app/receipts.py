"""Receipts: what a change did, from what was uploaded and what every rank answered."""

from dataclasses import dataclass

from app.transactions import Prepared, Transaction
from schemas.bridge import CommitResult
from schemas.transactions import RankWork, Receipt, Timing, Volume
from schemas.versions import VersionKind


@dataclass(frozen=True)
class Change:
    """A commit of `transaction`, a rollback that `restores` a version, or a reload of the folder `path`."""

    kind: VersionKind
    version: int
    base: int
    transaction: Transaction | None = None
    restores: int | None = None
    path: str | None = None
    label: str | None = None


def receipt_of(change: Change, prepared: Prepared, result: CommitResult) -> Receipt:
    """The receipt of a change that every rank confirmed."""
    transaction = change.transaction
    uploads = transaction.uploads if transaction else []
    writes = [write for one in uploads for write in one.staged.writes]
    ranks = tuple(RankWork.model_validate(rank, from_attributes=True) for rank in result.ranks)
    return Receipt(
        version=change.version,
        base_version=change.base,
        restores=change.restores,
        transaction=transaction.id if transaction else None,
        path=change.path,
        label=transaction.options.label if transaction else change.label,
        tensors=_tensors(writes_tensors=len({write.tensor for write in writes}), ranks=ranks),
        experts=len({one.place for one in uploads} - {None}),
        nbytes=Volume(
            uploaded=sum(one.upload.nbytes for one in uploads),
            written=sum(rank.nbytes for rank in ranks),
            undo=sum(rank.undo_nbytes for rank in ranks),
        ),
        timing=_timing(sum(one.validate_ms for one in uploads), prepared, result),
        ranks=ranks,
        caches=result.caches,
        in_flight=result.in_flight,
        uploads=tuple(one.upload for one in uploads),
        note=result.detail,
    )


def _tensors(writes_tensors: int, ranks: tuple[RankWork, ...]) -> int:
    """Checkpoint tensors of the uploads; for a rollback what the ranks say."""
    return writes_tensors or max((rank.tensors for rank in ranks), default=0)


def _timing(checked_ms: float, prepared: Prepared, result: CommitResult) -> Timing:
    validated_ms = max((rank.validate_ms for rank in prepared.result.ranks), default=0.0)
    return Timing(
        validate_ms=checked_ms + validated_ms,
        prepare_ms=prepared.result.prepare_ms,
        pause_ms=result.pause_ms,
        apply_ms=result.apply_ms,
        resume_ms=result.resume_ms,
    )
