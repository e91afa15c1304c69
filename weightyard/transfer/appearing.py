"""Appearing: a file that gets its name once it is whole and durable, never over another."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightyard.errors import Conflict
from weightyard.storage.final_name import move_to_final_name, sync
from weightyard.transfer.source import translated


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """An empty file to fill under another name; it becomes `target` when the context is left.

    After an error nothing is left of it. Raises Conflict if `target` is there before or after;
    NotAllowed, StoreFull, NoSuchThing, and Unsupported where no way of naming it is safe.
    """
    with translated(target):
        if target.exists() or target.is_symlink():
            raise _there_already(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{secrets.token_hex(8)}.partial")
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield partial
        with translated(target):
            sync(partial)
            try:
                move_to_final_name(partial, target)
            except FileExistsError:
                raise _there_already(target) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _there_already(target: Path) -> Conflict:
    return Conflict(f"{target} is there already: move it away, or choose another folder")
