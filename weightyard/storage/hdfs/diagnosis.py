"""Why none of a block's replicas served: their DataNodes are away, or their bytes are wrong.

HDFS's clients say the same in both cases. hdfs-native reports neither to the NameNode, and Java's
clients report a wrong replica only as long as another one is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightyard.errors import Cancelled, YardError
from weightyard.logs import Log
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.pieces import Piece, split
from weightyard.storage.store import Location, Read, StorePath

_log = Log(__name__)

_LIMIT_S = 5.0


class Diagnosis:
    """Looks at replicas when no way of reading that checks HDFS's checksums served. Thread-safe."""

    def __init__(
        self, locate: Callable[[StorePath, Deadline], Location], direct: DataNodeReader | None
    ) -> None:
        """`direct`: asks DataNodes for bytes without checksums; None: they cannot be asked."""
        self._locate = locate
        self._direct = direct

    def find_damage(
        self, location: Location, reads: Sequence[Read], deadline: Deadline
    ) -> str | None:
        """What is wrong with the replicas, in words, or None if the cause may be another.

        They are wrong if the NameNode knows so of all of them. They also are if every DataNode
        answers, has the block and sends the bytes asked for when they are not checked.
        """
        doing = f"looking at the replicas of {location.path}"
        try:
            limit = Deadline.after(deadline.left_at_most(_LIMIT_S, doing), deadline.cancel)
            found = self._locate(location.path, limit)
            if found.length < location.length:
                return None
            pieces = list(split(found, reads))
            if not pieces:
                return None
            is_known = any(_is_known_as_corrupt(piece) for piece in pieces)
            if not is_known and not all(self._answer(piece, limit) for piece in pieces):
                return None
        except Cancelled:
            raise
        except YardError as why:
            _log.info("read.not_diagnosed", file=location.path, reason=why)
            return None
        return f"{location.path}: {_told(pieces, is_known)}"

    def _answer(self, piece: Piece, deadline: Deadline) -> bool:
        """Whether all replicas answer. Raises the error of the first that does not."""
        if self._direct is None or piece.span.access is None:
            return False
        for replica in piece.span.replicas:
            one_byte = Read(piece.reads[0].offset, memoryview(bytearray(1)))
            self._direct.read(replica, piece.span, [one_byte], deadline)
        return bool(piece.span.replicas)

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()


def _is_known_as_corrupt(piece: Piece) -> bool:
    states = [replica.state for replica in piece.span.replicas]
    return bool(states) and all(state == "corrupt" for state in states)


def _told(pieces: Sequence[Piece], is_known: bool) -> str:
    told = [piece for piece in pieces if not is_known or _is_known_as_corrupt(piece)]
    wanted = [read for piece in told for read in piece.reads]
    first = min(read.offset for read in wanted)
    end = max(read.offset + len(read.into) for read in wanted)
    datanodes = ", ".join(dict.fromkeys(one.datanode for it in told for one in it.span.replicas))
    what = f"bytes {first}…{end}: the replicas on {datanodes}"
    if is_known:
        return f"{what} are all damaged, as HDFS knows"
    return f"{what} answer, but none passes HDFS's checksums"
