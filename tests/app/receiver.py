"""A tiny app around `receive_body`, for tests that talk to it through a real socket."""

import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.budget import StagedBudget
from app.receive import ReceiveLimits, receive_body
from app.unread import CloseUnread
from schemas.problems import ProblemError


class Receiver:
    """POST /upload receives a body; `outcomes` gets a code or `staged` for each."""

    def __init__(self, folder: Path, limits: ReceiveLimits, budget: StagedBudget) -> None:
        self.folder = folder
        self.limits = limits
        self.budget = budget
        self.outcomes: list[str] = []
        routes = [Route("/upload", self._upload, methods=["POST"]), Route("/health/live", self._live)]
        self.app = CloseUnread(Starlette(routes=routes, exception_handlers={ProblemError: _refuse}))

    async def _upload(self, request: Request) -> Response:
        try:
            staged = await receive_body(request, self.folder, self.limits, self.budget)
        except ProblemError as error:
            self.outcomes.append(str(error.code))
            raise
        self.outcomes.append("staged")
        return JSONResponse(
            {"path": str(staged.path), "nbytes": staged.nbytes, "blake3": staged.blake3},
            status_code=201,
        )

    async def _live(self, request: Request) -> Response:
        return PlainTextResponse("live")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    problem = error.problem()
    return JSONResponse(problem.model_dump(mode="json"), problem.status)


def create_app() -> CloseUnread:
    """For `uvicorn --factory` in another process; `RECEIVER_DIR` names the folder."""
    limits = ReceiveLimits(body_nbytes=4 << 30)
    return Receiver(Path(os.environ["RECEIVER_DIR"]), limits, StagedBudget(8 << 30)).app
