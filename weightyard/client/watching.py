"""Watching a ref through a service: events say when to look; without them one looks by the clock.

What the ref means is asked each time, so an event that was lost, or told twice, does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from weightyard import jitter
from weightyard.client.connection import Connection
from weightyard.client.events import events
from weightyard.errors import Cancelled, Retryable, YardError
from weightyard.logs import Log
from weightyard.names import ModelName
from weightyard.records import Version
from weightyard.storage.cancel import Cancel
from weightyard.transfer.watching import Sighting, pause, sighted

_log = Log(__name__)

_LOOK_ANYWAY_S = 60.0
"""How often one looks without any event. A rebuilt registry numbers its events anew: a client that
resumes at an old id hears nothing."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


def watched(
    connection: Connection,
    model: ModelName,
    resolve: Callable[[], Version],
    poll_s: float,
    stop: Cancel,
) -> Iterator[Sighting]:
    """What a ref to a model means, whenever something happened to the model, until stopped.

    A stream that breaks off is resumed, after growing pauses; meanwhile, and where there is none,
    the service is asked by the clock.
    """
    last: int | None = None
    failures = 0
    listen_at = 0.0
    while not stop.is_cancelled:
        if time.monotonic() >= listen_at:
            look_at = 0.0
            try:
                for event in events(connection, last, stop):
                    failures = 0
                    last = last if event is None else event.id
                    if stop.is_cancelled:
                        return
                    if _concerns(event, model) or time.monotonic() >= look_at:
                        seen = sighted(resolve)
                        yield seen
                        if isinstance(seen, Retryable):
                            break  # to ask again soon: the next event may be far off
                        look_at = time.monotonic() + jitter.about(_LOOK_ANYWAY_S)
            except Cancelled:
                return
            except YardError as why:
                _log.info("events.not_heard", host=connection.host, reason=why)
            failures += 1
            listen_at = time.monotonic() + _pause_s(failures)
        yield sighted(resolve)
        pause(min(jitter.about(poll_s), max(0.0, listen_at - time.monotonic())), stop)


def _concerns(event: object, model: ModelName) -> bool:
    subject = getattr(event, "subject", "")
    return subject == str(model) or subject.startswith(f"{model}@")


def _pause_s(failures: int) -> float:
    return jitter.about(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10)))
