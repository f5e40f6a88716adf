"""The admin as an ASGI app."""

from importlib.metadata import version

import httpx
from fastapi import FastAPI

from app import openapi, problems
from app.access import Access
from app.requests import Requests
from app.routes import (
    baselines,
    dashboard,
    events,
    exports,
    health,
    model,
    operations,
    readback,
    reload,
    status,
    transactions,
    uploads,
    versions,
)
from app.service import Service
from app.settings import Settings
from app.unread import CloseUnread


def create_app(
    settings: Settings | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> FastAPI:
    """The app, asleep: no disk and no engine is touched before its lifespan begins.

    `transport` replaces the network on the way to the engine. `app.state.service` is
    the `Service` behind the routes.
    """
    service = Service(settings or Settings(), transport)
    app = FastAPI(
        title="Graft",
        version=version("graft-vllm"),
        description="Change the weights of a live vLLM server, and put them back.",
        lifespan=service.running,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    app.add_middleware(Access, settings=service.settings, source=service)
    app.add_middleware(CloseUnread)
    app.add_middleware(Requests, metrics=service.metrics)  # the last one is the outermost
    changing = (transactions, uploads, versions, baselines, reload, exports, operations)
    for part in (health, status, events, model, *changing, readback):
        app.include_router(part.router)
    dashboard.install(app)
    problems.install(app)
    openapi.install(app)
    return app
