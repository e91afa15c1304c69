"""The command line through a service, by token."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Cli
from service_world import World, served

BERT = "team/bert"


@pytest.fixture
def remote(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Commands whose environment names a service and a writer's token."""
    with served(world.app) as url:
        monkeypatch.setenv("WEIGHTYARD_URL", url)
        monkeypatch.setenv("WEIGHTYARD_TOKEN", world.secrets["writer"])
        monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "20")
        yield cli


def test_the_same_words_work_through_a_service(
    remote: Cli, world: World, base: Path, tuned: Path, tmp_path: Path
) -> None:
    first = remote.json("push", base, BERT, "--alias", "prod")
    assert (first["ref"], first["author"]) == (f"{BERT}@v1", "writer")
    plan = remote.json("push", tuned, BERT, "--dry-run")
    second = remote.json("push", tuned, BERT)
    assert second["new_bytes"] == plan["new_bytes"] < second["logical_bytes"]
    remote.ok("alias", "set", BERT, "prod", "2", "--expect", "1")
    assert [move["who"] for move in remote.json("alias", "log", BERT, "prod")["moves"]] == [
        "writer",
        "writer",
    ]
    remote.ok("pull", f"{BERT}@prod", tmp_path / "out")
    names = ["config.json", "model.safetensors"]
    assert filecmp.cmpfiles(tuned, tmp_path / "out", names, shallow=False)[0] == names
    shown = remote.json("show", f"{BERT}@prod")
    assert shown["cost"]["shared_with"].keys() == {f"{BERT}@v1"}
    assert shown["last_used"] is not None
    assert len(remote.json("ls", BERT)["versions"]) == 2
    differ = remote.json("diff", f"{BERT}@v1", f"{BERT}@v2")
    assert differ["tensors_changed"] == ["model.safetensors:head"]
    remote.ok("alias", "rollback", BERT, "prod", "--reason", "latency")
    assert remote.json("show", f"{BERT}@prod")["version"] == 1
    said = remote.json("annotate", f"{BERT}@v2", "--tag", "reviewed=yes", "--metadata", "rows=3")
    assert (said["tags"], said["metadata"]) == ({"reviewed": "yes"}, {"rows": 3})
    assert [
        one["number"] for one in remote.json("ls", BERT, "--tag", "reviewed=yes")["versions"]
    ] == [2]
    assert remote.json("doctor")["ok"]


def test_what_a_token_may_not_is_refused_and_a_better_one_may(
    remote: Cli, world: World, base: Path
) -> None:
    remote.ok("push", base, BERT)
    assert "admin" in remote.refused(2, "rm", f"{BERT}@v1", "--yes").lower()
    assert remote.refused(2, "push", base, "other/bert")
    boss = ("--token", world.secrets["boss"])
    remote.ok("rm", f"{BERT}@v1", "--yes", *boss)
    made = remote.json("token", "create", "new", "--role", "write", *boss)
    assert remote.json("ls", "--token", made["secret"])["models"]
    remote.ok("token", "revoke", "new", *boss)
    assert remote.refused(2, "ls", "--token", made["secret"])


def test_who_makes_the_first_token_is_told_that_it_closes_the_service(cli: Cli) -> None:
    made = cli("token", "create", "ci", "--role", "write", "--project", "team")
    assert made.out.splitlines()[-1].startswith("wy_")
    assert "From now on a service of this yard asks everyone for a token." in made.err
    assert "--role admin" in made.err, "this one makes no others through the service"
    assert cli("token", "create", "me", "--role", "admin").err == ""


def test_who_shows_no_token_is_told_how_to(remote: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTYARD_TOKEN")
    assert "set WEIGHTYARD_TOKEN" in remote.refused(2, "ls")


def test_what_works_on_the_database_is_refused_by_the_name_of_the_service(remote: Cli) -> None:
    for command in ("gc", "check"):
        said = remote.refused(2, command)
        assert "is a service; this needs the yard's store and database: --yard STORE" in said


def test_a_wrong_token_is_told_so_and_never_shown(remote: Cli) -> None:
    said = remote.refused(2, "ls", "--token", "wy_wrong")
    assert "token" in said
    assert "wy_wrong" not in said


def test_a_host_without_hdfs_pushes_and_pulls_through_the_service_and_is_told_once(
    remote: Cli, world: World, base: Path, tmp_path: Path
) -> None:
    world.store.url = "hdfs://127.0.0.1:1/yard"
    for words in (("push", base, BERT), ("pull", BERT, tmp_path / "out")):
        ran = remote(*words)
        assert ran.code == 0, ran.err
        (line,) = ran.err.splitlines()
        assert line.startswith("weightyard: bytes go through the service: hdfs://127.0.0.1:1/yard")
    names = ["config.json", "model.safetensors"]
    assert filecmp.cmpfiles(base, tmp_path / "out", names, shallow=False)[0] == names
    assert remote.json("show", BERT)["cost"]["stored_bytes"] > 0
    findings = {one["check"]: one for one in remote.json("doctor")["findings"]}
    assert (findings["service"]["state"], findings["store"]["state"]) == ("ok", "warn")


def test_a_model_and_its_copies_are_looked_after_through_the_service(
    remote: Cli, world: World, base: Path
) -> None:
    remote.ok("push", base, BERT)
    assert "keeps one copy" in remote.refused(2, "set", BERT, "--replication", "3")
    boss = ("--yes", "--token", world.secrets["boss"])
    assert "v1" in remote.refused(2, "rm", BERT, *boss)
    remote.ok("rm", f"{BERT}@v1", *boss)
    assert "admin" in remote.refused(2, "rm", BERT, "--yes")
    remote.ok("rm", BERT, *boss)
    assert remote.json("ls")["models"] == []


def test_what_needs_the_database_is_refused_before_the_store_is_tried(
    remote: Cli, world: World
) -> None:
    world.store.url = "hdfs://127.0.0.1:1/yard"
    for words in (["gc"], ["check"]):
        assert "WEIGHTYARD_DB" in remote.refused(2, *words)


def test_collecting_needs_the_database_and_says_so(remote: Cli) -> None:
    for command in (["gc"], ["check"], ["db", "upgrade"]):
        assert "WEIGHTYARD_DB" in remote.refused(2, *command)
