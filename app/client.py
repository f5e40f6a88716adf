"""The Python client: all that Graft does over HTTP, typed, for programs that wait and for `async` ones.

    with Client() as graft, graft.transaction(label="step 100") as change:
        change.put_expert(3, 7, {"w1.weight": w1, "w2.weight": w2, "w3.weight": w3})
        change.patch([Sparse("model.norm.weight", (576,), indices, values)])
    print(change.receipt.version)

Where a connection breaks, the request is sent again under a key by which the service knows it: nothing is
done twice. What Graft refuses is raised as `Refused` or one of its kinds; if the answer to a change is not to
be had, that is `AnswerLost`. Methods take and return what the functions of the same names in
`app.remote.calls` say; `events` has what happens as it happens. Needs httpx, httpx-sse, pydantic and
numpy; torch only if its tensors are sent.
"""

from app.remote.attempts import Retry
from app.remote.awaiting import AsyncClient, AsyncTransaction
from app.remote.bodies import Body
from app.remote.call import ReadBack
from app.remote.errors import (
    AnswerLost,
    BadAnswer,
    Conflict,
    GraftError,
    NotDone,
    Refused,
    StateUnknown,
    Unreachable,
)
from app.remote.events import Told
from app.remote.experts import split_experts
from app.remote.patches import Dense, Sparse, Weights, changes
from app.remote.tensors import Tensor
from app.remote.waiting import Client, Transaction

__all__ = [
    "AnswerLost",
    "AsyncClient",
    "AsyncTransaction",
    "BadAnswer",
    "Body",
    "Client",
    "Conflict",
    "Dense",
    "GraftError",
    "NotDone",
    "ReadBack",
    "Refused",
    "Retry",
    "Sparse",
    "StateUnknown",
    "Tensor",
    "Told",
    "Transaction",
    "Unreachable",
    "Weights",
    "changes",
    "split_experts",
]
