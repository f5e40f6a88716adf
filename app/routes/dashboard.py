"""The page at `/`: plain files, for everybody; what they show is asked for with the token."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from app.access import DASHBOARD

FOLDER = Path(__file__).parents[1] / "dashboard"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    """With the headers that every file of the page has."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


async def _page(_: object) -> Response:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


def install(app: FastAPI) -> None:
    """Add the page and its files; they are no part of the API, and not in its document."""
    app.router.routes.append(Route("/", _page, name="dashboard"))
    app.router.routes.append(Mount(DASHBOARD.rstrip("/"), _Files(directory=FOLDER), name="dashboard_files"))
