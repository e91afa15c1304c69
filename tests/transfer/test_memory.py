"""Buffers: memory of a writer that is used again."""

from __future__ import annotations

import weakref

import numpy as np

from weightyard.format.block import MIB
from weightyard.transfer.memory import Buffers, SpareMemory


def test_buffers_are_used_again_and_those_of_others_left_alone() -> None:
    buffers = Buffers()
    first, second = buffers.take(2 * MIB), buffers.take(2 * MIB)
    buffers.give(first)
    buffers.give(second)
    assert id(buffers.take(3 * MIB).obj) not in (id(first.obj), id(second.obj))
    again = buffers.take(MIB)
    assert again.obj is first.obj
    assert again.nbytes == MIB
    assert buffers.take(MIB).obj is not first.obj, "it is in use"
    theirs = np.zeros(2 * MIB, np.uint8)
    buffers.give(theirs.data)
    assert buffers.take(2 * MIB).obj is not theirs


def test_buffers_of_growing_length_take_each_others_place() -> None:
    buffers = Buffers()
    made = []
    for length in range(MIB, 3 * MIB, MIB // 8):
        buffer = buffers.take(length)
        made.append(weakref.ref(buffer.obj))
        buffers.give(buffer)
        del buffer
    assert [one() is not None for one in made] == [False] * 15 + [True]


def test_the_buffer_given_back_last_is_taken_first() -> None:
    buffers = Buffers()
    first, second = buffers.take(2 * MIB), buffers.take(2 * MIB)
    for _ in range(3):
        buffers.give(first)
        buffers.give(second)
        assert buffers.take(2 * MIB).obj is second.obj, "its pages were touched last"
        assert buffers.take(2 * MIB).obj is first.obj


def test_a_short_piece_does_not_hold_a_long_buffer() -> None:
    buffers = Buffers()
    long = buffers.take(16 * MIB)
    buffers.give(long)
    assert len(memoryview(buffers.take(3 * MIB).obj)) == 3 * MIB


def test_what_one_writer_leaves_is_the_next_ones_within_a_bound() -> None:
    spare = SpareMemory(3 * MIB)
    buffers = Buffers(spare)
    lent, first, second = (buffers.take(2 * MIB) for _ in range(3))
    for one in (first, second):
        buffers.give(one)
    buffers.leave()
    buffers.give(lent)  # too late: whoever failed may still be at it
    following = Buffers(spare)
    assert following.take(2 * MIB).obj is second.obj, "its pages were touched last"
    used = {id(one.obj) for one in (lent, first, second)}
    assert id(following.take(2 * MIB).obj) not in used
    assert id(buffers.take(2 * MIB).obj) not in used
