"""What is asked of a section, and whether it was reached. Pure: rows in, lines of the page out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from bench.faults import KILLED, STOPPED, UNDISTURBED
from bench.link import RATES_MB_S, group_of
from bench.load import HALF, WHOLE
from bench.node import CHECKED, COPIED, FIRST_USE, LAST_BYTE
from bench.prepared import PLANES, RAW
from bench.ratios import ratios_of
from bench.reads import HERE
from bench.samples import MB, Kind, Row, fastest
from bench.swap import FULL, SWAP, SWAP_DELTA
from bench.training import checkpoint_claims
from bench.verdicts import at_least, at_most, verdict

READ_FASTEST, READ_NATIVE, READ_LIMIT = 2.0, 4.0, 0.5
PUSH, AGAIN = 1.3, 0.10
LOAD_RAW, LOAD_PLANES, LINK, NODE, LOCAL = 2.5, 1.8, 1.4, 0.95, 1.3
_FULL, _BUSY = 0.75, 0.85
"""A link of which less is used, while a core and more of the client is busy, is not the limit."""
SWAP_SHARE, RANK_TIME, RANK_BYTES, FAULT_S = 0.15, 0.6, 0.55, 3.0


def claims(section: str, rows: Sequence[Row]) -> list[str]:
    """The lines of a section; nothing of sections about other things."""
    made = _CLAIMS.get(section)
    return [] if made is None else made([row for row in rows if row.samples])


def _reads(rows: Sequence[Row]) -> list[str]:
    lines = []
    for ratio in ratios_of(rows):
        rival = ratio.rival
        if rival.kind is Kind.LIMIT:
            lines.append(at_least(ratio.value, READ_LIMIT, ratio.what))
        elif ratio.is_of_quickest:
            lines.append(at_least(ratio.value, READ_FASTEST, ratio.what))
        elif rival.who == "hdfs-native":
            lines.append(at_least(ratio.value, READ_NATIVE, ratio.what))
        else:
            lines.append(str(ratio))
    afar = [row for row in rows if row.group != HERE]
    quickest, limit = fastest(afar, Kind.PEER), fastest(afar, Kind.LIMIT)
    if quickest is not None and limit is not None:
        most = limit.best_rate / quickest.best_rate
        lines.append(
            f"What bounds it: {limit.name}, is itself **{most:.2f}×** {quickest.name}, and no read "
            "through sockets of this machine can be faster"
        )
    return lines


def _push(rows: Sequence[Row]) -> list[str]:
    """Each way to push against one stream, and against as many as a push has."""
    lines = []
    for peer in (row for row in rows if row.kind is Kind.PEER):
        for ours in rows:
            if ours.kind is not Kind.OURS or ours.group != peer.group:
                continue
            times, what = ours.best_rate / peer.best_rate, f"{peer.name}: {ours.way}"
            is_one = peer.who == "hdfs-native"
            lines.append(at_least(times, PUSH, what) if is_one else f"**{times:.2f}×** {what}")
    return lines


def _load(rows: Sequence[Row]) -> list[str]:
    lines = []
    for group, some in _groups(rows).items():
        plain = fastest([row for row in some if not row.way.endswith("views")], Kind.PEER)
        peer, limit = fastest(some, Kind.PEER), fastest(some, Kind.LIMIT)
        for way, asked in ((RAW, LOAD_RAW), (PLANES, LOAD_PLANES)):
            if (row := _find(some, way)) is None:
                continue
            got = f"{row.best.read_bytes / row.moved_bytes:.2f} of the bytes"
            if plain is not None:
                what = f"the fastest peer ({plain.name}): {group}, {way}, {got}"
                lines.append(at_least(row.best_rate / plain.best_rate, asked, what))
            if peer is not None and peer is not plain:
                times = row.best_rate / peer.best_rate
                lines.append(f"**{times:.2f}×** the best of a peer ({peer.name}): {group}, {way}")
            if limit is not None:
                share = row.best_rate / limit.best_rate
                client = _busy(row.best.client_cpu_s, row)
                server = _busy(row.best.server_cpu_s, row)
                lines.append(
                    f"**{share:.2f}** of the loopback limit: {group}, {way}; what bounds it is the "
                    f"cores, of which the client took {client:.1f} and the DataNodes {server:.1f}"
                )
    return lines


def _link(rows: Sequence[Row]) -> list[str]:
    lines = []
    for rate in RATES_MB_S:
        raw, planes = _pair(rows, group_of(rate), RAW, PLANES)
        if raw is None or planes is None:
            continue
        gain = planes.best_rate / raw.best_rate
        core = planes.moved_bytes / MB / planes.best.client_cpu_s
        brought = core * planes.best.read_bytes / planes.moved_bytes
        used = {
            row.way: row.best.read_bytes / MB / row.best.seconds / rate for row in (raw, planes)
        }
        what = f"raw on a link of {rate} MB/s"
        if used[PLANES] < _FULL and _busy(planes.best.client_cpu_s, planes) >= _BUSY:
            said = f"**{gain:.2f}×** {what}, where decoding is the limit and not the link"
        else:
            said = at_least(gain, LINK, what)
        lines.append(
            f"{said}. Raw used {used[RAW]:.0%} of it, planes {used[PLANES]:.0%}; a core of the "
            f"client receives, checks and decodes {core:.0f} MB/s of tensors, as much as "
            f"{brought:.0f} MB/s of link bring"
        )
    return lines


def _node(rows: Sequence[Row]) -> list[str]:
    lines = []
    for upto in (FIRST_USE, LAST_BYTE):
        ours, peer = _pair(rows, upto, "snapshot", "load_file")
        if ours is not None and peer is not None:
            what = (
                f"safetensors.torch.load_file {upto} ({_ms(ours)} against {_ms(peer)}, "
                f"{_gib(ours)} GiB)"
            )
            lines.append(at_least(ours.best_rate / peer.best_rate, NODE, what))
    return lines


def _local(rows: Sequence[Row]) -> list[str]:
    lines = []
    for ours in filter(None, (_find(rows, RAW), _find(rows, PLANES))):
        for peer in filter(None, (_find(rows, "load_file"), _find(rows, COPIED))):
            took = ours.best.seconds / peer.best.seconds
            what = f"the time of {peer.name}: {ours.way}"
            lines.append(
                at_most(took, LOCAL, what, "×") if ours.way == RAW else f"**{took:.2f}×** {what}"
            )
    checked, mapped = _find(rows, CHECKED), _find(rows, "load_file")
    if checked is not None and mapped is not None:
        took = checked.best.seconds / mapped.best.seconds
        lines.append(
            f"What bounds a load that checks every byte: that takes **{took:.2f}×** the "
            f"time of {mapped.name}, which looks at none"
        )
    return lines


def _swap(rows: Sequence[Row]) -> list[str]:
    lines = []
    for way in (SWAP, SWAP_DELTA):
        full, swap = _pair(rows, way, FULL, way)
        if full is None or swap is None:
            continue
        time = swap.best.seconds / full.best.seconds
        read = swap.best.read_bytes / full.best.read_bytes
        if way == SWAP:
            lines.append(at_most(time, SWAP_SHARE, "of the time of a full load: swap"))
            lines.append(at_most(read, SWAP_SHARE, "of its bytes: swap"))
        else:
            lines.append(f"**{time:.2f}** of the time and **{read:.4f}** of the bytes: {way}")
    return lines


def _rank(rows: Sequence[Row]) -> list[str]:
    lines = []
    for codec in (RAW, PLANES):
        whole, half = _pair(rows, codec, WHOLE, HALF)
        if whole is None or half is None:
            continue
        time = half.best.seconds / whole.best.seconds
        read = half.best.read_bytes / whole.best.read_bytes
        lines.append(at_most(time, RANK_TIME, f"of the time for half of every tensor: {codec}"))
        lines.append(at_most(read, RANK_BYTES, f"of the bytes: {codec}"))
    return lines


def _stream(rows: Sequence[Row]) -> list[str]:
    lines = []
    for codec in (RAW, PLANES):
        load, stream = _pair(rows, codec, "load", "stream")
        if load is None or stream is None:
            continue
        first_s = min(sample.first_s for sample in stream.samples)
        lines.append(
            f"**{first_s / load.best.seconds:.3f}** of a load's time to the first tensor "
            f"({1000 * first_s:.0f} ms), **{stream.best.seconds / load.best.seconds:.2f}** to the "
            f"last: {codec}"
        )
    return lines


def _faults(rows: Sequence[Row]) -> list[str]:
    usual = _find(rows, UNDISTURBED)
    if usual is None:
        return []
    usual_s, tries = median(sample.seconds for sample in usual.samples), len(usual.samples)
    lines = []
    for way in (KILLED, STOPPED):
        row = _find(rows, way)
        took_s = [] if row is None else [sample.seconds for sample in row.samples]
        felt = sum(sample.went_wrong > 0 for sample in row.samples) if row is not None else 0
        reached = verdict(len(took_s) == felt == tries)
        lines.append(
            f"**{len(took_s)} of {tries}** loads succeeded, {way}; {felt} of them had to turn to "
            f"another DataNode{reached}"
        )
        if took_s:
            what = f"at most added to {usual_s:.2f} s, {median(took_s) - usual_s:.2f} s as a rule"
            lines.append(at_most(max(took_s) - usual_s, FAULT_S, f"{what}: {way}", " s"))
    return lines


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _pair(
    rows: Sequence[Row], group: str, first: str, second: str
) -> tuple[Row | None, Row | None]:
    some = _groups(rows).get(group, [])
    return _find(some, first), _find(some, second)


def _find(rows: Sequence[Row], way: str) -> Row | None:
    return next((row for row in rows if row.way == way), None)


def _busy(cpu_s: float, row: Row) -> float:
    """Cores, while the best repetition ran."""
    return cpu_s / row.best.seconds


def _ms(row: Row) -> str:
    return f"{1000 * row.best.seconds:.1f} ms"


def _gib(row: Row) -> str:
    return f"{row.moved_bytes / 2**30:.2f}"


_CLAIMS: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
    "reads": _reads,
    "push": _push,
    "load": _load,
    "link": _link,
    "node": _node,
    "local": _local,
    "swap": _swap,
    "rank": _rank,
    "stream": _stream,
    "faults": _faults,
    "checkpoints": checkpoint_claims,
}
