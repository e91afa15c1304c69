"""Files that are pulled get their names when they are whole, wherever they are put."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weightyard.errors import Conflict
from weightyard.transfer.appearing import appearing


@pytest.fixture(params=["hard links", "no hard links"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not there yet; also as on exFAT and on some network shares."""

    def refuse(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", refuse)
    return tmp_path / "folder" / "file"


def test_a_file_appears_whole_and_alone(target: Path) -> None:
    with appearing(target) as partial:
        partial.write_bytes(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]


def test_after_an_error_nothing_is_left(target: Path) -> None:
    def fail() -> None:
        with appearing(target) as partial:
            partial.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(target.parent) == []


def test_a_file_that_came_meanwhile_is_not_overwritten(target: Path) -> None:
    def be_late() -> None:
        with appearing(target):
            target.write_bytes(b"theirs")

    with pytest.raises(Conflict, match="there already"):
        be_late()
    assert target.read_bytes() == b"theirs"
    assert os.listdir(target.parent) == ["file"]
