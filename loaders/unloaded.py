"""Unloaded tensors: in the checkpoint and on no rank, such as GPTQ's `g_idx` where groups are in order.

An upload may hold them as the checkpoint does, which changes nothing; so an expert, or a
file of the checkpoint, can be sent as it is.
"""

from collections.abc import Callable, Iterator, Sequence

from loaders.draft import Draft
from loaders.folder import CheckpointFolder
from loaders.refusal import Fault, fault, refuse_any
from loaders.values import opened, same_bytes
from schemas.problems import Code, ProblemError

Files = Callable[[], CheckpointFolder]
"""Gives the checkpoint as it lies on disk; blocking. Raises ProblemError if it can't be read."""


def no_files() -> CheckpointFolder:
    """Nothing to compare with. Raises `bad_checkpoint`."""
    raise ProblemError(Code.BAD_CHECKPOINT, "The engine's checkpoint is not at hand.")


def check_unloaded(descriptor: int, drafts: Sequence[Draft], files: Files) -> list[Draft]:
    """The drafts that the engine is to write. Blocking.

    Raises `tensor_unsupported` for those of unloaded tensors that are not whole, or not as in the checkpoint.
    """
    unloaded = [draft for draft in drafts if not draft.place.tensor.loaded]
    if unloaded:
        refuse_any(Code.TENSOR_UNSUPPORTED, _differing(descriptor, unloaded, files))
    return [draft for draft in drafts if draft.place.tensor.loaded]


def _differing(descriptor: int, drafts: Sequence[Draft], files: Files) -> Iterator[Fault]:
    try:
        folder = files()
    except ProblemError as error:
        yield from (_fault(draft, f"this can't be compared: {error.detail}") for draft in drafts)
        return
    for draft in drafts:
        if draft.indices is not None:
            yield _fault(draft, "it can be sent as a whole only")
        elif not _as_in(folder, descriptor, draft):
            yield _fault(draft, "these are other values")


def _as_in(folder: CheckpointFolder, descriptor: int, draft: Draft) -> bool:
    """Whether the files have the draft's bytes in its place."""
    values, tensor = draft.values, draft.place.tensor
    for shard in folder.shards:
        entry = shard.header.entries.get(tensor.name)
        if entry is not None and (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape):
            begin = entry.begin + (draft.place.expert or 0) * values.nbytes
            with opened(shard.path) as theirs:
                return same_bytes((descriptor, values.begin), (theirs, begin), values.nbytes)
    return False


def _fault(draft: Draft, why: str) -> Fault:
    name = draft.place.tensor.name
    detail = f"{name} is not loaded by the engine, and so has to be as in its checkpoint: {why}"
    return fault(draft.where, detail, reason=draft.place.tensor.reason)
