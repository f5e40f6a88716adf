"""Status for people, metrics for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.bodies import JsonRoute
from app.service import Service, ServiceDep
from schemas.status import EngineStatus, RankStatus, Room, Rooms, Status

router = APIRouter(tags=["status"], route_class=JsonRoute)


@router.get("/v1/status", response_model=Status)
async def status(service: ServiceDep) -> Status:
    """Engine, version, open transactions, bytes and their budgets, as they were last seen."""
    settings = service.settings
    return Status(
        ledger=service.ledger.id,
        version=service.ledger.current.version,
        checkpoint=service.reloads.folder,
        writable=service.link.problem is None,
        busy=service.changes.busy,
        open_transactions=tuple(one.id for one in service.transactions.live()),
        storage=Rooms(
            staged=Room(used=service.staging.budget.used, budget=settings.staged_bytes),
            undo=Room(used=service.changes.undo.used, budget=settings.undo_bytes),
            kept=Room(used=service.blobs.used, budget=settings.blob_bytes),
        ),
        engine=_engine(service),
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
    records = ledger.records()
    gauges = {
        "version": ledger.current.version,
        "versions": len(records),
        "versions_held": sum(ledger.held(record.version) for record in records),
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


def _engine(service: Service) -> EngineStatus:
    engine, last = service.link.engine, service.link.last
    description = engine.description if engine else None
    return EngineStatus(
        url=service.client.url,
        reachable=service.link.reachable,
        problem=service.link.problem,
        paused=last.paused if last else None,
        vllm_version=description.vllm_version if description else None,
        torch_version=description.torch_version if description else None,
        parallel=description.parallel if description else None,
        model=description.model if description else None,
        ranks=tuple(
            RankStatus(
                rank=rank.rank,
                boot=rank.boot,
                version=rank.version,
                prepared=len(rank.prepared),
                undo_nbytes=rank.undo_nbytes,
                prepared_nbytes=rank.prepared_nbytes,
            )
            for rank in (last.ranks if last else ())
        ),
        progress=service.recovery.progress or service.progress(),
    )
