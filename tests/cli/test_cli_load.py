"""`weightyard load`: what it reports to people, and what this node remembers of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_runs import Cli

BERT = "team/bert"

pytest.importorskip("torch")


def test_a_report_shows_parts_of_a_stage_below_it_and_says_that_they_are_sums(
    cli: Cli, base: Path
) -> None:
    cli.ok("push", base, BERT)
    out = cli.ok("load", BERT, "--report")
    lines = [line.strip() for line in out.splitlines()]
    parts = [line for line in lines if line.startswith("· ")]
    assert [line.split()[1] for line in parts] == ["locate", "fetch", "decode"]
    assert all(line.endswith("of it, over all threads") for line in parts)
    assert all(re.search(r"\d [KMG]?i?B ", line) for line in parts[1:]), "and the bytes they moved"
    assert lines[lines.index(parts[0]) - 1].startswith("read ")
    assert not [line for line in lines if line.startswith(("locate", "fetch", "decode"))]


def test_a_report_of_a_local_store_names_no_datanode(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    out = cli.ok("load", BERT, "--report")
    assert "local " in out
    assert "DataNodes" not in out
    assert "localhost" not in out


def test_a_report_of_a_snapshot_shows_only_what_happened(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    cli.ok("path", BERT)
    out = cli.ok("load", BERT, "--report")
    assert "from a snapshot" in out
    for absent in ("locate", "fetch", "decode", "from the store", "0 B", "way"):
        assert absent not in out, out
    told = cli.json("load", BERT, "--report")["reports"][0]
    assert {"locate", "fetch", "decode"} <= told["stages"].keys(), "scripts find all of them"
    assert told["cached_bytes"] == told["stage_bytes"]["map"] == told["bytes"] > 0


@pytest.mark.parametrize("command", ["load", "pull"])
def test_a_ref_that_was_typed_is_remembered_as_it_was_typed(
    cli: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    cli.ok("push", base, BERT)
    cli.ok("path", f"{BERT}@v1")
    cli.ok(command, BERT, *([tmp_path / "out"] if command == "pull" else []))
    monkeypatch.setenv("WEIGHTYARD_OFFLINE", "1")
    told = cli.json("load", BERT, "--report")
    assert (told["ref"], told["version"]) == (f"{BERT}@v1", 1)
    assert told["reports"][0]["from_snapshot"]
    assert told["reports"][0]["resolved_s_ago"] >= 0
    assert "this node last asked" in cli.ok("load", BERT, "--report")


def test_a_ref_that_leads_nowhere_names_what_is_near(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    assert BERT in cli.refused(2, "load", "team/bart", "--tensors", "head")
