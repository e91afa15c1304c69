"""An upload kept alive while the work under it goes on, and abandoned if the work fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from weightyard.errors import UploadExpired, YardError
from weightyard.logs import Log
from weightyard.transfer.catalogue import Upload

_log = Log(__name__)

_Upload = TypeVar("_Upload", bound=Upload)

HEARTBEAT_S = 60.0


@contextmanager
def kept_alive(upload: _Upload) -> Iterator[_Upload]:
    """The upload, with a heartbeat behind it."""
    done = threading.Event()
    beats = threading.Thread(
        target=_beat, args=(upload, done), name="weightyard-heartbeat", daemon=True
    )
    beats.start()
    try:
        yield upload
    except BaseException:
        _abandon(upload)
        raise
    finally:
        done.set()
        beats.join()


def _beat(upload: Upload, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_S):
        try:
            upload.heartbeat()
        except UploadExpired as why:
            _log.warning("upload.expired", upload=upload.id, reason=why)
            return  # the writer is told by its next call
        except YardError as why:
            _log.warning("upload.heartbeat_failed", upload=upload.id, reason=why)


def _abandon(upload: Upload) -> None:
    try:
        upload.abandon()
    except YardError as why:  # what the work failed of matters more; the lease will end
        _log.warning("upload.not_abandoned", upload=upload.id, reason=why)
