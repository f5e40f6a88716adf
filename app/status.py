"""What is seen of the engine and of the room for bytes; told in the feed when it changes."""

import asyncio
from collections.abc import Callable

from app.blobs import Blobs
from app.engine import EngineClient
from app.feed import Feed
from app.link import EngineLink
from app.settings import Settings
from app.staging import Staging
from app.undo import UndoRoom
from schemas.events import EngineEvent, StorageEvent
from schemas.status import EngineStatus, Progress, RankStatus, Room, Rooms


def engine_status(
    client: EngineClient, link: EngineLink, progress: Progress | None, proved: bool | None
) -> EngineStatus:
    """The engine as it was last seen."""
    engine, last = link.engine, link.last
    description = engine.description if engine else None
    return EngineStatus(
        url=client.url,
        reachable=link.reachable,
        problem=link.problem,
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
        progress=progress,
        proved=proved,
    )


def rooms(settings: Settings, staging: Staging, undo: UndoRoom, blobs: Blobs) -> Rooms:
    """Bytes and their budgets."""
    return Rooms(
        staged=Room(used=staging.budget.used, budget=settings.staged_bytes),
        undo=Room(used=undo.used, budget=settings.undo_bytes),
        kept=Room(used=blobs.used, budget=settings.blob_bytes),
    )


class Lookout:
    """Looks at engine and room again and again, and publishes either when it is not what it was."""

    def __init__(
        self,
        feed: Feed,
        engine: Callable[[], EngineEvent],
        storage: Callable[[], StorageEvent],
        step_s: float,
    ) -> None:
        self._feed = feed
        self._engine = engine
        self._storage = storage
        self._step_s = step_s
        self._seen: tuple[EngineEvent, StorageEvent] | None = None

    async def look_for_ever(self) -> None:
        """Look while there is somebody to tell."""
        while True:
            if self._feed.readers:
                self.look()
            await asyncio.sleep(self._step_s)

    def look(self) -> tuple[EngineEvent, StorageEvent]:
        """How they stand; what has changed since the last look is published.

        Whoever is told the state looks here: were it otherwise between two looks, and nobody the wiser, a
        reader of events who was told so would go on believing it.
        """
        engine, storage = self._engine(), self._storage()
        seen = self._seen
        if seen is None or _timeless(seen[0]) != _timeless(engine):
            self._feed.publish(engine)
        if seen is None or seen[1].storage != storage.storage:
            self._feed.publish(storage)
        self._seen = (engine, storage)
        return self._seen


def _timeless(event: EngineEvent) -> EngineEvent:
    """Without when it was seen, and the seconds that a start takes, which are no news."""
    progress = event.engine.progress and event.engine.progress.model_copy(update={"elapsed_s": None})
    engine = event.engine.model_copy(update={"progress": progress})
    return event.model_copy(update={"at": None, "engine": engine})
