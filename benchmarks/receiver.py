"""The admin's way from a socket to a kept blob, served alone: received, digested, checked, durable.

Routes, access, idempotency and ledger are left out, which cost milliseconds whatever a body measures.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.allocator import keep_freed
from app.blobs import Blobs
from app.failpoints import Failpoints
from app.heads import BoundedHeads
from app.ledger import Ledger
from app.listen import listen
from app.settings import Settings
from app.staging import Staging
from loaders.catalogue import Catalogue
from loaders.upload import check_batch
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo, Treatment

TENSOR = "w"


def catalogue(elements: int) -> Catalogue:
    """A model of one bf16 tensor."""
    tensor = CheckpointTensor(name=TENSOR, dtype=Dtype.BF16, shape=(elements,), treatment=Treatment.DIRECT)
    info = ModelInfo(model="", architecture="", dtype="bfloat16", quantization=None, layers=0, experts=0)
    return Catalogue((tensor,), info)


class Receiver:
    """`PUT /NAME`: what becomes of an upload between its first byte and the moment it may be committed."""

    def __init__(self, folder: Path, elements: int) -> None:
        settings = Settings(state_dir=folder)
        self._staging = Staging(settings)
        self._blobs = Blobs(settings, Ledger(), Failpoints())
        self._catalogue = catalogue(elements)
        route = Route("/{name}", self.put, methods=["PUT"])
        self.app = Starlette(routes=[route], lifespan=self._running)

    @asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        await self._blobs.begin(())
        yield

    async def put(self, request: Request) -> Response:
        """Answers with the digest once the blob has its lasting name."""
        file = await self._staging.receive(request)
        await asyncio.to_thread(check_batch, file, self._catalogue, False)
        await self._blobs.keep([file])
        await self._staging.discard([file])
        return PlainTextResponse(file.blake3, status_code=201)


def main() -> None:
    """Serve as `graft serve` does; prints the port."""
    keep_freed()
    receiver = Receiver(Path(sys.argv[1]), int(sys.argv[2]))
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(receiver.app, http=BoundedHeads, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
