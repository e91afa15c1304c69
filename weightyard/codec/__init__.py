"""Blocks to stored bytes and back: float planes, zstd and XOR deltas, chosen by measuring.

Pure functions of bytes, safe to call from any number of threads; the heavy parts release the GIL.
"""

from weightyard.codec.decoder import decode, decode_planes, prove, verify, verify_whole
from weightyard.codec.encoder import (
    Encoded,
    encode,
    encode_delta,
    estimate,
    room_for,
    worth_a_delta,
)
from weightyard.codec.folding import fold
from weightyard.format.block import check_encoding

__all__ = [
    "Encoded",
    "check_encoding",
    "decode",
    "decode_planes",
    "encode",
    "encode_delta",
    "estimate",
    "fold",
    "prove",
    "room_for",
    "verify",
    "verify_whole",
    "worth_a_delta",
]
