"""Log lines: one event name plus fields, such as `store.retried call=publish attempt=2`."""

from __future__ import annotations

import logging


class Log:
    """A logger that takes an event and its fields. Never give it a token or a whole header."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def _log(self, level: int, event: str, given: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            # As text: a handler that keeps records must not keep errors, and all they refer to.
            fields = {key: str(value) for key, value in given.items()}
            line = " ".join([event, *map(_field, fields.items())])
            self._logger.log(level, "%s", line, extra={"event": event, "fields": fields})


def _field(item: tuple[str, str]) -> str:
    key, text = item
    return f"{key}={text!a}" if any(ch.isspace() for ch in text) or not text else f"{key}={text}"
