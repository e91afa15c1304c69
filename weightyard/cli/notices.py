"""Notices: log lines that a user of a command should see, most kinds of event once."""

from __future__ import annotations

import logging
import sys

from weightyard.cli.tables import clean

_SENTENCES = {
    "service.tried_again": "{reason}: trying again",
    "store.retried": "{reason}: trying again",
    "file.kept_plain": "{path} is kept as plain bytes, without tensors: {reason}",
    "bytes.through_service": "bytes go through the service: {store} is not used ({reason})",
    "yard.unavailable": "{reason}: going on with what this node last knew",
}
"""Sentences for the most common events. Others are shown as logged, to be looked up by event."""

_OF_EACH_FILE = frozenset(("file.kept_plain",))
"""Events that are shown for every file: each file has its own reason, and is mended by itself."""

_RESULTS = frozenset(("check.found",))
"""Events that are not shown, as a command's result has them anyway."""


class Notices(logging.Handler):
    """Shows log lines on stderr. Of most kinds the first: thirty retries are one notice."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set(_RESULTS)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        event = line.partition(" ")[0]
        told = line if event in _OF_EACH_FILE else event
        if told not in self._seen:
            self._seen.add(told)
            if (sentence := _SENTENCES.get(event)) is not None:
                line = " ".join(sentence.format_map(record.__dict__["fields"]).split())
            sys.stderr.write(f"weightyard: {clean(line)}\n")


def show_notices(*, wanted: bool) -> None:
    """Send the package's log lines to stderr for this process, or nowhere."""
    logger = logging.getLogger("weightyard")
    logger.handlers = [Notices() if wanted else logging.NullHandler()]
    logger.propagate = False
