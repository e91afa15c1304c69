"""A yard behind a service, opened; and folders held against each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weightyard.service import sending
from weightyard.service.ranges import Span
from weightyard.yard import Yard

Opens = Callable[..., Yard]
"""Opens the world's yard by its service, as a writer; settings may be given."""


def same(one: Path, other: Path) -> bool:
    def content(folder: Path) -> dict[str, bytes]:
        found = (file for file in folder.rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in found}

    return content(one) == content(other)


def spoil_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the service send one wrong bit in each window of a file or block."""
    real = sending.FileBody._read

    def wrong(self: sending.FileBody, window: Span) -> memoryview:
        data = real(self, window)
        data[len(data) // 2] ^= 1
        return data

    monkeypatch.setattr(sending.FileBody, "_read", wrong)
