"""Threads of one program that share a yard: one has records written, another waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightyard.transfer.settling import Settling

LIMIT_S = 60.0


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
