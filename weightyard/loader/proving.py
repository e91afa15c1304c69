"""Proving: what is read is hashed and compared with the names of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from weightyard.errors import BlockCorrupt
from weightyard.format.block import block_id
from weightyard.loader.filling import Read
from weightyard.names import BlockId
from weightyard.transfer.cores import cores
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import ReadReport
from weightyard.transfer.together import run_together


def read_proved(read: Read, sizes: Mapping[BlockId, int], wanted: Sequence[Wanted]) -> ReadReport:
    """Read, then hash the bytes of every block and compare them with its name.

    A name is the hash of a whole block, so blocks of which only some is wanted are read whole.
    Raises BlockCorrupt, and what the read raises.
    """
    whole: dict[BlockId, memoryview] = {}
    parts: list[Wanted] = []
    for want in wanted:
        if want.into.nbytes == sizes[want.block] and want.block not in whole:
            whole[want.block] = want.into
        elif want.into.nbytes:
            parts.append(want)
    for want in parts:
        if want.block not in whole:
            whole[want.block] = np.empty(sizes[want.block], np.uint8).data
    report = read([Wanted(block, 0, into) for block, into in whole.items()])
    run_together(
        cores(),
        "weightyard-prove",
        [partial(_prove, block, data) for block, data in whole.items()],
    )
    for want in parts:
        want.into[:] = whole[want.block][want.offset : want.end]
    return report


def _prove(block: BlockId, data: memoryview) -> None:
    found = block_id(data)
    if found != block:
        raise BlockCorrupt(f"block {block}: its bytes are those of {found}")
