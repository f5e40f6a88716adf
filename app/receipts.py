"""Receipts: what a change did, from what was uploaded and what every rank answered."""

from schemas.base import Output, Version
from schemas.bridge import CommitResult, PrepareResult
from schemas.transactions import RankWork, Receipt, Timing, Upload, Volume
from schemas.versions import VersionKind


class Change(Output):
    """What is known of a change before it is made.

    A commit of a transaction, a rollback that `restores` a version, or a reload of the folder `path`.
    """

    kind: VersionKind
    version: Version
    base: Version
    restores: Version | None = None
    transaction: str | None = None
    path: str | None = None
    label: str | None = None
    uploads: tuple[Upload, ...] = ()
    tensors: int = 0
    """Checkpoint tensors that the uploads write."""
    validate_ms: float = 0.0


def receipt_of(change: Change, prepared: PrepareResult, result: CommitResult) -> Receipt:
    """The receipt of a change that every rank confirmed."""
    ranks = tuple(RankWork.model_validate(rank, from_attributes=True) for rank in result.ranks)
    experts = {(one.layer, one.expert) for one in change.uploads if one.expert is not None}
    return Receipt(
        version=change.version,
        base_version=change.base,
        restores=change.restores,
        transaction=change.transaction,
        path=change.path,
        label=change.label,
        # Of the uploads; for other changes what the ranks say.
        tensors=change.tensors or max((rank.tensors for rank in ranks), default=0),
        experts=len(experts),
        nbytes=Volume(
            uploaded=sum(one.nbytes for one in change.uploads),
            written=sum(rank.nbytes for rank in ranks),
            undo=sum(rank.undo_nbytes for rank in ranks),
        ),
        timing=_timing(change.validate_ms, prepared, result),
        ranks=ranks,
        caches=result.caches,
        in_flight=result.in_flight,
        uploads=change.uploads,
        note=result.detail,
    )


def _timing(checked_ms: float, prepared: PrepareResult, result: CommitResult) -> Timing:
    validated_ms = max((rank.validate_ms for rank in prepared.ranks), default=0.0)
    return Timing(
        validate_ms=checked_ms + validated_ms,
        prepare_ms=prepared.prepare_ms,
        pause_ms=result.pause_ms,
        apply_ms=result.apply_ms,
        resume_ms=result.resume_ms,
    )
