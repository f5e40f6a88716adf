"""Leads a newcomer from a ready service to a first upload: asks the admin itself, in this process."""

import asyncio
import shlex

import httpx
from fastapi import FastAPI

from app.demo import EXPERT, Tour, speaks_chat, write_zero_expert
from app.listen import url_of
from app.settings import Settings
from app.token import is_loopback, load_token
from schemas.status import Model

EXAMPLE = "examples/expert.safetensors"


class Guide:
    """Knows when the service is ready, and then what to try."""

    def __init__(self, app: FastAPI, settings: Settings, port: int) -> None:
        self._settings = settings
        self._admin_url = url_of(settings.host, port)
        token = load_token(settings)
        loopback = is_loopback(settings.host) or not settings.allowed_hosts
        name = "127.0.0.1" if loopback else settings.allowed_hosts[0]
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url=f"http://{name}",
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def ready_version(self) -> str | None:
        """The version that the engine runs, once it is ready."""
        answer = await self._client.get("/health/ready")
        return str(answer.json()["version"]) if answer.status_code == httpx.codes.OK else None

    async def lines(self, inference: str, model: str, version: str) -> list[str]:
        """What to tell a person now that the service is ready."""
        chat = await asyncio.to_thread(speaks_chat, model)
        tour = Tour(self._admin_url, inference, model, chat, version, self.token_source())
        ready = f"ready: {model} at version {version}, completions at {inference}, admin at {self._admin_url}"
        answer = await self._client.get("/v1/model")
        served = Model.model_validate_json(answer.content) if answer.status_code == httpx.codes.OK else None
        if served is None or not served.expert_tensors:
            return [ready, "", "# ask a question", tour.ask()]
        file = self._settings.state_dir / EXAMPLE
        await asyncio.to_thread(write_zero_expert, file, served.expert_tensors)
        layer = served.expert_layers[min(EXPERT[0], len(served.expert_layers) - 1)]
        expert = min(EXPERT[1], served.experts - 1)
        return [
            ready,
            "Try it, in another terminal:",
            "",
            "# ask a question",
            tour.ask(),
            f"# upload an expert, here one of zeros, in the place of expert {expert} of layer {layer}",
            tour.upload(file.absolute(), layer, expert),
            "# ask again: another answer",
            tour.ask(),
            "# roll back",
            tour.roll_back(),
            "# ask again: the first answer, to the letter",
            tour.ask(),
        ]

    def token_source(self) -> str | None:
        """Shell text that yields the bearer token, if one is needed."""
        if self._settings.token is not None:
            return "$GRAFT_TOKEN"
        if self._settings.token_file is not None:
            return f"$(cat {shlex.quote(str(self._settings.token_file.absolute()))})"
        return None
