"""Folders on the server that requests may name: only below certain roots, links followed."""

from collections.abc import Iterable
from pathlib import Path

from schemas.problems import Code, ProblemError


class Roots:
    """Where paths of requests may lead; what is outside is refused without a word about what is there."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Blocking, as all methods: links are followed."""
        self._folders = tuple(folder.resolve() for folder in folders)

    @staticmethod
    def of(configured: tuple[Path, ...], served: Path) -> "Roots":
        """The configured ones; else the served model's own folder and the one that it is in."""
        return Roots(configured or (served, served.parent))

    def admit(self, given: str) -> Path:
        """The path that was given, links followed. Raises bad_value, path_not_allowed."""
        if not given.startswith("/") or "\0" in given:
            raise ProblemError(Code.BAD_VALUE, "path must be an absolute path on the server.")
        try:
            path = Path(given).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, links in a circle
            raise ProblemError(Code.BAD_VALUE, "path can't be followed.") from error
        if not self.hold(path):
            roots = [str(folder) for folder in self._folders]
            detail = f"path must be below {' or '.join(roots)}."
            raise ProblemError(Code.PATH_NOT_ALLOWED, detail, roots=roots)
        return path

    def hold(self, path: Path) -> bool:
        """Whether a path leads to one of the roots or below."""
        path = path.resolve()
        return any(path.is_relative_to(folder) for folder in self._folders)
