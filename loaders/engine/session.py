"""The session: one rank's versions, prepared work and undo, and the two phases of a commit."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from vllm.config import VllmConfig

from loaders.engine.atlas import Atlas, Site, build_atlas
from loaders.engine.checkpoint import Checkpoint, local_folder
from loaders.engine.digests import Digests, Touched
from loaders.engine.failpoints import Failpoints
from loaders.engine.hands import Hands
from loaders.engine.job import MainThread
from loaders.engine.move import Move, digest_of, landed, storage_of
from loaders.engine.past import Past
from loaders.engine.planner import Plan, plan, values_nbytes
from loaders.engine.prepared import Applied, Prepared, taken
from loaders.engine.readback import ReadPart, write_part
from loaders.engine.rebuild import Rebuilder, Spare
from loaders.engine.room import Room
from loaders.engine.shards import Shards
from loaders.engine.ties import require_equal
from loaders.engine.workshop import Workshop
from schemas.bridge import (
    CommitRequest,
    PrepareRequest,
    RankDigests,
    RankReport,
    RankState,
    ReadRequest,
)
from schemas.problems import Code, ProblemError

T = TypeVar("T")

_READ_ATTEMPTS = 5
_QUIET_S = 30.0


class StateUnknown(Exception):
    """Overwritten weights could not be put back; this rank must not serve."""


class Session:
    """State of one rank. Methods without a MainThread argument run in the worker's main thread."""

    def __init__(self, rank: int, vllm_config: VllmConfig, live: nn.Module, folder: Path) -> None:
        self.rank = rank
        self.boot = uuid.uuid4().hex
        self.version = 0
        self.checkpoint = local_folder(vllm_config.model_config).resolve()
        checkpoint = Checkpoint.open(self.checkpoint)
        workshop = Workshop(vllm_config)
        self.atlas: Atlas = build_atlas(vllm_config, live, checkpoint, workshop)
        self._site_of = {target: site for site in self.atlas.sites.values() for target, _ in site.places()}
        self._derived_in = {
            closure.target(path): closure.name
            for closure in self.atlas.closures.values()
            for path in closure.kind.derived
        }
        self._rebuilder = Rebuilder(self.atlas, workshop, Shards(self.atlas, folder))
        self._touched = Touched()
        self._digests = Digests(self.atlas, workshop, self._touched)
        self._failpoints = Failpoints(rank)
        self._hands = Hands()
        self._room = Room()
        self._prepared: dict[str, Prepared] = {}
        self._past = Past(self._site_of)
        self._applied: Applied | None = None
        self._reading = threading.Lock()

    # -- phase one -----------------------------------------------------------------

    def prepare(self, request: PrepareRequest, main: MainThread) -> RankReport:
        """Everything that a commit needs, made ready while the engine serves.

        Raises ProblemError if the request cannot be carried out, or a commit came in between.
        """
        self._failpoints.reach("prepare")
        clock = self._touched.clock
        if request.base_version != self.version:
            raise ProblemError(Code.VERSION_MOVED, f"rank {self.rank} is at version {self.version}")
        started = time.perf_counter()
        ready = self._ready(request)
        made = self._restore(request.restore) if request.restore is not None else self._plan(request)
        require_equal(self.atlas, made.sites, made.moves)
        validated = time.perf_counter()
        spares = self._spares(made, main) if ready is None else ready
        moves = [*made.moves, *(move for spare in spares for move in spare.tensors)]
        prepared = Prepared(
            request.key,
            request.base_version,
            tuple(moves),
            None if request.replay else self._undo_of(moves, request.undo_most),
            tuple(spares),
            made.tensors,
            made.elements,
            None if request.replay else digest_of(moves),
        )
        main.check()
        # A commit that came and was undone leaves the version as it was, but part of it may have been read.
        if clock % 2 or self._touched.clock != clock:
            raise ProblemError(Code.VERSION_MOVED, f"rank {self.rank} was written meanwhile")
        self._prepared[request.key] = prepared
        return self._report(request.nonce, prepared, validate_ms=1e3 * (validated - started))

    def _ready(self, request: PrepareRequest) -> Sequence[Spare] | None:
        """What the last change has replaced, if just that is taken back; else it makes room for others."""
        ready = None
        if request.restore is not None:
            ready = self._past.spares(request.base_version, request.restore)
        if ready is None:
            self._past.make_room()
        return ready

    def _plan(self, request: PrepareRequest) -> Plan:
        self._room.require(values_nbytes(self.atlas, request.uploads), "What was uploaded")
        return plan(self.atlas, request.uploads)

    def _spares(self, made: Plan, main: MainThread) -> Sequence[Spare]:
        """What is made from the touched parameters, as it will be."""
        sites = list(made.sites.values())
        self._room.require(self._rebuilder.spare_nbytes(sites), "What is made anew")
        self._rebuilder.ensure_shards(sites, main)
        return self._rebuilder.spares(made.moves, sites, main)

    def _undo_of(self, moves: list[Move], most: int | None) -> tuple[Move, ...]:
        """What the moves will overwrite.

        Raises ProblemError before it takes any: `undo_budget` if that would be more than `most` bytes,
        `engine_memory` if more than there are.
        """
        needed = self._kept_nbytes(moves)
        if most is not None and needed > most:
            detail = f"{needed} bytes of undo are needed; there is room for {max(most, 0)}."
            raise ProblemError(Code.UNDO_BUDGET, detail)
        self._room.require(sum(move.nbytes for move in moves), "The undo")
        return taken(moves, self.atlas.targets)

    def _kept_nbytes(self, moves: Iterable[Move]) -> int:
        """Bytes of undo; what is derived counts with what is prepared."""
        return sum(move.held_nbytes for move in moves if move.target in self._site_of)

    def _restore(self, version: int) -> Plan:
        """The undo of every version after `version`, newest first, as one plan.

        Raises ProblemError if some of it is not held.
        """
        moves = self._past.back(self.version, version)
        sites: dict[str, Site] = {}
        for move in moves:
            site = self._site_of[move.target]
            sites[site.name] = site
        elements = sum(move.values.numel() for move in moves)
        return Plan(moves, sites, len({move.target for move in moves}), elements)

    def _report(self, nonce: str, prepared: Prepared, **figures: float) -> RankReport:
        return RankReport(
            nonce=nonce,
            rank=self.rank,
            boot=self.boot,
            ok=True,
            tensors=prepared.tensors,
            elements=prepared.elements,
            nbytes=prepared.nbytes,
            undo_nbytes=self._kept_nbytes(prepared.undo or ()),
            digest=prepared.digest,
            **figures,
        )

    # -- phase two -----------------------------------------------------------------

    def apply(self, request: CommitRequest) -> RankReport:
        """Move what was prepared; a failure is reverted here before it is reported.

        Raises ProblemError if there is nothing to apply, what went wrong if it was
        reverted, and StateUnknown if it could not be.
        """
        prepared = self._prepared.get(request.key)
        if prepared is None or prepared.base_version != self.version:
            raise ProblemError(Code.VERSION_MOVED, f"{request.key} is not prepared on version {self.version}")
        started = time.perf_counter()
        applied = Applied(prepared, self.atlas.targets, self._hands)
        with self._writing(prepared):
            try:
                with torch.no_grad():
                    applied.apply(self._failpoints)
                if prepared.undo is not None:
                    self._past.add(request.version, applied)
            except Exception:
                self._revert(applied)
                raise
            self.version = request.version
            self._applied = applied
        return self._report(request.nonce, prepared, apply_ms=1e3 * (time.perf_counter() - started))

    def undo(self, key: str) -> None:
        """Take back the commit of `key` if it is the last thing that was applied here.

        Raises StateUnknown if that fails.
        """
        applied = self._applied
        if applied is None or applied.prepared.key != key:
            return
        with self._writing(applied.prepared):
            self._revert(applied)
            self._past.take_back(self.version)
            self.version = applied.prepared.base_version
            self._applied = None

    def _revert(self, applied: Applied) -> None:
        try:
            with torch.no_grad():
                self._failpoints.reach("revert")
                applied.revert()
        except Exception as error:
            raise StateUnknown(f"rank {self.rank} could not put back its weights: {error}") from error

    @contextmanager
    def _writing(self, prepared: Prepared) -> Iterator[None]:
        """Readers see an odd clock while weights and version change; then digests of these are stale."""
        self._touched.clock += 1
        try:
            yield
        finally:
            landed()
            after = self._touched.clock + 1
            for move in prepared.moves:
                self._touched.storages[storage_of(self.atlas.targets[move.target])] = after
                # A handle's output also depends on what is patched beside it, such as a bias.
                for name in self._closures_of(move.target):
                    self._touched.closures[name] = after
            self._touched.clock = after

    def _closures_of(self, target: str) -> tuple[str, ...]:
        site = self._site_of.get(target)
        return site.closures if site is not None else (self._derived_in[target],)

    def drop(self, key: str) -> None:
        """Forget what `key` had prepared."""
        self._prepared.pop(key, None)

    def settle(self, key: str) -> None:
        """The commit of `key` has ended: forget what it had prepared, and how to take it back in place."""
        self.drop(key)
        if self._applied is not None and self._applied.prepared.key == key:
            self._applied = None

    def forget(self, versions: tuple[int, ...]) -> None:
        """Drop the undo of these versions."""
        self._past.forget(versions)

    # -- reading -------------------------------------------------------------------

    def state(self) -> RankState:
        """Versions and bytes held."""
        prepared = dict(self._prepared)  # jobs add to it in threads of their own
        undo = {str(version): nbytes for version, nbytes in self._past.nbytes().items()}
        return RankState(
            rank=self.rank,
            boot=self.boot,
            version=self.version,
            prepared=tuple(prepared),
            undo=undo,
            undo_nbytes=sum(undo.values()),
            prepared_nbytes=sum(one.held_nbytes for one in prepared.values()) + self._past.replaced_nbytes,
        )

    def digests(self, prefix: str, main: MainThread) -> tuple[int, RankDigests]:
        """Digests of one version.

        Raises ProblemError if commits keep coming in between.
        """
        with self._reading:
            version, tensors = self._of_one_version(lambda: self._digests.compute(prefix, main))
        return version, RankDigests(rank=self.rank, boot=self.boot, tensors=tensors)

    def read(self, request: ReadRequest, main: MainThread) -> ReadPart:
        """Write checkpoint tensors of one version to a file.

        Raises ProblemError if commits keep coming in between or a tensor is not held here.
        """
        wanted = request.tensors
        sites = [
            self.atlas.sites[region.parameter]
            for item in wanted
            for region in self.atlas.regions.get(item.tensor, ())
        ]
        packed = [site for site in sites if site.sharded and site.unsupported is None]
        self._rebuilder.ensure_shards(packed, main)
        version, (nbytes, held) = self._of_one_version(
            lambda: write_part(Path(request.path), self.atlas, wanted, request.metadata)
        )
        return ReadPart(version=version, nbytes=nbytes, held=held)

    def _of_one_version(self, look: Callable[[], T]) -> tuple[int, T]:
        """Look at the weights, again if they changed meanwhile; the version that was seen, and what.

        Raises ProblemError if commits keep coming in between.
        """
        for _ in range(_READ_ATTEMPTS):
            clock, version = self._quiet()
            seen = look()
            if clock == self._touched.clock:
                return version, seen
        raise ProblemError(Code.BUSY, "commits came faster than the weights could be read")

    def _quiet(self) -> tuple[int, int]:
        """Clock and version while no commit is under way that might still be undone.

        Raises ProblemError if it stays under way.
        """
        until = time.monotonic() + _QUIET_S
        while time.monotonic() < until:
            clock, version = self._touched.clock, self.version
            if clock % 2 == 0 and self._applied is None:
                return clock, version
            time.sleep(0.002)
        raise ProblemError(Code.BUSY, "a commit does not come to its end")
