"""Copies on an accelerator: which calls of torch they make, and in which order.

There is no accelerator here, so that torch's functions are replaced by ones that take what torch's
take, and note who called them. What they do to a device nothing here can show.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import create_autospec

import pytest
import torch

from weightyard.loader.ring import AcceleratorCopies

DEVICE = torch.device("cuda:1")
STREAM = torch.Stream
COPIES = 20


class Recorded:
    """What was called, in order; and what is current in each thread, as torch keeps it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        """The thread, and what it called."""
        self._current = threading.local()
        self.side = create_autospec(STREAM, instance=True)
        self.side.wait_stream.side_effect = lambda other: self._note(f"side waits for {other}")
        self.side.record_event.side_effect = self._mark
        self.side.synchronize.side_effect = lambda: self._note("side is done")
        streams = create_autospec(STREAM, return_value=self.side)
        monkeypatch.setattr(torch, "Stream", streams)
        for name, effect in (
            ("current_stream", self._current_stream),
            ("set_stream", self._set_stream),
            ("current_device_index", lambda: self._current.index),
            ("set_device_index", self._set_device_index),
        ):
            fake = create_autospec(getattr(torch.accelerator, name), side_effect=effect)
            monkeypatch.setattr(torch.accelerator, name, fake)
        self.copies = AcceleratorCopies(DEVICE)
        streams.assert_called_once_with(DEVICE)

    def begin(self) -> str:
        """Have a current stream and device in this thread, other ones than the copies'."""
        name = threading.current_thread().name
        self._current.stream = create_autospec(STREAM, instance=True)
        self._current.stream.__str__.return_value = f"stream of {name}"
        self._current.stream.wait_stream.side_effect = self._waited_for
        self._current.index = 0
        return name

    def tensor(self) -> torch.Tensor:
        made: torch.Tensor = create_autospec(torch.Tensor, instance=True)
        made.copy_.side_effect = self._copied  # type: ignore[attr-defined]
        return made

    @property
    def is_restored(self) -> bool:
        return self._current.stream is not self.side and self._current.index == 0

    def of(self, thread: str) -> list[str]:
        return [what for who, what in self.calls if who == thread]

    def _note(self, what: str) -> None:
        self.calls.append((threading.current_thread().name, what))

    def _current_stream(self, device: object = None) -> object:
        assert device == DEVICE
        return self._current.stream

    def _set_stream(self, stream: object) -> None:
        self._current.stream = stream
        self._current.index = DEVICE.index  # torch makes its device the current one, too
        self._note("set side" if stream is self.side else "set before")

    def _set_device_index(self, device: object) -> None:
        self._current.index = device
        self._note(f"set index {device}")

    def _copied(self, source: object, non_blocking: bool = False) -> None:
        assert non_blocking, "the host would wait for every copy"
        assert self._current.stream is self.side
        time.sleep(0.001)  # another thread may go on
        self._note("copy")

    def _mark(self, event: object = None) -> object:
        self._note("mark")
        return create_autospec(torch.Event, instance=True)

    def _waited_for(self, other: object) -> None:
        assert other is self.side
        self._note("waits for side")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


RUN = ["set side", "copy", "set before", "set index 0"]


def test_copies_follow_what_was_queued_before_and_go_before_what_is_queued_after(
    recorded: Recorded,
) -> None:
    name, copies = recorded.begin(), recorded.copies
    copies.follow()
    copies.copy(recorded.tensor(), torch.empty(3))
    mark = copies.mark()
    copies.hand_over()
    copies.finish()
    assert recorded.of(name) == [
        f"side waits for stream of {name}", *RUN, "mark", "waits for side", "side is done",
    ]  # fmt: skip
    assert recorded.is_restored
    mark.wait()
    mark._event.synchronize.assert_called_once_with()  # type: ignore[attr-defined]


def test_threads_copy_one_after_the_other_and_keep_their_own_stream(recorded: Recorded) -> None:
    both = threading.Barrier(2)

    def work() -> str:
        name, into = recorded.begin(), recorded.tensor()
        both.wait()
        for _ in range(COPIES):
            recorded.copies.copy(into, torch.empty(3))
            assert recorded.is_restored
        return name

    with ThreadPoolExecutor(2, "copier") as pool:
        names = [one.result() for one in [pool.submit(work), pool.submit(work)]]
    for name in names:
        assert recorded.of(name) == RUN * COPIES
    for begin in range(0, len(recorded.calls), len(RUN)):
        run = recorded.calls[begin : begin + len(RUN)]
        assert len({who for who, _ in run}) == 1, "another thread's calls came in between"


def test_work_that_fails_leaves_its_thread_as_it_was(recorded: Recorded) -> None:
    name = recorded.begin()

    def fail() -> None:
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        recorded.copies.run(fail)
    assert recorded.of(name) == ["set side", "set before", "set index 0"]
    assert recorded.is_restored
    recorded.copies.copy(recorded.tensor(), torch.empty(3))  # nothing is locked
    assert recorded.of(name)[3:] == RUN
