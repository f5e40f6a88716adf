"""Exports as operations: begun, followed, cancelled; one at a time."""

import asyncio
import logging
import secrets
from datetime import UTC, datetime
from pathlib import Path

from app.engine import EngineClient
from app.export import Export, Plan
from app.ledger import Ledger
from app.lineage import tensors_between
from app.link import EngineLink
from app.logs import bound, event
from app.operations import Operations
from app.problems import as_problem
from app.reload import served_folder
from app.roots import Roots
from app.settings import Settings
from app.source import require_same
from loaders.catalogue import Catalogue
from loaders.folder import CheckpointFolder, Shard
from loaders.header import HeaderLimits
from schemas.operations import ExportProgress, Operation, OperationKind, OperationState
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)
_RUNNING = OperationState.RUNNING


class Exports:
    """Runs exports beside everything else; they end with the service."""

    def __init__(
        self,
        settings: Settings,
        client: EngineClient,
        link: EngineLink,
        ledger: Ledger,
        operations: Operations,
    ) -> None:
        self._settings = settings
        self._client = client
        self._link = link
        self._ledger = ledger
        self._operations = operations
        self._running: dict[str, asyncio.Task[None]] = {}
        self._starting = False

    async def start(self, version: int, path: str) -> Operation:
        """Begin to write `version` to the folder `path`; the operation to follow.

        Raises unknown_version, version_not_held, bad_value, path_not_allowed, path_taken, busy,
        disk_full, bad_checkpoint, checkpoint_mismatch, not_supported, engine_unavailable, state_unknown.
        """
        catalogue = self._link.require_writable().catalogue
        self._ledger.get(version)
        if not self._same(version, self._ledger.current.version):
            raise ProblemError(
                Code.VERSION_NOT_HELD, "Only weights that the engine runs can be exported; roll back first."
            )
        if self._starting or any(self._operations.get(id).state is _RUNNING for id in self._running):
            raise ProblemError(Code.BUSY, "Wait for the export that is under way, or cancel it.")
        self._starting = True
        try:
            served = Path(served_folder(self._link))
            plan = await asyncio.to_thread(self._plan, path, served, catalogue)
            operation = _begun(plan, version)
            try:
                await self._operations.keep(operation)
            except ProblemError:
                await asyncio.to_thread(plan.clear)
                raise
            self._running[plan.id] = asyncio.create_task(self._run(plan, version))
        finally:
            self._starting = False
        return operation

    async def cancel(self, id: str) -> Operation:
        """End an export and wait until nothing is left of it. Raises unknown_operation, operation_state."""
        operation = self._operations.get(id)
        if operation.state is not _RUNNING:
            return operation
        task = self._running.get(id)
        if task is None:
            raise ProblemError(Code.OPERATION_STATE, f"A running {operation.kind} can't be cancelled.")
        task.cancel()
        await asyncio.wait({task})
        return self._operations.get(id)

    async def close(self) -> None:
        """End all that run."""
        for id in tuple(self._running):
            await self.cancel(id)

    def _plan(self, path: str, served: Path, catalogue: Catalogue) -> Plan:
        target = Roots.of(self._settings.export_roots, served).admit(path)
        base = CheckpointFolder.open(served, HeaderLimits(nbytes=self._settings.header_bytes))
        require_same(base, catalogue)
        unloaded = frozenset(tensor.name for tensor in catalogue.tensors() if not tensor.loaded)
        plan = Plan(secrets.token_hex(8), base, target, unloaded)
        plan.begin()
        return plan

    async def _run(self, plan: Plan, version: int) -> None:
        def report(shard: Shard) -> None:
            self._operations.put(_further(self._operations.get(plan.id), shard))

        state, problem = OperationState.DONE, None
        try:
            with bound(operation=plan.id):
                await Export(
                    self._client, plan, lambda seen, shard: self._right(version, seen, shard), report
                ).run()
        except asyncio.CancelledError:
            state = OperationState.CANCELLED
        except Exception as error:  # noqa: BLE001 - whoever follows the operation is told, like any client
            if not isinstance(error, ProblemError):
                _log.exception("export %s", plan.id)
            state, problem = OperationState.FAILED, as_problem(error).problem()
        with bound(operation=plan.id):
            event(_log, logging.INFO, "export ended", state=state, code=problem.code if problem else None)
        update = {"state": state, "ended_at": datetime.now(UTC), "problem": problem}
        try:
            await self._operations.end(self._operations.get(plan.id).model_copy(update=update))
        finally:
            del self._running[plan.id]

    def _right(self, version: int, seen: int, shard: Shard) -> bool:
        """Whether the file's tensors are at `seen` what they are at `version`."""
        if self._same(version, seen):
            return True
        try:
            one, other = self._ledger.lineage(version), self._ledger.lineage(seen)
        except ProblemError:
            return False
        if one is None or other is None:
            return False
        return tensors_between(one, other).isdisjoint(shard.header.entries)

    def _same(self, version: int, other: int) -> bool:
        """Whether two versions have the same weights; one that is not in the history has others."""
        try:
            return self._ledger.nearest(version) == self._ledger.nearest(other)
        except ProblemError:
            return False


def _begun(plan: Plan, version: int) -> Operation:
    return Operation(
        id=plan.id,
        kind=OperationKind.EXPORT,
        state=_RUNNING,
        created_at=datetime.now(UTC),
        export=ExportProgress(
            version=version,
            path=str(plan.target),
            files=0,
            of_files=len(plan.base.shards),
            nbytes=0,
            of_nbytes=plan.nbytes,
        ),
    )


def _further(operation: Operation, shard: Shard) -> Operation:
    """The operation once one more file is complete."""
    assert operation.export is not None  # it is an export's
    done = operation.export
    update = {"files": done.files + 1, "nbytes": done.nbytes + shard.nbytes}
    return operation.model_copy(update={"export": done.model_copy(update=update)})
