"""An admin app before a fake engine, in one process and without a socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from app.main import create_app
from app.service import Service
from app.settings import Settings
from schemas.dtypes import Dtype
from schemas.problems import Code
from tests.fakes.engine import HIDDEN, INNER, FakeEngine, Line
from tests.fakes.safetensors import Part, body

OCTETS = {"content-type": "application/octet-stream"}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@dataclass
class Admin:
    """The admin, its engine, and a client of its routes."""

    app: FastAPI
    http: httpx.AsyncClient
    engine: FakeEngine
    line: Line
    state_dir: Path

    @property
    def service(self) -> Service:
        """What is behind the routes."""
        service: Service = self.app.state.service
        return service

    @property
    def settled(self) -> bool:
        """Whether an engine was found, and brought to the current version if that could be."""
        link = self.service.link
        return link.engine is not None and (link.refusal is None or link.refusal.code is not Code.RECOVERING)

    @property
    def files(self) -> list[Path]:
        """Staged uploads and read-backs left in the state folder."""
        folders = (self.state_dir / "staged", self.state_dir / "read")
        return [path for folder in folders for path in folder.rglob("*") if path.is_file()]

    async def open(self, **options: Any) -> str:
        """Open a transaction; its path."""
        answer = await self.http.post("/v1/transactions", json=options)
        assert answer.status_code == 201, answer.text
        return answer.headers["location"]

    async def upload(
        self, transaction: str, seed: int = 1, layer: int = 0, expert: int = 0
    ) -> httpx.Response:
        """Upload an expert of random weights."""
        path = f"{transaction}/experts/{layer}/{expert}"
        return await self.http.put(path, content=expert_body(seed), headers=OCTETS)

    async def commit(self, seed: int = 1, **options: Any) -> httpx.Response:
        """A transaction of one expert, committed."""
        transaction = await self.open(**options)
        answer = await self.upload(transaction, seed)
        assert answer.status_code == 200, answer.text
        return await self.http.post(f"{transaction}/commit")

    async def version(self) -> str:
        """The current version, as the history says."""
        version: str = (await self.http.get("/v1/versions/current")).json()["version"]
        return version


@asynccontextmanager
async def running(
    state_dir: Path, ranks: int = 1, engine: FakeEngine | None = None, **settings: Any
) -> AsyncIterator[Admin]:
    """An admin that has found its engine."""
    engine = engine or FakeEngine(ranks)
    async with asleep(state_dir, Line(engine), **settings) as admin:
        await until(lambda: admin.settled)
        yield admin


@asynccontextmanager
async def asleep(state_dir: Path, line: Line, **settings: Any) -> AsyncIterator[Admin]:
    """An admin that may not have found its engine yet."""
    quick = {
        "engine_poll_s": 0.02,
        "engine_seek_s": 0.02,
        "engine_settle_s": 0.5,
        "engine_probe_s": 0.3,
        "engine_answer_s": 0.3,
        "sweep_s": 0.02,
    }
    app = create_app(Settings.model_validate({"state_dir": state_dir, **quick, **settings}), line)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as http,
    ):
        yield Admin(app, http, line.engine, line, state_dir)


def code(answer: httpx.Response) -> str:
    """The code of a problem document, whose status must be the answer's."""
    document = answer.json()
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert document["status"] == answer.status_code
    return str(document["code"])


async def until(condition: Callable[[], object], at_most_s: float = 5) -> None:
    """Wait for `condition`."""
    for _ in range(round(at_most_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def bf16(seed: int, count: int) -> bytes:
    """Finite bf16 numbers as raw bytes."""
    floats = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def expert_parts(seed: int) -> dict[str, Part]:
    """The tensors of one expert under their short names."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (HIDDEN, 2 * INNER),
        "gate_up_proj_bias": (2 * INNER,),
        "down_proj": (INNER, HIDDEN),
        "down_proj_bias": (HIDDEN,),
    }
    counts = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
    return {
        name: (Dtype.BF16, shape, bf16(seed + place, counts[name]))
        for place, (name, shape) in enumerate(shapes.items())
    }


def expert_body(seed: int = 1) -> bytes:
    """A whole expert."""
    return body(expert_parts(seed))


def q_proj_body(seed: int = 1) -> bytes:
    """A plain file that replaces one attention tensor."""
    return body({Q_PROJ: (Dtype.BF16, (HIDDEN, HIDDEN), bf16(seed, HIDDEN * HIDDEN))})
