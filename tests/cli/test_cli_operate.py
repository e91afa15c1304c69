"""What who runs a yard does, on the embedded default."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Cli

import weightyard
from weightyard.names import AliasName, ModelName
from weightyard.registry.database import now_ms

BERT = "team/bert"


@pytest.fixture
def two(cli: Cli, base: Path, tuned: Path) -> Cli:
    """A yard with two versions, the first with an alias."""
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    return cli


def test_gc_frees_what_rm_said_and_keeps_the_rest(two: Cli, base: Path, tmp_path: Path) -> None:
    assert "Nothing to collect" in two.ok("gc", "--dry-run")
    freed = two.json("rm", f"{BERT}@v2", "--yes")["freed_bytes"]
    plan = two.json("gc", "--dry-run", "--grace", "0s")
    assert plan["deleted_bytes"] >= freed
    assert all(item["why"] for item in plan["items"])
    said = two.ok("gc", "--dry-run")
    assert "1 pack would be condemned" in said
    assert "to be deleted by a gc after the grace of 1w" in said
    assert two.json("gc")["packs_deleted"] == 0  # its grace has only begun
    assert "`gc --dry-run` shows what waits" in two.ok("gc")
    assert "1 pack waiting for the grace to be over" in two.ok("gc", "--dry-run")
    done = two.json("gc", "--grace", "0s")
    assert (done["dry_run"], done["deleted_bytes"]) == (False, plan["deleted_bytes"])
    two.ok("pull", BERT, tmp_path / "out")
    assert two.json("check", "--read-data")["clean"]


def test_a_short_grace_on_a_shared_yard_must_be_meant(
    cli: Cli, base: Path, postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_DB", postgres())
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "30")
    cli.ok("push", base, BERT)
    assert "--unsafe-grace" in cli.refused(2, "gc", "--grace", "1h")
    cli.ok("gc", "--grace", "1h", "--unsafe-grace")


def test_check_names_what_is_damaged_and_which_versions_need_it(two: Cli, tmp_path: Path) -> None:
    pack = max(
        (tmp_path / "home" / "store" / "packs").rglob("*"), key=lambda path: path.stat().st_size
    )
    pack.chmod(0o644)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    ran = two("check", "--read-data")
    assert ran.code == 5
    assert pack.name in ran.out
    assert f"{BERT}@v1" in ran.out


def test_check_reports_a_file_nobody_knows_and_leaves_it(two: Cli, tmp_path: Path) -> None:
    stray = tmp_path / "home" / "store" / "packs" / "00" / ("00" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"?")
    ran = two("check")
    assert (ran.code, ran.err) == (5, ""), "what is found is the result, not also a notice"
    assert stray.name in ran.out
    two.ok("gc", "--grace", "0s")
    assert stray.exists()


def test_a_lost_database_is_rebuilt_from_the_store(two: Cli, tmp_path: Path) -> None:
    two.ok("alias", "set", BERT, "prod", "2", "--reason", "better")
    before = two.json("ls", BERT), two.json("alias", "log", BERT, "prod")
    for file in (tmp_path / "home" / "store").glob("registry.db*"):
        file.unlink()
    assert "rebuild" in two.refused(2, "ls")
    assert "--yes" in two.refused(2, "rebuild")
    said = two.ok("rebuild", "--yes")
    assert "2 versions" in said
    assert "tokens" in said
    after = two.json("ls", BERT), two.json("alias", "log", BERT, "prod")
    assert [version["digest"] for version in after[0]["versions"]] == [
        version["digest"] for version in before[0]["versions"]
    ]
    assert after[1] == before[1]


def test_a_store_moved_elsewhere_can_be_adopted(two: Cli, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "home" / "store", tmp_path / "backup")
    for file in (tmp_path / "backup").glob("registry.db*"):
        file.unlink()
    report = two.json("--yard", tmp_path / "backup", "rebuild", "--adopt", "--yes")
    assert report["versions"] == 2
    assert two.json("--yard", tmp_path / "backup", "show", f"{BERT}@prod")["version"] == 1


def test_retention_is_shown_set_and_lifted(two: Cli) -> None:
    assert "every version stays" in two.ok("retention", BERT)
    set_to = two.json("retention", BERT, "--keep-last", "3", "--ttl", "30d")
    kept = {key: value for key, value in set_to["retention"].items() if value is not None}
    assert kept == {"keep_last": 3, "ttl_s": 30 * 86400}
    assert two.json("retention", BERT) == set_to
    assert "newest 3 stay and each stays for 30d" in two.ok("retention", BERT)
    assert two.json("retention", BERT, "--off")["retention"] is None


def test_gc_removes_what_retention_lets_go(cli: Cli, base: Path, tuned: Path) -> None:
    for folder in (base, tuned, base):
        cli.ok("push", folder, BERT)
    cli.ok("retention", BERT, "--keep-last", "1")
    assert cli.json("gc", "--dry-run")["versions_removed"] == 2
    cli.ok("gc")
    assert [version["version"] for version in cli.json("ls", BERT)["versions"]] == [3]


def test_a_token_is_shown_once(cli: Cli) -> None:
    made = cli.json("token", "create", "ci", "--role", "write", "--project", "team")
    assert made["secret"].startswith("wy_")
    listed = cli.json("token", "ls")["tokens"]
    assert [(token["name"], token["role"], token["projects"]) for token in listed] == [
        ("ci", "write", ["team"])
    ]
    assert made["secret"] not in cli.ok("token", "ls")
    cli.ok("token", "revoke", "ci")
    assert cli.json("token", "ls")["tokens"][0]["revoked"]
    quiet = cli.ok("token", "create", "laptop", "-q")
    assert quiet.startswith("wy_")
    assert len(quiet.split()) == 1


def test_init_states_the_modes_and_may_be_repeated(cli: Cli, tmp_path: Path) -> None:
    made = cli.json("--yard", tmp_path / "yard", "init", "--mode", "0750")
    assert (tmp_path / "yard" / "packs").stat().st_mode & 0o777 == 0o750
    assert cli.json("--yard", tmp_path / "yard", "init") == made
    assert (tmp_path / "yard" / "packs").stat().st_mode & 0o777 == 0o750
    cli.ok("--yard", tmp_path / "yard", "init", "--mode", "0700")
    assert (tmp_path / "yard" / "packs").stat().st_mode & 0o777 == 0o700
    assert cli.json("--yard", tmp_path / "yard", "ls")["models"] == []


def test_an_owner_nobody_knows_is_refused(cli: Cli) -> None:
    assert "knows no user" in cli.refused(2, "init", "--owner", "nobody-here")
    assert "knows no group" in cli.refused(2, "init", "--group", "nobody-here")


def test_looking_at_a_database_that_is_not_there_does_not_make_it(cli: Cli, tmp_path: Path) -> None:
    said = cli("db", "current", "--db", f"sqlite:///{tmp_path}/typo.db", "--json")
    assert (said.code, json.loads(said.out)["schema"]) == (1, None)
    assert "db upgrade" in cli("db", "current").out
    assert "db upgrade" in cli("--yard", tmp_path / "typo", "db", "current").out
    assert not (tmp_path / "typo").exists()
    assert not (tmp_path / "home").exists()
    assert not [*tmp_path.rglob("*.db*")]


def test_whether_projects_share_content_is_chosen_by_init_and_shown_by_doctor(
    cli: Cli, tmp_path: Path
) -> None:
    yard = ["--yard", tmp_path / "yard"]
    assert cli.json(*yard, "init", "--dedup", "project")["dedup"] == "project"
    (tmp_path / "file").write_bytes(b"weights" * 1000)
    for project in ("red", "blue", "red"):
        cli.ok(*yard, "push", tmp_path / "file", f"{project}/bert")
    assert len([*(tmp_path / "yard" / "packs").glob("*/*")]) == 2
    found = {one["check"]: one["message"] for one in cli.json(*yard, "doctor")["findings"]}
    assert "once in each project" in found["dedup"]
    assert cli(*yard, "init", "--dedup", "yard").code == 2, "the choice stays"
    assert cli.json(*yard, "init")["dedup"] == "project"


def test_a_file_beside_a_yards_folders_is_found_and_its_database_is_none(
    cli: Cli, tmp_path: Path
) -> None:
    root = tmp_path / "yard"
    (tmp_path / "file").write_bytes(b"weights" * 1000)
    cli.ok("--yard", root, "push", tmp_path / "file", "team/bert")
    cli.ok("--yard", root, "gc")
    assert (root / "registry.db").is_file()
    assert cli.json("--yard", root, "check")["findings"] == []
    (root / "notes.txt").write_text("whose?")
    (finding,) = json.loads(cli("--yard", root, "check", "--json").out)["findings"]
    assert (finding["code"], finding["subject"]) == ("unknown-file", "notes.txt")


def test_a_dry_run_tells_what_a_push_sends_where_projects_share_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    yard = ["--yard", tmp_path / "yard"]
    cli.ok(*yard, "init", "--dedup", "project")
    (tmp_path / "file").write_bytes(b"weights" * 1000)
    cli.ok(*yard, "push", tmp_path / "file", "red/bert")
    for project, new_bytes in (("red", 0), ("blue", 7000)):
        push = [*yard, "push", tmp_path / "file", f"{project}/bert"]
        assert cli.json(*push, "--dry-run")["new_bytes"] == new_bytes
        assert cli.json(*push)["new_bytes"] == new_bytes


def test_doctor_finds_nothing_to_mend_on_a_yard_that_works(
    two: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.doctor._LITTLE_ROOM_BYTES", 0)  # whatever this disk has left
    monkeypatch.setattr("weightyard.codec.compiled.is_there", lambda: True)  # where no compiler was
    found = {finding["check"]: finding["state"] for finding in two.json("doctor")["findings"]}
    expected = {
        "versions",
        "codec",
        "settings",
        "store",
        "room",
        "database",
        "clock",
        "schema",
        "binding",
    }
    assert expected <= found.keys()
    assert set(found.values()) == {"ok"}


def test_doctor_says_what_makes_the_codec_faster_where_there_was_no_compiler(
    two: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.codec.compiled._functions", {})
    found = {one["check"]: one for one in two.json("doctor")["findings"]}
    assert found["codec"]["state"] == "warn"
    assert "install a C compiler" in found["codec"]["advice"]


def test_doctor_and_check_say_that_records_wait_to_be_written(
    two: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.registry.outbox._LATE_S", -1)
    with weightyard.open() as yard:
        yard.registry.move_alias(ModelName.parse(BERT), AliasName("prod"), 2)
    assert "warn  records: records and journal entries that are not in" in two.ok("doctor")
    ran = two("check")
    assert (ran.code, "records-late: journal/" in ran.out) == (5, True)
    two.ok("check", "--heal")
    assert two.json("check")["clean"]


def test_doctor_looks_without_making_anything(cli: Cli, tmp_path: Path) -> None:
    said = cli.ok("doctor")
    assert "the first push makes it" in said
    assert not (tmp_path / "home").exists()


def test_doctor_fails_with_advice_where_something_is_wrong(
    two: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, check in (
        (["--yard", "hdfs://127.0.0.1:1/yard"], "hdfs"),
        (["--yard", "http://127.0.0.1:1"], "service"),
        (["--yard", "s3://bucket"], "store"),
    ):
        ran = two("doctor", "-q", *words)
        assert ran.code == 1
        (failed,) = [line for line in ran.out.splitlines() if line.startswith("fail")]
        assert failed.startswith(f"fail  {check}: ")
    monkeypatch.setenv("WEIGHTYARD_DB", f"sqlite:///{tmp_path}/other.db")
    two.ok("db", "upgrade")
    ran = two("doctor", "-q")
    assert ran.code == 1
    assert "fail  binding: " in ran.out


def test_every_finding_of_doctor_that_is_not_well_says_what_to_do(
    two: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.doctor._LITTLE_ROOM_BYTES", 1 << 62)
    for words in (
        ["--yard", "hdfs://127.0.0.1:1/yard"],
        ["--yard", "http://127.0.0.1:1"],
        ["--yard", "s3://bucket"],
        ["--yard", tmp_path / "none"],
        [],
    ):
        findings = json.loads(two("doctor", "--json", *words).out)["findings"]
        unwell = [one for one in findings if one["state"] != "ok"]
        assert unwell, words
        assert [one for one in unwell if not one["advice"]] == [], words


@pytest.mark.parametrize(
    ("off_s", "state", "said"),
    [
        (0, "ok", "agree to"),
        (60, "warn", "behind the database"),
        (-60, "warn", "ahead of the database"),
        (600, "fail", "behind the database"),
    ],
)
def test_doctor_tells_of_a_clock_that_is_off(
    two: Cli, monkeypatch: pytest.MonkeyPatch, off_s: int, state: str, said: str
) -> None:
    monkeypatch.setattr("weightyard.doctor.now_ms", lambda: now_ms() + off_s * 1000)
    ran = two("doctor", "--json")
    (clock,) = [one for one in json.loads(ran.out)["findings"] if one["check"] == "clock"]
    assert (clock["state"], said in clock["message"]) == (state, True), clock
    assert ("NTP" in clock["advice"]) == (state != "ok")
    assert ran.code == (1 if state == "fail" else 0)


def test_healing_is_done_only_when_all_was_listed(
    two: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.registry.check.MAX_FINDINGS", 1)
    for record in (tmp_path / "home").rglob("models/**/v*.json"):
        record.unlink()
    ran = two("check", "--heal")
    assert ran.code == 5, ran.out
    assert "1 thing healed, 0 left." in ran.out
    assert "run it again" in ran.out
    assert two("check", "--heal").code == 0
    assert two.json("check")["clean"]
