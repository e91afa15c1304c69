"""Records are written behind what they tell of, once, and before a yard is closed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightyard.errors import StoreUnavailable
from weightyard.names import ModelName
from weightyard.opening import open_yard
from weightyard.registry import outbox
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.transfer.settling import Settling

LIMIT_S = 60
BERT = ModelName("team", "bert")


class Slow:
    """Something to write that takes until it is let go."""

    def __init__(self) -> None:
        self.times = 0
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self) -> None:
        self.began.release()
        assert self.may_end.acquire(timeout=LIMIT_S)
        self.times += 1


def test_nobody_waits_for_records_until_it_is_closed() -> None:
    slow = Slow()
    settling = Settling(slow)
    settling.soon()
    assert slow.began.acquire(timeout=LIMIT_S)
    assert not settling.wait(0.01)
    slow.may_end.release()
    settling.close()
    assert slow.times == 1


def test_what_is_done_while_records_are_written_is_written_too() -> None:
    slow = Slow()
    with Settling(slow) as settling:
        settling.soon()
        assert slow.began.acquire(timeout=LIMIT_S)
        for _ in range(5):
            settling.soon()  # the write under way may have looked before
        slow.may_end.release(2)
    assert slow.times == 2, "once more for all five"


def test_records_that_cannot_be_written_wait_and_later_ones_are_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def write() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise StoreUnavailable("the NameNode is away")

    settling = Settling(write)
    with caplog.at_level(logging.WARNING):
        settling.soon()
        assert settling.wait(LIMIT_S)
    assert "yard.records_wait" in caplog.text
    settling.soon()
    settling.close()
    assert len(tries) == 2


def test_records_are_waited_for_although_the_thread_that_writes_them_has_only_been_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_made, may_begin, written = threading.Event(), threading.Event(), threading.Event()

    class Late(threading.Thread):
        """Made, and not begun for a while: as on a machine with other things to do."""

        def start(self) -> None:
            if self.name == "weightyard-records":
                is_made.set()
                assert may_begin.wait(LIMIT_S)
            super().start()

    settling = Settling(written.set)
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(threading, "Thread", Late)
        asking = pool.submit(settling.soon)
        assert is_made.wait(LIMIT_S)
        waiting = pool.submit(settling.wait)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        may_begin.set()
        asking.result(LIMIT_S)
        assert waiting.result(LIMIT_S)
    assert written.is_set()


def test_a_closed_yard_has_its_records_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("weights")
    with open_yard(str(tmp_path / "yard")) as yard:
        yard.push(tmp_path / "model", "team/bert")
        yard.set_alias("team/bert", "prod", 1)
    store = LocalStore(tmp_path / "yard")
    assert store.stat(layout.record(BERT, 1)).length
    with open_yard(str(tmp_path / "yard")) as yard:
        assert outbox.waiting(yard.registry.database) == 0


def test_a_program_that_ends_without_closing_its_yard_leaves_its_records(tmp_path: Path) -> None:
    program = """
import sys, weightyard
yard = weightyard.open(sys.argv[1])
yard.push(sys.argv[2], "team/bert")
"""
    (tmp_path / "notes.txt").write_text("weights")
    where = [str(tmp_path / "yard"), str(tmp_path / "notes.txt")]
    subprocess.run([sys.executable, "-c", program, *where], check=True, timeout=LIMIT_S)
    assert LocalStore(tmp_path / "yard").stat(layout.record(BERT, 1)).length
