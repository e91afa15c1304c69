"""The benchmark page says what was measured: nothing is lost, nothing is flattered."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import bench.__main__ as command
from bench import catalogue, codec, report, service
from bench.headline import BEGIN, END, with_headline
from bench.ratios import ratios_of
from bench.samples import Footprint, Kind, Measured, Memory, Results, Row, Sample, Table, Timed
from bench.verdicts import at_least, at_most

MACHINE = Measured("2026-11-16", {"cores": "2", "CPU": "a processor"})


def made_up(kind: Kind, who: str, *seconds: float, **more: object) -> Row:
    samples = tuple(Sample(one, one / 2, one / 10, 300 << 20) for one in seconds)
    return Row(kind, who, "somehow", 1_000_000_000, samples, **more)  # type: ignore[arg-type]


READS = Timed(
    MACHINE,
    (
        made_up(Kind.OURS, "weightyard", 0.5, 0.4, 0.8),
        made_up(Kind.PEER, "hdfs-native", 2.0, 2.5),
        made_up(Kind.PEER, "other", 1.0),
        made_up(Kind.PEER, "absent", failed="no compiler"),
        made_up(Kind.LIMIT, "loopback", 0.25),
    ),
)
BIG = Footprint("write", tensor_bytes=4 << 30, peak_rss_bytes=5 << 30, seconds=9.0)


def test_ratios_compare_best_with_best() -> None:
    ratios = {ratio.what: ratio.value for ratio in ratios_of(READS.rows)}
    by_rival = {what.partition("against ")[2]: value for what, value in ratios.items()}
    assert by_rival == pytest.approx(
        {
            "hdfs-native, somehow (500 MB/s)": 5.0,
            "the fastest peer, other, somehow (1000 MB/s)": 2.5,
            "the limit, loopback, somehow (4000 MB/s)": 0.625,
        }
    )


def test_rows_of_different_groups_are_not_compared() -> None:
    rows = [
        made_up(Kind.OURS, "weightyard", 1.0, group="one copy"),
        made_up(Kind.PEER, "peer", 2.0, group="one copy"),
        made_up(Kind.OURS, "weightyard", 4.0, group="two copies"),
        made_up(Kind.PEER, "peer", 4.0, group="two copies"),
    ]
    assert [ratio.value for ratio in ratios_of(rows)] == pytest.approx([2.0, 1.0])


def test_a_peer_with_fresh_memory_is_compared_with_our_fresh_memory() -> None:
    rows = [
        made_up(Kind.OURS, "weightyard", 0.1),
        made_up(Kind.OURS, "weightyard", 0.5, is_fresh=True),
        made_up(Kind.PEER, "peer", 1.0, is_fresh=True),
    ]
    assert [ratio.value for ratio in ratios_of(rows)] == pytest.approx([2.0])


def test_a_section_during_which_the_host_gave_cores_to_others_says_so() -> None:
    disturbed = msgspec.structs.replace(MACHINE, stolen=0.17)
    page = report.render(Results(reads=msgspec.structs.replace(READS, measured=disturbed)))
    assert "The host gave 17% of the cores' time to others" in page


def test_the_page_shows_rates_spread_and_what_failed() -> None:
    page = report.render(Results(reads=READS, memory=Memory(MACHINE, (BIG,))))
    assert "| weightyard | somehow | **2500** | 50% | 2.50 |" in page
    assert "absent, somehow: no result: no compiler" in page
    assert "| write | 4.00 | 5120 | 1024 | **no** |" in page
    assert "a processor" in page


def test_a_push_is_held_against_one_stream_equal_streams_and_its_own_ceiling() -> None:
    def stored(row: Row, stored_bytes: int) -> Row:
        samples = [msgspec.structs.replace(one, stored_bytes=stored_bytes) for one in row.samples]
        return msgspec.structs.replace(row, samples=tuple(samples))

    rows = (
        stored(made_up(Kind.OURS, "weightyard", 2.0, group="first"), 800_000_000),
        made_up(Kind.PEER, "hdfs-native", 4.0, group="first"),
        made_up(Kind.PEER, "2 of hdfs-native", 2.5, group="first"),
        made_up(Kind.OURS, "weightyard, again", 0.1, group="second"),
    )
    assert [ratio.value for ratio in ratios_of(rows)] == pytest.approx([2.0, 1.25])
    page = report.render(Results(push=Timed(MACHINE, rows)))
    assert "0.800 of the tensor bytes were stored; 1 / that is 1.25×" in page
    assert "**2.00×** hdfs-native, somehow: somehow; asked: 1.3× or more\n" in page
    assert "**0.05** of weightyard, somehow (2.00 s): weightyard, again, somehow, 0.10 s" in page
    assert "1.2 core-seconds, of them 1.0 the client's and 0.2 the DataNodes'; 2 cores" in page
    assert "busy for 30% of 2.00 s, and never waiting would give 1667 MB/s" in page


def test_what_was_asked_of_reads_and_was_missed_is_called_so_with_what_bounds_it() -> None:
    page = report.render(Results(reads=READS))
    assert "against hdfs-native, somehow (500 MB/s); asked: 4× or more\n" in page
    assert "loopback, somehow, is itself **4.00×** other, somehow" in page
    slower = msgspec.structs.replace(READS.rows[0], samples=READS.rows[0].samples[2:])
    page = report.render(Results(reads=Timed(MACHINE, (slower, *READS.rows[1:]))))
    assert "the fastest peer, other, somehow (1000 MB/s); asked: 2× or more – **missed**" in page


def test_what_was_asked_of_codecs_and_the_registry_is_held_against_it() -> None:
    def way(name: str, encode: int, decode: int) -> dict[str, object]:
        return {
            "data": codec.BF16,
            "way": name,
            "size_left": 0.663,
            "encode_mb_s": encode,
            "decode_mb_s": decode,
        }

    rows = [way("weightyard", 500, 900), way("ZipNN", 100, 600)]
    assert codec.claims(rows) == [
        "**0.663** left of bf16, N(0, 0.02); asked: 0.667 or less",
        "**5.00×** ZipNN, encoding bf16, N(0, 0.02); asked: 5× or more",
        "**1.50×** ZipNN, decoding bf16, N(0, 0.02); asked: 2.5× or more – **missed**",
    ]
    times = [
        {"database": "PostgreSQL", "versions": 10, "claim 10000 s": 0.5, "gc plan peak MiB": 90.0},
        {"database": "SQLite", "versions": 10, "claim 10000 s": 2.0, "gc plan peak MiB": 90.0},
    ]
    assert catalogue.claims(times) == [
        "**0.50** claim 10000 s, PostgreSQL, 10 versions; asked: 1 or less",
        "**90.00** gc plan peak MiB, PostgreSQL, 10 versions; asked: 1024 or less",
        "**4.00×** PostgreSQL's claim 10000 s: SQLite; asked: 3× or less – **missed**",
        "**1.00×** PostgreSQL's gc plan peak MiB: SQLite; asked: 3× or less",
    ]


def test_of_the_service_no_error_is_asked_with_the_most_clients() -> None:
    def row(clients: int, errors: int) -> dict[str, object]:
        return {"database": "SQLite", "clients": clients, "errors": errors, "p99 ms": 561.1}

    line = "errors with 200 clients on SQLite, 99 of 100 answers within 561 ms; asked: none"
    assert service.claims([row(50, 7), row(200, 0)]) == [f"**0** {line}"]
    assert service.claims([row(50, 0), row(200, 7)]) == [f"**7** {line} – **missed**"]


def test_the_registry_and_the_service_have_tables_on_the_page() -> None:
    times = [{"database": "SQLite", "versions": 100, "resolve p99 ms": 1.5}]
    resolving = [{"database": "SQLite", "clients": 200, "errors": 0, "requests/s": 512.3}]
    page = report.render(
        Results(
            catalogue=Table(MACHINE, {"times": times}),
            service=Table(MACHINE, {"resolving": resolving}),
        )
    )
    assert "| SQLite | 100 | 1.500 |" in page
    assert "| SQLite | 200 | 0 | 512 |" in page


def test_sections_not_measured_again_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "docs" / "page.md")
    monkeypatch.setattr(command, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}| old |\n{END}after\n")
    before = Results(reads=READS, codec=Table(MACHINE, {"rates": [{"codec": "raw", "left": 1.0}]}))
    command.write_results(before)
    kept = command.read_results(tmp_path / "results.json")
    after = msgspec.structs.replace(kept, memory=Memory(MACHINE, (BIG,)))
    command.write_results(after)
    assert command.read_results(tmp_path / "results.json") == after
    assert after.reads == READS
    assert "| raw | 1.000 |" in (tmp_path / "docs" / "page.md").read_text()
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith(f"before\n{BEGIN}\n| MB/s |")
    assert "Measured 2026-11-16 on 2 cores" in readme
    assert readme.endswith(f"{END}after\n")
    assert "| a file, read through sockets | **2500** | 1000: other, somehow | **2.5×** |" in readme
    assert "old" not in readme


def test_page_and_readme_show_the_numbers_that_were_measured() -> None:
    results = command.read_results(command.RESULTS)
    page, readme = command.PAGE.read_text(), command.README.read_text()
    hint = "write them anew: python -m bench --page"
    assert page == report.render(results), hint
    assert readme == with_headline(readme, results), hint


def test_a_number_that_misses_by_little_is_not_shown_as_the_one_asked_for() -> None:
    assert at_most(0.152, 0.15, "swap") == "**0.152** swap; asked: 0.15 or less – **missed**"
    assert at_least(1.396, 1.4, "link") == "**1.396×** link; asked: 1.4× or more – **missed**"
    assert at_least(1.4, 1.4, "link") == "**1.40×** link; asked: 1.4× or more"
