"""How a body from outside is quoted and its faults are listed in a refusal: bounded, whatever was sent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from schemas.model import CheckpointTensor, Treatment
from schemas.problems import Code, ProblemError

Fault = dict[str, Any]
"""`name` (where it is), `detail` (a sentence about it) and members that depend on the code."""
LISTED = 20
"""Faults that one refusal lists; the others are counted."""


def clip(name: str) -> str:
    """A name from a body as answers repeat it: bounded."""
    return name if len(name) <= 200 else name[:199] + "…"


def shown(name: str) -> str:
    """A name from a body as error texts quote it: bounded, on one line."""
    return repr(clip(name))


def fault(name: str, detail: str, **members: Any) -> Fault:
    """One fault of the tensor or patch `name`."""
    return {"name": clip(name), "detail": detail, **members}


def fixed(name: str, tensor: CheckpointTensor) -> Iterator[Fault]:
    """The fault of a tensor that the engine has and cannot update, if it is one."""
    if tensor.treatment is Treatment.UNSUPPORTED and tensor.loaded:
        reason = tensor.reason or "the engine gives no reason"
        yield fault(name, f"{tensor.name} cannot be updated: {reason}", reason=reason)


def listed(code: Code, faults: Sequence[Fault], count: int | None = None) -> ProblemError:
    """A refusal for `count` faults (default: all given) of which the first are listed."""
    count = len(faults) if count is None else count
    more = f" (and {count - 1} more)" if count > 1 else ""
    return ProblemError(code, faults[0]["detail"] + more, errors=list(faults[:LISTED]), count=count)


def refuse_any(code: Code, faults: Iterable[Fault]) -> None:
    """Raises a refusal with `code` if there is any fault."""
    faults = iter(faults)
    first = list(islice(faults, LISTED))
    if first:
        raise listed(code, first, len(first) + sum(1 for _ in faults))


def unknown_names(names: Sequence[str], nearest: Callable[[str], list[str]]) -> ProblemError:
    """A refusal that lists names which are not known, each with known ones like it."""
    return listed(Code.UNKNOWN_TENSOR, [_unknown(name, nearest(name)) for name in names[:LISTED]], len(names))


def _unknown(name: str, nearest: list[str]) -> Fault:
    like = f"; the nearest known names are {', '.join(nearest)}" if nearest else ""
    return fault(name, f"{shown(name)} is not known{like}", nearest=nearest)
