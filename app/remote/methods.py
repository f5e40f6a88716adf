"""Methods made of calls: each request is described once, for clients that wait and those that do not."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from app.remote.call import Call

P = ParamSpec("P")
T = TypeVar("T")


class Sender(Protocol):
    """What has such methods: a client, or a transaction of one."""

    def _call(self, describe: Callable[..., Call[Any]], *args: Any, **options: Any) -> Any:
        """Send what `describe` describes."""


class Method(Generic[P, T]):
    """Sends a call and returns what comes back."""

    def __init__(self, describe: Callable[..., Call[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    def __get__(self, sender: Sender, owner: type) -> Callable[P, T]:
        return cast(Callable[P, T], _bound(self._describe, sender))


class AsyncMethod(Generic[P, T]):
    """Sends a call; what comes back has to be awaited."""

    def __init__(self, describe: Callable[..., Call[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    def __get__(self, sender: Sender, owner: type) -> Callable[P, Awaitable[T]]:
        return cast(Callable[P, Awaitable[T]], _bound(self._describe, sender))


def method(describe: Callable[P, Call[T]]) -> Method[P, T]:
    """A method with the parameters of `describe`."""
    return Method(describe)


def async_method(describe: Callable[P, Call[T]]) -> AsyncMethod[P, T]:
    """The same, to be awaited."""
    return AsyncMethod(describe)


def method_of_id(describe: Callable[Concatenate[str, P], Call[T]]) -> Method[P, T]:
    """A method with the parameters of `describe` after the first, an id that the sender adds."""
    return Method(describe)


def async_method_of_id(describe: Callable[Concatenate[str, P], Call[T]]) -> AsyncMethod[P, T]:
    """The same, to be awaited."""
    return AsyncMethod(describe)


def _bound(describe: Callable[..., Call[Any]], sender: Sender | None) -> Callable[..., Any]:
    """The method of one sender; of none, as when documentation is made, the description itself."""
    if sender is None:
        return describe

    @wraps(describe)
    def send(*args: Any, **options: Any) -> Any:
        return sender._call(describe, *args, **options)

    return send
