"""What workers answer to the bridge: one envelope for every call, never an exception.

With several ranks, an exception on one leaves the replies of the others in vLLM's
queues, and every later call gets the previous answer (seen on vLLM 0.32.0). So a
worker always returns, and repeats the caller's nonce.
"""

import logging
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from schemas.bridge import RankError
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)


class Answer(BaseModel):
    """One rank's answer. `pending` means: poll again, soon if it was `served`."""

    model_config = ConfigDict(frozen=True)

    nonce: str
    rank: int
    boot: str
    value: JsonValue = None
    error: RankError | None = None
    pending: bool = False
    served: bool = False


def as_error(error: Exception) -> RankError:
    """What a worker's exception becomes in an answer."""
    if isinstance(error, ProblemError):
        return RankError(code=error.code, detail=error.detail)
    _log.error("%s: %s", type(error).__name__, error, exc_info=error)
    return RankError(code=Code.INTERNAL, detail=f"{type(error).__name__}: {error}")


def guarded(function: Callable[[], Any]) -> tuple[Any, RankError | None]:
    """Call `function`; its value, or what it raised as an error."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - nothing may leave an RPC as an exception
        return None, as_error(error)
