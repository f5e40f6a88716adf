"""One export: a checkpoint folder with the engine's weights, complete or not there at all."""

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from app.engine import EngineClient
from loaders.folder import CheckpointFolder, Shard
from loaders.staged import fsync_path, refuse_full_disk
from schemas.bridge import ReadTensor
from schemas.problems import Code, ProblemError

_ATTEMPTS = 20
_PARTIAL = "partial"


class Plan:
    """What goes where: the files of `base`, with the engine's weights, to the folder `target`.

    Tensors that are `unloaded`, on no rank, go there as they are.
    """

    def __init__(self, id: str, base: CheckpointFolder, target: Path, unloaded: frozenset[str]) -> None:
        self.id = id
        self.base = base
        self.target = target
        self.unloaded = unloaded
        self._lock: int | None = None

    @property
    def partial(self) -> Path:
        """Where it is written before it is complete."""
        return self.target.with_name(f".{self.target.name}.{self.id}.{_PARTIAL}")

    @property
    def nbytes(self) -> int:
        """Bytes of all files with weights."""
        return sum(shard.nbytes for shard in self.base.shards)

    def begin(self) -> None:
        """Make the partial folder, held by a lock that ends with the process; blocking.

        What processes that died have left of exports to the same place is removed.
        Raises bad_value, path_taken, disk_full; then nothing was made.
        """
        try:
            self._check()
            for left in self.target.parent.glob(f".{escape(self.target.name)}.*.{_PARTIAL}"):
                with suppress(OSError):
                    lock = _locked(left)
                    _remove(left)
                    os.close(lock)
            with refuse_full_disk():
                self.partial.mkdir()
            self._lock = _locked(self.partial)
        except OSError as error:
            raise ProblemError(Code.BAD_VALUE, f"path can't be made: {error.strerror}.") from error

    def _check(self) -> None:
        if not self.target.parent.is_dir():
            raise ProblemError(Code.BAD_VALUE, "The folder that path is in does not exist.")
        self._require_free_name()
        needed = self.nbytes + sum(path.stat().st_size for path in self.base.others())
        free = shutil.disk_usage(self.target.parent).free
        if needed > free:
            detail = f"The export takes {needed} bytes, but only {free} are free."
            raise ProblemError(Code.DISK_FULL, detail, needed=needed, free=free)

    def finish(self) -> None:
        """Add what is beside the weights, make all of it durable, and give it its name; blocking.

        Raises path_taken, disk_full, OSError.
        """
        with refuse_full_disk():
            for path in self.base.others():
                copy = self.partial / path.name
                shutil.copyfile(path, copy)
                fsync_path(copy)
            fsync_path(self.partial)
            self._require_free_name()
            self.partial.rename(self.target)
            fsync_path(self.target.parent)

    def clear(self) -> None:
        """Remove what is not finished, if anything; blocking."""
        _remove(self.partial)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _require_free_name(self) -> None:
        if os.path.lexists(self.target):
            raise ProblemError(Code.PATH_TAKEN, "There is something at path already.")


class Export:
    """Carries a plan out, file by file."""

    def __init__(
        self,
        client: EngineClient,
        plan: Plan,
        right: Callable[[int, Shard], bool],
        report: Callable[[Shard], None],
    ) -> None:
        """The plan has begun; `right`: whether a version has the file's weights; `report` hears of files."""
        self._client = client
        self._plan = plan
        self._right = right
        self._report = report

    async def run(self) -> None:
        """To its end. Nothing is left if it raises, or is cancelled.

        Raises version_moved, disk_full, path_taken, and what the engine refuses.
        """
        try:
            for shard in self._plan.base.shards:
                await self._write(shard)
                self._report(shard)
            await _to_the_end(asyncio.create_task(asyncio.to_thread(self._plan.finish)))
        finally:
            # Once it has its name, there is nothing to remove.
            await asyncio.shield(asyncio.to_thread(self._plan.clear))

    async def _write(self, shard: Shard) -> None:
        file = self._plan.partial / shard.path.name
        entries = sorted(shard.header.entries.values(), key=lambda entry: entry.begin)
        wanted = [
            ReadTensor(name=entry.name, tensor=entry.name, loaded=entry.name not in self._plan.unloaded)
            for entry in entries
        ]
        result = await self._client.read(file, wanted, shard.header.metadata)
        if not self._right(result.version, shard):
            detail = f"Version {result.version} changed tensors of {file.name} before that was written."
            raise ProblemError(
                Code.VERSION_MOVED,
                f"{detail} Export that version, or roll back and commit nothing until the export is done.",
                version=str(result.version),
                file=file.name,
            )
        await asyncio.to_thread(_complete, file, shard.path)


def _complete(file: Path, like: Path) -> None:
    """Readable by whom the base is, and durable; the engine makes files for its own user."""
    with refuse_full_disk():
        shutil.copymode(like, file)
        fsync_path(file)


async def _to_the_end(task: asyncio.Task[None]) -> None:
    """What can't be stopped half way is waited for: a cancellation then comes too late."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock; raises BlockingIOError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path) -> None:
    """Remove the folder, into which the engine may just be writing, if it is still there; blocking."""
    for attempt in range(_ATTEMPTS):
        with suppress(OSError):
            shutil.rmtree(folder)
        if not folder.exists():
            break
        time.sleep(0.01 * attempt)
