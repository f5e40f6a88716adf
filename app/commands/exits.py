"""How commands end: one status per kind of trouble, so that scripts can tell them apart."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of the `graft` command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    CONFLICT = 5
    NOT_DONE = 6
    UNKNOWN = 7
    NOTHING = 8
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "a file, a checkpoint, the start of a service or something else on this machine failed",
    Exit.USAGE: "wrong usage; after `probe`: something that the engine loads can't be updated",
    Exit.UNREACHABLE: "no Graft answers at the address",
    Exit.REFUSED: "what was asked for or sent is wrong, or not allowed",
    Exit.CONFLICT: "the version has moved on, another change is under way, or what was named has ended",
    Exit.NOT_DONE: "the engine or the service could not do it; all is undone and the old weights serve",
    Exit.UNKNOWN: "nobody knows whether the change was made: see `graft status` and `graft versions`",
    Exit.NOTHING: "there is no difference to push",
    Exit.INTERRUPTED: "interrupted",
}


def epilog() -> str:
    """All of them for --help; blank lines keep them apart."""
    return "Exit status:\n\n" + "\n\n".join(f"{status:d}  {text}" for status, text in MEANINGS.items())
