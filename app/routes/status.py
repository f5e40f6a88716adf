"""Status for people, metrics for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.bodies import JsonRoute
from app.service import ServiceDep
from schemas.status import Status

router = APIRouter(tags=["status"], route_class=JsonRoute)


@router.get("/v1/status", response_model=Status)
async def status(service: ServiceDep) -> Status:
    """Engine, version, open transactions, bytes and their budgets, as they were last seen."""
    seen, room = service.lookout.look()
    return Status(
        ledger=service.ledger.id,
        version=service.ledger.current.version,
        checkpoint=service.reloads.folder,
        writable=seen.writable,
        busy=seen.busy,
        open_transactions=tuple(one.id for one in service.transactions.live()),
        storage=room.storage,
        engine=seen.engine,
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": "graft_version 7.0\n"}}}
    },
)
async def metrics(service: ServiceDep) -> Response:
    """The Prometheus text format."""
    settings, ledger, link = service.settings, service.ledger, service.link
    gauges = {
        "version": ledger.current.version,
        "versions": len(ledger.records()),
        "versions_held": ledger.held_count(),
        "open_transactions": len(service.transactions.live()),
        "staged_bytes": service.staging.budget.used,
        "staged_budget_bytes": settings.staged_bytes,
        "undo_bytes": service.changes.undo.used,
        "undo_budget_bytes": settings.undo_bytes,
        "blob_bytes": service.blobs.used,
        "blob_budget_bytes": settings.blob_bytes,
        "engine_up": link.reachable,
        "engine_silent_seconds": service.client.silent_s,
        "writable": link.problem is None,
        "state_unknown": link.unknown,
    }
    return Response(service.metrics.render(gauges), media_type=CONTENT_TYPE_LATEST)
