"""`weightyard path` and `weightyard cache`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_runs import Cli

BERT = "team/bert"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_path_prints_only_the_folder_so_that_a_shell_can_use_it(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    printed = cli.ok("path", f"{BERT}@prod")
    folder = Path(printed.removesuffix("\n"))
    assert folder.parent == tmp_path / "cache" / "snapshots"
    assert files(folder) == files(base)
    assert cli.ok("path", BERT) == printed
    some = Path(cli.ok("path", BERT, "--include", "*.json").removesuffix("\n"))
    assert set(files(some)) == {"config.json"}
    assert "prod" in cli.refused(2, "path", f"{BERT}@pord")
    assert "config.json" in cli.refused(2, "path", BERT, "--include", "*.bin")


def test_the_cache_is_listed_pruned_and_emptied(
    cli: Cli, base: Path, tuned: Path, tmp_path: Path
) -> None:
    assert "weightyard path" in cli.ok("cache", "ls")
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    first, second = (cli.ok("path", f"{BERT}@v{number}").strip() for number in (1, 2))
    listed = cli.json("cache", "ls")["snapshots"]
    assert [one["path"] for one in listed] == [second, first]
    assert f"{BERT}@v1" in cli.ok("cache", "ls")
    lock = tmp_path / "cache" / "snapshots" / ".state" / f"{Path(first).name}.lock"
    os.utime(lock, (0, 0))
    assert [one["path"] for one in cli.json("cache", "prune", "--unused", "30d")["removed"]] == [
        first
    ]
    assert not Path(first).exists()
    assert "1 snapshot removed" in cli.ok("cache", "rm", f"{BERT}@v2")
    assert not Path(second).exists()
    cli.ok("path", f"{BERT}@prod")
    assert cli.json("cache", "rm", f"{BERT}@prod")["removed"], "an alias, as last resolved"
    assert "cache ls" in cli.refused(2, "cache", "rm", f"{BERT}@v1")
    assert "--all" in cli.refused(2, "cache", "rm")
    assert cli("cache", "prune", "--max", "much").code == 2


def test_verifying_is_no_use_so_what_was_used_last_stays_the_longest(
    cli: Cli, base: Path, tuned: Path
) -> None:
    cli.ok("push", base, BERT)
    cli.ok("push", tuned, BERT)
    for number in (1, 2):
        cli.ok("path", f"{BERT}@v{number}")
    before = [(one["ref"], one["used"]) for one in cli.json("cache", "ls")["snapshots"]]
    cli.ok("cache", "verify")
    assert [(one["ref"], one["used"]) for one in cli.json("cache", "ls")["snapshots"]] == before


def test_verify_finds_a_damaged_snapshot_and_it_is_fetched_again(
    cli: Cli, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("push", base, BERT)
    folder = Path(cli.ok("path", BERT).strip())
    assert "all is well" in cli.ok("cache", "verify", BERT)
    file = folder / "config.json"
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[::-1])
    ran = cli("cache", "verify")
    assert ran.code == 5
    assert "config.json" in ran.out
    assert "snapshot.damaged" in ran.err
    assert not folder.exists()
    monkeypatch.setenv("WEIGHTYARD_OFFLINE", "1")
    said = cli.refused(2, "--quiet", "path", BERT)
    assert "weightyard path" in said.partition("no snapshot")[2]
    monkeypatch.delenv("WEIGHTYARD_OFFLINE")
    assert files(Path(cli.ok("path", BERT).strip())) == files(base)
