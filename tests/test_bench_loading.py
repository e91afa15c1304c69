"""The numbers about loading: what was asked and missed is said, and links are as narrow as told."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from bench import asked, report
from bench.about import LOADING_SECTIONS
from bench.samples import Kind, Measured, Results, Row, Sample, Timed
from bench.shaping import Bucket, narrow_link
from bench.worker import sample

MACHINE = Measured("2026-11-16", {"cores": "2", "CPU": "a processor"})
GB = 1_000_000_000


def row(way: str, *seconds: float, group: str = "", kind: Kind = Kind.OURS, **told: float) -> Row:
    samples = tuple(Sample(one, one, one / 10, 300 << 20, **told) for one in seconds)  # type: ignore[arg-type]
    who = "weightyard" if kind is Kind.OURS else str(kind)
    return Row(kind, who, way, GB, samples, group=group, is_fresh=True)


def test_a_load_is_held_against_the_fastest_peer_the_best_made_of_one_and_the_limit() -> None:
    rows = [
        row("raw", 1.0, read_bytes=GB),
        row("planes", 1.0, read_bytes=GB * 2 // 3),
        row("slow", 4.0, kind=Kind.PEER),
        row("fast", 2.0, kind=Kind.PEER),
        row("views", 1.6, kind=Kind.PEER),
        row("socket", 0.5, kind=Kind.LIMIT),
    ]
    raw, best, limit, planes, _, _ = asked.claims("load", rows)
    assert raw.startswith("**2.00×** the fastest peer (peer, fast)")
    assert raw.endswith("asked: 2.5× or more – **missed**")
    assert best == "**1.60×** the best of a peer (peer, views): , raw"
    assert limit == (
        "**0.50** of the loopback limit: , raw; what bounds it is the cores, of which the client "
        "took 1.0 and the DataNodes 0.1"
    )
    assert "planes, 0.67 of the bytes; asked: 1.8× or more" in planes
    assert "missed" not in planes


def test_a_link_says_how_full_it_was_and_what_a_core_can_decode() -> None:
    rows = [
        row("raw", 10.5, group="100 MB/s", read_bytes=GB),
        row("planes", 7.0, group="100 MB/s", read_bytes=GB * 2 // 3),
    ]
    (line,) = asked.claims("link", rows)
    assert line.startswith("**1.50×** raw on a link of 100 MB/s; asked: 1.4× or more. Raw used 95%")
    assert "decodes 143 MB/s of tensors, as much as 95 MB/s of link bring" in line


def test_a_link_that_waits_for_decoding_is_told_from_one_that_planes_should_relieve() -> None:
    raw = row("raw", 1.1, group="1000 MB/s", read_bytes=GB)
    decoding = row("planes", 1.1, group="1000 MB/s", read_bytes=GB * 2 // 3)
    (line,) = asked.claims("link", [raw, decoding])
    assert line.startswith("**1.00×** raw on a link of 1000 MB/s, where decoding is the limit")
    waiting = row("planes", 0.8, group="1000 MB/s", read_bytes=GB * 2 // 3)
    (line,) = asked.claims("link", [raw, waiting])
    assert line.startswith("**1.38×** raw on a link of 1000 MB/s; asked: 1.4× or more – **missed**")


def test_what_takes_a_millisecond_is_done_often_and_told_for_one() -> None:
    calls: list[float] = []

    def action() -> list[bytes]:
        time.sleep(0.002)
        calls.append(time.perf_counter())
        return []

    began = time.perf_counter()
    told = sample(action, (), None, calls=20)
    assert len(calls) == 20
    assert 0.002 <= told.seconds <= (time.perf_counter() - began) / 20


def test_every_fault_counts_and_the_worst_is_told() -> None:
    rows = [
        row("undisturbed", 1.0, 1.2, 0.9),
        row("one killed", 1.5, 2.0, 5.0, went_wrong=2),
        msgspec.structs.replace(row("one stopped", 2.0, 2.0), failed="no replica"),
    ]
    lines = asked.claims("faults", rows)
    assert lines[0] == (
        "**3 of 3** loads succeeded, one killed; 3 of them had to turn to another DataNode"
    )
    assert lines[1].startswith("**4.00 s** at most added to 1.00 s, 1.00 s as a rule")
    assert lines[1].endswith("asked: 3 s or less – **missed**")
    assert lines[2].startswith("**2 of 3** loads succeeded, one stopped; 0 of them")
    unfelt = [rows[0], row("one killed", 1.5, 2.0, 5.0)]
    assert asked.claims("faults", unfelt)[0].endswith(
        "0 of them had to turn to another DataNode – **missed**"
    )
    assert lines[2].endswith("**missed**")
    page = report.render(Results(faults=Timed(MACHINE, tuple(rows))))
    assert "weightyard, one stopped: a repetition failed: no replica" in page


def test_swaps_ranks_streams_and_nodes_are_told_in_parts_of_a_whole_load() -> None:
    swap = [row("full load", 2.0, group="swap", read_bytes=GB)]
    swap += [row("swap", 0.2, group="swap", read_bytes=GB // 20)]
    assert [line[:8] for line in asked.claims("swap", swap)] == ["**0.10**", "**0.05**"]
    rank = [row("all of it", 2.0, group="raw", read_bytes=GB)]
    rank += [row("half of every tensor", 1.0, group="raw", read_bytes=GB // 2)]
    assert [line[:8] for line in asked.claims("rank", rank)] == ["**0.50**", "**0.50**"]
    stream = [row("load", 2.0, group="raw"), row("stream", 2.2, group="raw", first_s=0.1)]
    assert asked.claims("stream", stream)[0].startswith("**0.050** of a load's time")
    node = [row("snapshot", 1.0, group="to first use")]
    node += [row("load_file", 0.5, group="to first use", kind=Kind.PEER)]
    assert asked.claims("node", node)[0].startswith("**0.50×** safetensors.torch.load_file")
    local = [row("raw", 1.2), row("load_file, copied", 1.0, kind=Kind.PEER)]
    assert asked.claims("local", local)[0].startswith("**1.20×** the time of peer, load_file")


@pytest.mark.parametrize("section", LOADING_SECTIONS)
def test_a_section_of_which_everything_failed_still_has_its_page(section: str) -> None:
    failed = Row(Kind.OURS, "weightyard", "raw", GB, failed="no cluster")
    page = report.render(Results(**{section: Timed(MACHINE, (failed,))}))
    assert "weightyard, raw: no result: no cluster" in page


def test_two_streams_share_the_rate_of_a_link() -> None:
    sent_bytes, rate = 2_000_000, 10_000_000
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(2) == b"go"
                connection.sendall(b"x" * sent_bytes)

        def fetch(port: int, got: list[int]) -> None:
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(b"go")
                got.append(sum(iter(lambda: len(connection.recv(65536)), 0)))

        datanode = f"127.0.0.1:{server.getsockname()[1]}"
        with narrow_link(rate, [datanode]) as proxies:
            port = int(proxies[datanode].rpartition(":")[2])
            got: list[int] = []
            threads = [threading.Thread(target=serve) for _ in range(2)]
            threads += [threading.Thread(target=fetch, args=(port, got)) for _ in range(2)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            took_s = time.monotonic() - began
    assert got == [sent_bytes, sent_bytes]
    assert took_s > 0.9 * 2 * sent_bytes / rate


def test_a_bucket_saves_up_no_more_than_a_moment() -> None:
    bucket = Bucket(1_000_000)
    time.sleep(0.05)
    began = time.monotonic()
    bucket.take(50_000)
    assert time.monotonic() - began > 0.04
