"""Operations that are followed to their end."""

from app.remote.errors import AnswerLost, Conflict, GraftError, refusal
from schemas.operations import Operation, OperationState
from schemas.problems import STATUS, Code

POLL_S = 0.5


def running(operation: Operation) -> bool:
    """Whether it is worth asking again."""
    return operation.state is OperationState.RUNNING


def ended(operation: Operation) -> Operation:
    """An operation that is done or was cancelled. Raises the Refused for which it has failed."""
    if operation.problem is not None:
        raise refusal(operation.problem.status, operation.problem.model_dump(mode="json"))
    if operation.state is OperationState.INTERRUPTED:
        status, title = STATUS[Code.INTERRUPTED]
        raise Conflict(status, {"code": Code.INTERRUPTED, "title": title, "detail": f"{title}."})
    return operation


def unfollowed(operation: Operation, why: GraftError) -> AnswerLost:
    """An operation of which nobody can be asked any more; it goes on, or has ended, without us."""
    return AnswerLost(f"operation {operation.id} can't be followed any more: {why}", operation.id)
