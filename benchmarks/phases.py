"""Phase one of a commit, as a session does it for moves that need no rebuilding."""

from dataclasses import replace

from loaders.engine.atlas import Atlas
from loaders.engine.move import digest_of
from loaders.engine.planner import plan
from loaders.engine.prepared import Prepared, taken
from loaders.engine.ties import require_equal
from schemas.bridge import StagedUpload


def replayed(atlas: Atlas, uploads: tuple[StagedUpload, ...]) -> Prepared:
    """Moves that are ready, for an engine that serves nobody yet: no undo, no digest."""
    made = plan(atlas, uploads)
    require_equal(atlas, made.sites, made.moves)
    return Prepared("k", 0, tuple(made.moves), None, (), made.tensors, made.elements, None)


def prepared(atlas: Atlas, uploads: tuple[StagedUpload, ...]) -> Prepared:
    """Moves that are ready, with their digest; their undo is left to `with_undo`."""
    ready = replayed(atlas, uploads)
    return replace(ready, digest=digest_of(ready.moves))


def with_undo(atlas: Atlas, ready: Prepared) -> Prepared:
    """What the moves overwrite, taken."""
    return replace(ready, undo=taken(ready.moves, atlas.targets))
