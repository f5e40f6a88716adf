"""Phase one of a commit, as a session does it for moves that need no rebuilding."""

from loaders.engine.atlas import Atlas
from loaders.engine.move import digest_of
from loaders.engine.planner import plan
from loaders.engine.prepared import Prepared
from loaders.engine.ties import require_equal
from schemas.bridge import StagedUpload


def prepared(atlas: Atlas, uploads: tuple[StagedUpload, ...]) -> Prepared:
    """Moves that are ready, with their digest."""
    made = plan(atlas, uploads)
    require_equal(atlas, made.sites, made.moves)
    return Prepared("k", 0, tuple(made.moves), (), made.tensors, made.elements, digest_of(made.moves))
