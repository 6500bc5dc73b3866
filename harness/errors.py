"""A run that did not end well, and errors as one line."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A measured run did not end well.

    ``cause`` is the one-line reason, ``detail`` the traceback if there is one, ``status`` failed, timeout or
    interrupted.
    """

    def __init__(self, cause: str, detail: str | None = None, status: str = "failed") -> None:
        super().__init__(cause)
        self.cause = cause
        self.detail = detail
        self.status = status


def one_line(error: BaseException) -> str:
    """``Type: message`` without line breaks; the type is left out for ValueErrors, whose text says it all."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
