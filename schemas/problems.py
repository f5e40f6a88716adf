"""Everything that Graft refuses: one table of stable codes, and RFC 9457 problem documents.

Every refusal in the code base is a `ProblemError` with one of these codes; the
admin turns it into a response in one place. Texts never echo bytes of a body.
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class Code(StrEnum):
    """Stable machine-readable reason of a refusal."""

    # what was sent
    BAD_REQUEST = "bad_request"
    BAD_JSON = "bad_json"
    BAD_VALUE = "bad_value"
    BODY_EMPTY = "body_empty"
    BODY_TOO_LARGE = "body_too_large"
    BODY_LENGTH = "body_length"
    BODY_DIGEST = "body_digest"
    BODY_TIMEOUT = "body_timeout"
    HEAD_TOO_LARGE = "head_too_large"
    CONTENT_TYPE = "content_type"
    CONTENT_ENCODING = "content_encoding"
    HEADER_LENGTH = "header_length"
    HEADER_JSON = "header_json"
    HEADER_ENTRY = "header_entry"
    HEADER_DUPLICATE = "header_duplicate"
    HEADER_METADATA = "header_metadata"
    HEADER_OFFSETS = "header_offsets"
    UNKNOWN_DTYPE = "unknown_dtype"
    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    DUPLICATE_TENSOR = "duplicate_tensor"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    BAD_PATCH = "bad_patch"
    BAD_INDEX = "bad_index"
    NONFINITE = "nonfinite"
    NOTHING_TO_APPLY = "nothing_to_apply"
    TENSOR_UNSUPPORTED = "tensor_unsupported"
    TIED_TENSOR = "tied_tensor"
    # who sent it
    UNAUTHORIZED = "unauthorized"
    BAD_HOST = "bad_host"
    BAD_ORIGIN = "bad_origin"
    # what it names
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNKNOWN_TRANSACTION = "unknown_transaction"
    UNKNOWN_EXPERT = "unknown_expert"
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_BASELINE = "unknown_baseline"
    UNKNOWN_OPERATION = "unknown_operation"
    PATH_NOT_ALLOWED = "path_not_allowed"
    BAD_CHECKPOINT = "bad_checkpoint"
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    # when it was sent
    BUSY = "busy"
    IN_PROGRESS = "in_progress"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    TRANSACTION_STATE = "transaction_state"
    TRANSACTION_EXPIRED = "transaction_expired"
    INTERRUPTED = "interrupted"
    VERSION_MOVED = "version_moved"
    PRECONDITION_FAILED = "precondition_failed"
    VERSION_NOT_HELD = "version_not_held"
    CLIENT_GONE = "client_gone"
    STATE_IN_USE = "state_in_use"
    PATH_TAKEN = "path_taken"
    OPERATION_STATE = "operation_state"
    DRAFT_MODEL = "draft_model"
    ENGINE_ASLEEP = "engine_asleep"
    DRAIN_TIMEOUT = "drain_timeout"
    # what there is no room for
    STAGED_BUDGET = "staged_budget"
    UNDO_BUDGET = "undo_budget"
    BLOB_BUDGET = "blob_budget"
    DISK_FULL = "disk_full"
    ENGINE_MEMORY = "engine_memory"
    # what the engine did
    NOT_SUPPORTED = "not_supported"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    RECOVERING = "recovering"
    PREPARE_FAILED = "prepare_failed"
    COMMIT_UNDONE = "commit_undone"
    STATE_UNKNOWN = "state_unknown"
    BASE_CHANGED = "base_changed"
    LEDGER_DAMAGED = "ledger_damaged"
    VERSION_LOST = "version_lost"
    TOO_MANY_READERS = "too_many_readers"
    INTERNAL = "internal"


STATUS: dict[Code, tuple[int, str]] = {
    Code.BAD_REQUEST: (400, "The request is malformed"),
    Code.BAD_JSON: (400, "The body is not JSON"),
    Code.BAD_VALUE: (422, "A value has the wrong form"),
    Code.BODY_EMPTY: (400, "The body is empty"),
    Code.BODY_TOO_LARGE: (413, "The body is larger than allowed"),
    Code.BODY_LENGTH: (400, "The body does not have the length that was announced"),
    Code.BODY_DIGEST: (400, "The body does not have the digest that was announced"),
    Code.BODY_TIMEOUT: (408, "The body did not arrive in time"),
    Code.HEAD_TOO_LARGE: (431, "The request's headers are larger than allowed"),
    Code.CONTENT_TYPE: (415, "The content type is not accepted here"),
    Code.CONTENT_ENCODING: (415, "Content encodings are not accepted"),
    Code.HEADER_LENGTH: (422, "The safetensors header length is wrong"),
    Code.HEADER_JSON: (422, "The safetensors header is not a JSON object"),
    Code.HEADER_ENTRY: (422, "A safetensors header entry is malformed"),
    Code.HEADER_DUPLICATE: (422, "The safetensors header names a key twice"),
    Code.HEADER_METADATA: (422, "The safetensors metadata is malformed"),
    Code.HEADER_OFFSETS: (422, "The safetensors data offsets do not tile the data"),
    Code.UNKNOWN_DTYPE: (422, "A dtype is not known"),
    Code.UNKNOWN_TENSOR: (422, "A tensor name is not known"),
    Code.MISSING_TENSOR: (422, "A tensor is missing"),
    Code.DUPLICATE_TENSOR: (422, "A tensor is named twice"),
    Code.WRONG_SHAPE: (422, "A tensor has the wrong shape"),
    Code.WRONG_DTYPE: (422, "A tensor has the wrong dtype"),
    Code.BAD_PATCH: (422, "A patch is malformed"),
    Code.BAD_INDEX: (422, "A patch index is negative, out of range or repeated"),
    Code.NONFINITE: (422, "A value is NaN or infinite"),
    Code.NOTHING_TO_APPLY: (422, "There is nothing to apply"),
    Code.TENSOR_UNSUPPORTED: (422, "A tensor cannot be updated on this engine"),
    Code.TIED_TENSOR: (422, "Tied tensors would differ"),
    Code.UNAUTHORIZED: (401, "A bearer token is needed"),
    Code.BAD_HOST: (421, "The Host header names another host"),
    Code.BAD_ORIGIN: (403, "Requests from web pages are refused"),
    Code.NOT_FOUND: (404, "There is no such path"),
    Code.METHOD_NOT_ALLOWED: (405, "The method is not allowed here"),
    Code.UNKNOWN_TRANSACTION: (404, "There is no such transaction"),
    Code.UNKNOWN_EXPERT: (404, "There is no such expert"),
    Code.UNKNOWN_VERSION: (404, "There is no such version"),
    Code.UNKNOWN_BASELINE: (404, "There is no such baseline"),
    Code.UNKNOWN_OPERATION: (404, "There is no such operation"),
    Code.PATH_NOT_ALLOWED: (403, "That path on the server is not allowed"),
    Code.BAD_CHECKPOINT: (422, "The folder is not a readable checkpoint"),
    Code.CHECKPOINT_MISMATCH: (422, "The checkpoint is of another model"),
    Code.BUSY: (409, "Another commit or rollback is under way"),
    Code.IN_PROGRESS: (409, "The first request with this idempotency key still runs"),
    Code.IDEMPOTENCY_MISMATCH: (422, "The idempotency key was used for another request"),
    Code.TRANSACTION_STATE: (409, "The transaction is not in a state that allows this"),
    Code.TRANSACTION_EXPIRED: (410, "The transaction has expired"),
    Code.INTERRUPTED: (410, "A restart of the service ended it"),
    Code.VERSION_MOVED: (409, "The version has moved on"),
    Code.PRECONDITION_FAILED: (412, "If-Match does not name the current version"),
    Code.VERSION_NOT_HELD: (409, "What rolling back to that version needs is no longer held"),
    Code.CLIENT_GONE: (400, "The client went away before the body was complete"),
    Code.STATE_IN_USE: (409, "Another admin process uses this state folder"),
    Code.PATH_TAKEN: (409, "There is something at that path already"),
    Code.OPERATION_STATE: (409, "The operation can't be cancelled"),
    Code.DRAFT_MODEL: (409, "The engine has a draft model, which would keep its weights"),
    Code.ENGINE_ASLEEP: (409, "The engine sleeps or is paused"),
    Code.DRAIN_TIMEOUT: (503, "Running requests did not end in time"),
    Code.STAGED_BUDGET: (507, "The budget for staged bytes is used up"),
    Code.UNDO_BUDGET: (507, "The budget for undo bytes is used up"),
    Code.BLOB_BUDGET: (507, "The budget for the uploads of committed versions is used up"),
    Code.DISK_FULL: (507, "The disk is full"),
    Code.ENGINE_MEMORY: (507, "The engine's machine has too little memory for this"),
    Code.NOT_SUPPORTED: (422, "This is not supported"),
    Code.ENGINE_UNAVAILABLE: (503, "The engine does not answer"),
    Code.RECOVERING: (503, "The engine is being brought to the current version"),
    Code.PREPARE_FAILED: (503, "The engine could not prepare the transaction"),
    Code.COMMIT_UNDONE: (503, "The commit failed and was undone"),
    Code.STATE_UNKNOWN: (500, "The state of the engine's weights is unknown"),
    Code.BASE_CHANGED: (503, "The base checkpoint is not the one that the history began with"),
    Code.LEDGER_DAMAGED: (503, "What the service keeps on disk is damaged"),
    Code.VERSION_LOST: (503, "The current version can't be brought back"),
    Code.TOO_MANY_READERS: (429, "Too many streams of events are open"),
    Code.INTERNAL: (500, "Graft failed"),
}
"""HTTP status and title of every code."""


class Problem(BaseModel):
    """An RFC 9457 problem document (`application/problem+json`).

    `errors`, `ranks` and other members beside the standard ones depend on the code.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    code: Code


class ProblemError(Exception):
    """A refusal. `members` go into the problem document beside the standard ones."""

    def __init__(self, code: Code, detail: str, **members: Any) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.members = members

    def problem(self) -> Problem:
        """The document to answer with."""
        status, title = STATUS[self.code]
        return Problem(
            type=f"urn:graft:problem:{self.code}",
            title=title,
            status=status,
            detail=self.detail,
            code=self.code,
            **self.members,
        )
