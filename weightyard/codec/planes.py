"""Floats as byte planes: equal parts of neighbouring elements put side by side (docs/format.md §3).

The exponents of weights take few values and shrink to a third; signs and mantissas are noise. An
element's top 16 bits are first rotated so that the exponent is not mixed with the sign: with m
mantissa bits among them, sign and exponent `s e…e` become `e…e s`. Then byte 0 of every element,
most significant first, is plane 0, byte 1 is plane 1, and so on.

Compiled code, if the package has it (compiled.py), does it in one pass. Everything else here is
NumPy, a few passes over a whole chunk or half of one. Casts between neighbouring widths and shifts
run in vector registers, several bytes a cycle, while a strided copy moves one element a cycle.
Passes over smaller pieces would cost more in calls than caches save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightyard.codec import compiled
from weightyard.codec.arena import Arena, Bytes, Words
from weightyard.format.block import Codec

Plane = Bytes | int
"""The bytes of a plane, or the one value all of them have."""

_HALF = {2: "<u1", 4: "<u2", 8: "<u4"}

_MERGED_AT_ONCE = 1 << 18
"""So many elements, the planes they are merged from and scratch memory fit a core's own cache."""

_FP64_MANTISSA_BITS = 4
"""Mantissa bits among the top 16 of an fp64. (bf16 and fp32 have 7: whole bytes, done apart.)"""


def split(codec: Codec, raw: Bytes, planes: Sequence[Bytes], arena: Arena) -> None:
    """Fill the planes, most significant first, from the elements in `raw`."""
    if compiled.split(codec, raw, planes):
        return
    words = raw.view(f"<u{codec.planes}")
    match codec:
        case Codec.PLANES_BF16:
            _split_bf16(words, planes, arena)
        case Codec.PLANES_FP32:
            high, low = _halves(words, arena)
            _split_bf16(high, planes[:2], arena)
            _split_bytes(low, planes[2:], arena)
        case Codec.PLANES_FP64:
            high, low = _halves(words, arena)
            top, rest = _halves(high, arena)
            _split_bytes(_rotated(top, _FP64_MANTISSA_BITS, arena), planes[:2], arena)
            _split_bytes(rest, planes[2:4], arena)
            _split_bytes(low, planes[4:], arena)
        case _:
            _split_bytes(words, planes, arena)


def merge(codec: Codec, planes: Sequence[Plane], raw: Bytes, arena: Arena) -> None:
    """Fill `raw` with the elements of these planes: the inverse of `split`."""
    bytes_of = [plane for plane in planes if not isinstance(plane, int)]
    if len(bytes_of) == len(planes) and compiled.merge(codec, bytes_of, raw):
        return
    words = raw.view(f"<u{codec.planes}")
    match codec:
        case Codec.PLANES_BF16:
            merged = _merge_bf16(planes[0], planes[1], words, arena)
        case Codec.PLANES_FP32:
            half = arena.take(words.size, "<u2")
            high = _merge_bf16(planes[0], planes[1], half, arena)
            merged = _join(high, _merge_bytes(planes[2:], "<u2", words.size, arena), words)
        case Codec.PLANES_FP64:
            top = _merge_bytes(planes[:2], "<u2", words.size, arena)
            top = _rotated_back(top, _FP64_MANTISSA_BITS, arena)
            rest = _merge_bytes(planes[2:4], "<u2", words.size, arena)
            high = _join(top, rest, arena.take(words.size, "<u4"))
            merged = _join(high, _merge_bytes(planes[4:], "<u4", words.size, arena), words)
        case _:
            merged = _join(planes[0], planes[1], words)
    if isinstance(merged, int):
        words.fill(merged)


def _halves(words: Words, arena: Arena) -> tuple[Words, Words]:
    """The upper and the lower half of every word."""
    half = _HALF[words.itemsize]
    high, low = arena.take(words.size, half), arena.take(words.size, half)
    _cut_high(words, high)
    np.copyto(low, words, casting="unsafe")
    return high, low


def _cut_high(words: Words, high: Words) -> None:
    """The upper half of every word, without a shift.

    Words read from half a word further on have it as their lower half, which is what a cast takes.
    """
    if not words.size:
        return
    half = high.itemsize
    later = words.view(np.uint8)[half:-half].view(words.dtype)
    np.copyto(high[:-1], later, casting="unsafe")
    high[-1] = words[-1] >> 8 * half


def _split_bytes(words: Words, planes: Sequence[Bytes], arena: Arena) -> None:
    if words.itemsize > 2:
        high, low = _halves(words, arena)
        _split_bytes(high, planes[: len(planes) // 2], arena)
        _split_bytes(low, planes[len(planes) // 2 :], arena)
        return
    _cut_high(words, planes[0])
    np.copyto(planes[1], words, casting="unsafe")


def _split_bf16(words: Words, planes: Sequence[Bytes], arena: Arena) -> None:
    """The bytes of the rotated word, exponent and then sign with mantissa, without rotating it."""
    exponent, mantissa = planes
    sign = arena.take(words.size, "<u1")
    np.right_shift(words, 7, out=exponent, casting="unsafe")  # cast while it is in the cache
    _cut_high(words, sign)
    np.copyto(mantissa, words, casting="unsafe")
    # The top bit of the low byte belongs to the exponent; the sign takes its place.
    np.bitwise_xor(sign, mantissa, out=sign)
    np.bitwise_and(sign, 0x80, out=sign)
    np.bitwise_xor(mantissa, sign, out=mantissa)


def _merge_bf16(exponent: Plane, mantissa: Plane, words: Words, arena: Arena) -> Words | int:
    if isinstance(mantissa, int):
        constant = (mantissa & 0x80) << 8 | mantissa & 0x7F
        if isinstance(exponent, int):
            return constant | exponent << 7
        np.multiply(exponent, 128, out=words, dtype=words.dtype)
        return np.bitwise_or(words, constant, out=words)
    if isinstance(exponent, int):
        _widen_mantissa(mantissa, words)
        return np.bitwise_or(words, exponent << 7, out=words)
    shifted = arena.take(min(words.size, _MERGED_AT_ONCE), "<u2")
    for start in range(0, words.size, _MERGED_AT_ONCE):
        piece = slice(start, start + _MERGED_AT_ONCE)
        some = words[piece]
        high = shifted[: some.size]
        _widen_mantissa(mantissa[piece], some)
        np.copyto(high, exponent[piece])
        np.multiply(high, 128, out=high)
        np.bitwise_or(some, high, out=some)
    return words


def _widen_mantissa(mantissa: Bytes, words: Words) -> None:
    """Widen bytes as signed ones: that copies each one's top bit to the top of its word."""
    np.copyto(words.view("<i2"), mantissa.view(np.int8))
    np.bitwise_and(words, 0x807F, out=words)


def _merge_bytes(planes: Sequence[Plane], dtype: str, count: int, arena: Arena) -> Words | int:
    """Words of these bytes, most significant first, in scratch memory."""
    if len(planes) == 1:
        return planes[0]
    half, middle = _HALF[np.dtype(dtype).itemsize], len(planes) // 2
    high = _merge_bytes(planes[:middle], half, count, arena)
    low = _merge_bytes(planes[middle:], half, count, arena)
    return _join(high, low, arena.take(count, dtype))


def _join(high: Words | int, low: Words | int, words: Words) -> Words | int:
    """Words of two halves; if each half is a single value, the one value of all words instead."""
    bits = 4 * words.itemsize
    if isinstance(high, int):
        if isinstance(low, int):
            return high << bits | low
        words.fill(high << bits)
    else:
        np.multiply(high, 1 << bits, out=words, dtype=words.dtype)
    return np.bitwise_or(words, low, out=words)


def _rotated(words: Words, mantissa_bits: int, arena: Arena) -> Words:
    """16-bit words with the sign moved from the top to below the exponent."""
    kept = (1 << mantissa_bits) - 1
    rotated, moved = arena.take(words.size, "<u2"), arena.take(words.size, "<u2")
    np.left_shift(words, 1, out=rotated)
    np.bitwise_and(rotated, 0xFFFF & ~(2 * kept + 1), out=rotated)
    np.right_shift(words, 15 - mantissa_bits, out=moved)
    np.bitwise_and(moved, kept + 1, out=moved)
    np.bitwise_or(rotated, moved, out=rotated)
    np.bitwise_and(words, kept, out=moved)
    return np.bitwise_or(rotated, moved, out=rotated)


def _rotated_back(words: Words | int, mantissa_bits: int, arena: Arena) -> Words | int:
    kept = (1 << mantissa_bits) - 1
    if isinstance(words, int):
        exponent = words >> 1 & (0x7FFF & ~kept)
        return (words & kept + 1) << 15 - mantissa_bits | exponent | words & kept
    back, moved = arena.take(words.size, "<u2"), arena.take(words.size, "<u2")
    np.right_shift(words, 1, out=back)
    np.bitwise_and(back, 0x7FFF & ~kept, out=back)
    np.bitwise_and(words, kept + 1, out=moved)
    np.left_shift(moved, 15 - mantissa_bits, out=moved)
    np.bitwise_or(back, moved, out=back)
    np.bitwise_and(words, kept, out=moved)
    return np.bitwise_or(back, moved, out=back)
