"""One request: what is sent, under which key, and what the answer is read as."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.remote.bodies import Body
from app.remote.errors import BadAnswer
from schemas.base import Output

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Output)
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True)
class ReadBack:
    """A safetensors file of weights as the engine had them at `version`."""

    version: int
    content: bytes


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, which may be sent several times: the key makes it one to the service."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    """Makes the result of a successful answer whose body was read."""
    query: Mapping[str, Any] = field(default_factory=dict)
    json: BaseModel | None = None
    body: Body | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def changes(self) -> bool:
        """Whether something is different afterwards, so that it matters if the answer is lost."""
        return self.method != "GET"

    def head(self) -> dict[str, str]:
        """The headers to send."""
        found = dict(self.headers)
        if self.changes:
            found["idempotency-key"] = self.key
        if self.json is not None:
            found |= {"content-type": "application/json", "content-length": str(len(self._text()))}
        elif self.body is not None:
            found |= {"content-type": SAFETENSORS, "content-length": str(self.body.nbytes)}
        else:
            found["content-length"] = "0"
        return found

    def content(self) -> Iterator[bytes]:
        """The body in pieces; what was not set in JSON is left to the service."""
        if self.body is not None:
            yield from self.body.chunks()
        elif self.json is not None:
            yield self._text()

    def _text(self) -> bytes:
        return self.json.model_dump_json(exclude_unset=True).encode() if self.json is not None else b""


def read_json(answer: type[Answer], response: httpx.Response) -> Answer:
    """An answer in JSON. Raises BadAnswer."""
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        raise BadAnswer(f"{response.request.url} does not answer as Graft does") from error


def read_weights(response: httpx.Response) -> ReadBack:
    """An answer with weights. Raises BadAnswer."""
    return ReadBack(version_of(response), response.content)


def version_of(response: httpx.Response) -> int:
    """The version that an answer is of, from its ETag. Raises BadAnswer."""
    tag = response.headers.get("etag", "").strip('"')
    if not tag.isdigit():
        raise BadAnswer(f"{response.request.url} does not answer as Graft does: no version in its ETag")
    return int(tag)


def length_of(response: httpx.Response) -> int | None:
    """Bytes of the answer's body, if it says so."""
    length = response.headers.get("content-length", "")
    return int(length) if length.isdigit() else None
