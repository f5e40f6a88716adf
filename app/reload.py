"""Reload: all weights anew from a checkpoint folder on disk, as one more version."""

import asyncio
import secrets
from pathlib import Path

from app.changes import Changes
from app.engine import EngineClient
from app.ledger import Ledger
from app.link import EngineLink
from app.operations import Asker
from app.preconditions import Precondition, check_base
from app.roots import Roots
from app.settings import Settings
from app.source import Source
from loaders.catalogue import Catalogue
from loaders.folder import CheckpointFolder
from loaders.header import HeaderLimits
from loaders.staged import refuse_full_disk
from schemas.bridge import ReadTensor
from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt
from schemas.versions import ReloadRequest, VersionKind


class Reloads:
    """From a path to a version."""

    def __init__(
        self, settings: Settings, client: EngineClient, link: EngineLink, ledger: Ledger, changes: Changes
    ) -> None:
        self._settings = settings
        self._client = client
        self._link = link
        self._ledger = ledger
        self._changes = changes

    @property
    def folder(self) -> str | None:
        """The folder that a reload without a path reads, if that is known."""
        engine = self._link.engine
        served = engine.description.checkpoint if engine else None
        return None if served is None else current_folder(self._ledger, served)

    async def reload(self, request: ReloadRequest, expected: Precondition, asker: Asker) -> Receipt:
        """A new version with the weights of a folder.

        Raises bad_value, path_not_allowed, bad_checkpoint, checkpoint_mismatch, tied_tensor,
        tensor_unsupported and what a commit does.
        """
        engine = self._link.require_writable()
        self._changes.require_idle()
        expected.check(self._ledger.current.version)
        check_base(request.base_version, self._ledger.current.version)
        served = served_folder(self._link)
        given = request.path or current_folder(self._ledger, served)
        source = await asyncio.to_thread(self._source, given, Path(served), engine.catalogue)
        await self._check_fixed(source)
        return await self._changes.reload(source, request, expected, asker)

    def _source(self, given: str, served: Path, catalogue: Catalogue) -> Source:
        roots = Roots.of(self._settings.reload_roots, served)
        path = served.resolve() if given == str(served) else roots.admit(given)
        folder = CheckpointFolder.open(path, self._limits)
        # In a hub's cache the files of a folder are links to elsewhere; the engine itself has followed those.
        if path != served.resolve() and not all(roots.hold(shard.path) for shard in folder.shards):
            raise ProblemError(Code.PATH_NOT_ALLOWED, "A file of the folder is a link to a forbidden place.")
        return Source.read(folder, catalogue)

    async def _check_fixed(self, source: Source) -> None:
        """What can't be updated must be as the engine has it."""
        if not source.fixed:
            return
        folder = self._settings.read_dir / secrets.token_hex(8)
        with refuse_full_disk():
            await asyncio.to_thread(folder.mkdir)
        file = folder / "fixed.safetensors"
        try:
            wanted = [
                ReadTensor(name=tensor.name, tensor=tensor.name, loaded=tensor.loaded)
                for tensor in source.fixed
            ]
            await self._client.read(file, wanted)
            await asyncio.to_thread(lambda: source.require_fixed(CheckpointFolder.open(folder, self._limits)))
        finally:
            await asyncio.to_thread(_remove, file)

    @property
    def _limits(self) -> HeaderLimits:
        return HeaderLimits(nbytes=self._settings.header_bytes)


def served_folder(link: EngineLink) -> str:
    """The folder that the engine was started on. Raises not_supported, engine_unavailable."""
    folder = link.require().description.checkpoint
    if folder is None:
        raise ProblemError(Code.NOT_SUPPORTED, "The engine does not say which folder it was loaded from.")
    return folder


def current_folder(ledger: Ledger, served: str) -> str:
    """The folder that the current version goes back to: of the latest reload, else the served one."""
    version: int | None = ledger.current.version
    while version is not None:
        record = ledger.get(version)
        if record.kind is VersionKind.RELOAD and record.receipt is not None and record.receipt.path:
            return record.receipt.path
        version = record.base_version if record.restores is None else record.restores
    return served


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.parent.rmdir()
