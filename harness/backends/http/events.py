"""Server-sent events from bytes, however the network cut them (HTML standard, section 9.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its type ("" if none was stated) and its data."""

    kind: str
    data: str


class EventParser:
    """Turns a stream of bytes into events; comments (keep-alives) and unknown fields are passed over."""

    def __init__(self) -> None:
        self._pending = b""
        self._kind = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that ``data`` completes."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        events = []
        for line in lines:
            if (event := self._take(line.rstrip(b"\r"))) is not None:
                events.append(event)
        return events

    def close(self) -> list[ServerEvent]:
        """An event whose closing blank line never came; the stream is over."""
        last = [self._take(self._pending.rstrip(b"\r")), self._take(b"")]
        self._pending = b""
        return [event for event in last if event is not None]

    def _take(self, line: bytes) -> ServerEvent | None:
        if not line:
            if not self._data:
                self._kind = ""
                return None
            event = ServerEvent(self._kind, "\n".join(self._data))
            self._kind, self._data = "", []
            return event
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", errors="replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._kind = text
        return None
