"""Every mistake has one line that says what to do, and the exit code of its group."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_runs import Cli

import weightyard
from weightyard.errors import Refused

BERT = "team/bert"


@pytest.mark.parametrize(
    "name",
    [
        "bert", "team/", "/bert", "team/../etc", "team/..", "team/%2e%2e", "team/be rt",
        "team/b\tt", "team/bért", "team/" + "b" * 97, "team/bert/more", "-team/bert\x00",
    ],
)  # fmt: skip
def test_a_hostile_name_is_refused_and_leaves_nothing(
    cli: Cli, base: Path, name: str, tmp_path: Path
) -> None:
    assert cli.refused(2, "push", "--", base, name).startswith("weightyard: model name")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("alias", ["latest", "v3", "PROD", "a b", "../x", "deadbeef"])
def test_an_alias_that_would_read_as_something_else_is_refused(
    cli: Cli, base: Path, alias: str
) -> None:
    assert "alias" in cli.refused(2, "push", base, BERT, "--alias", alias)


def test_a_name_with_a_slip_gets_a_suggestion(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    assert cli.refused(2, "show", "team/brt").endswith("Did you mean team/bert?")
    assert "team/bert" in cli.refused(2, "ls", "teem/bert")
    said = cli.refused(2, "pull", f"{BERT}@pord", "out")
    assert "@prod" in said
    assert "@v1" in said
    assert cli("shwo", BERT).code == 2
    assert "Did you mean" in cli("shwo", BERT).err


def test_who_lists_a_project_without_its_slash_is_told_of_it(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    assert cli.refused(2, "ls", "team").endswith("for the models of a project: weightyard ls team/")


def test_a_yard_of_many_models_suggests_those_of_the_project(
    cli: Cli, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.cli.refs._PAGE", 2)
    for name in ("a/one", "a/two", "team/a1", "team/a2", "team/llama", "team/zoo", BERT):
        cli.ok("push", base, name, "--alias", "prod")
    assert "Did you mean team/bert" in cli.refused(2, "show", "team/brt")
    assert "Did you mean team/llama" in cli.refused(2, "show", "team/lama")
    assert "team/a1" in cli.refused(2, "show", "team/x1")
    assert "@prod" in cli.refused(2, "show", "team/zoo@pord")


def test_an_empty_yard_says_how_to_begin(cli: Cli) -> None:
    assert "weightyard push" in cli.ok("ls")
    assert "no models yet" in cli.refused(2, "show", BERT)


def test_a_missing_or_empty_folder_is_named(cli: Cli, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in cli.refused(2, "push", tmp_path / "nowhere", BERT)
    (tmp_path / "empty").mkdir()
    assert "has no files" in cli.refused(2, "push", tmp_path / "empty", BERT)


def test_a_pattern_that_fits_nothing_says_what_there_is(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    assert "no file that fits" in cli.refused(2, "push", base, BERT, "--include", "*.bin")
    cli.ok("push", base, BERT)
    said = cli.refused(2, "pull", BERT, tmp_path / "out", "--include", "*.bin")
    assert "model.safetensors" in said
    assert not (tmp_path / "out").exists()


def test_a_link_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to("/etc/passwd")
    assert "--follow-links" in cli.refused(2, "push", tmp_path / "model", BERT)
    (tmp_path / "model" / "link").unlink()
    (tmp_path / "model" / "link").symlink_to(tmp_path)
    said = cli.refused(2, "push", tmp_path / "model", BERT, "--follow-links")
    assert "link to a folder" in said
    (tmp_path / "model" / "link").unlink()
    (tmp_path / "model" / "link").symlink_to("gone")
    said = cli.refused(2, "push", tmp_path / "model", BERT, "--follow-links")
    assert "leads nowhere" in said


def test_a_folder_of_links_is_pushed_as_what_they_point_to_if_that_is_asked_for(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "models--bert" / "snapshots" / "1a2b"
    hub.mkdir(parents=True)
    for file in base.iterdir():
        (hub / file.name).symlink_to(os.path.relpath(file, hub))
    pushed = cli.json("push", hub, BERT, "--follow-links")
    assert pushed["digest"] == cli.json("push", base, BERT)["digest"]


def test_who_pushes_what_is_no_ordinary_safetensors_file_is_told_why_it_has_no_tensors(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    model = tmp_path / "cut"
    model.mkdir()
    whole = (base / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-7])
    for dry in (["--dry-run"], []):
        ran = cli("push", model, BERT, *dry)
        assert ran.code == 0
        assert (
            "model.safetensors is kept as plain bytes, without tensors: 7 bytes too few" in ran.err
        )
    assert cli("push", model, BERT, "-q").err == ""
    assert cli("push", base, BERT).err == ""


def test_every_file_that_is_kept_without_tensors_is_named(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    whole = (base / "model.safetensors").read_bytes()
    model = tmp_path / "cut"
    model.mkdir()
    for number in (1, 2, 3):
        (model / f"shard-{number}.safetensors").write_bytes(whole[:-number])
    told = cli("push", model, BERT).err.splitlines()
    kept = "is kept as plain bytes, without tensors:"
    assert [line for line in told if kept in line] == [
        f"weightyard: shard-{number}.safetensors {kept} {number} bytes too few"
        for number in (1, 2, 3)
    ]


def test_what_a_file_says_of_itself_is_shown_and_never_obeyed(cli: Cli, tmp_path: Path) -> None:
    header = rb'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"\u001b]0;owned\u0007":1}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    said = cli("push", file, BERT).err
    assert "owned" in said
    assert "\x1b" not in said
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "\x1b]0;owned\x07").symlink_to(file)
    said = cli.refused(2, "push", tmp_path / "model", BERT)
    assert "owned" in said
    assert "\x1b" not in said


def test_what_is_there_is_never_overwritten(cli: Cli, base: Path, tmp_path: Path) -> None:
    cli.ok("push", base, BERT)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert "config.json is there already" in cli.refused(4, "pull", BERT, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    assert "/proc/here" in cli.refused(2, "pull", BERT, "/proc/here")
    assert "/proc" in cli.refused(2, "--yard", "/proc/yard", "ls")


def test_a_yard_of_an_empty_name_is_not_the_default_one(cli: Cli) -> None:
    assert "URL or folder is empty" in cli.refused(2, "--yard", "", "ls")
    assert "URL or folder is empty" in cli.refused(2, "ls", "--yard", "")


@pytest.mark.parametrize(
    "words",
    [("serve", "--store", ""), ("db", "current", "--db", ""), ("db", "upgrade", "--db", "")],
)
def test_a_store_or_database_of_an_empty_name_is_not_the_default_one(
    cli: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert "URL" in cli.refused(2, *words)
    assert not (tmp_path / "home").exists()


def test_a_folder_of_an_empty_name_is_not_the_one_a_user_is_in(
    cli: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("push", base, BERT)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is empty" in cli.refused(2, "pull", BERT, "")
    assert not list((tmp_path / "here").iterdir())
    monkeypatch.chdir(base)
    assert "is empty" in cli.refused(2, "push", "", BERT)
    with weightyard.open() as yard, pytest.raises(Refused, match="is empty"):
        yard.push("", BERT)
    assert "Published team/bert@v2" in cli.ok("push", ".", BERT)


def test_a_file_where_a_folder_is_meant_is_called_a_file(
    cli: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("push", base, BERT)
    file = base / "config.json"
    assert f"{file} is a file, not a folder" in cli.refused(2, "pull", BERT, file)
    assert f"{file} is a file, not a folder" in cli.refused(2, "--yard", file, "ls")
    monkeypatch.setenv("WEIGHTYARD_DB", f"sqlite:///{tmp_path}/apart.db")
    assert f"{file} is a file, not a folder" in cli.refused(2, "--yard", file, "ls")


def test_a_folder_of_other_files_becomes_no_yard_unless_that_is_asked_for(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(base, folder)
    folder.chmod(0o700)
    before = sorted(folder.iterdir())
    for words in (["ls"], ["push", base, BERT], ["doctor"], ["serve", "--port", "0"]):
        ran = cli("--yard", folder, *words)
        assert ran.code != 0, words
        assert "config.json" in ran.out + ran.err
        assert "weightyard init" in ran.out + ran.err
    assert (sorted(folder.iterdir()), folder.stat().st_mode & 0o777) == (before, 0o700)
    cli.ok("--yard", folder, "init")
    assert cli.ok("--yard", folder, "ls").startswith("No models yet")


def test_an_empty_folder_and_a_fresh_disk_become_a_yard_by_themselves(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    (tmp_path / "disk" / ".Trash-0").mkdir()
    for folder in ("new", "disk"):
        assert cli.ok("--yard", tmp_path / folder, "ls").startswith("No models yet")


def test_url_and_store_together_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTYARD_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WEIGHTYARD_STORE", "/tmp/never")
    assert "both set" in cli.refused(2, "ls")


def test_a_service_that_does_not_answer_is_named(cli: Cli) -> None:
    said = cli.refused(3, "--yard", "http://127.0.0.1:1", "ls")
    assert "http://127.0.0.1:1 does not answer" in said


def test_who_waits_for_a_service_is_told_why_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "3")
    ran = cli("--yard", "http://127.0.0.1:1", "ls")
    assert ran.code == 3
    notice, error = ran.err.splitlines()
    assert notice.startswith("weightyard: service 127.0.0.1: ConnectError: ")
    assert notice.endswith(": trying again")
    assert "does not answer" in error


@pytest.mark.parametrize("proxy", ["nonsense://127.0.0.1:9", "http://127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_named(
    cli: Cli, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert "ALL_PROXY" in cli.refused(2, "--yard", "http://127.0.0.1:1", "ls")


def test_who_runs_a_yard_needs_more_than_a_service(cli: Cli) -> None:
    for command in (["db", "current"], ["init"], ["rebuild", "--yes"]):
        assert "is a service" in cli.refused(2, "--yard", "http://127.0.0.1:1", *command)


def test_offline_the_database_is_not_taken_for_a_service(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_OFFLINE", "1")
    for command in ("gc", "check"):
        assert "the work is offline (WEIGHTYARD_OFFLINE)" in cli.refused(2, command)


def test_a_store_of_another_registry_names_both(
    cli: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("--yard", tmp_path / "yard", "push", base, BERT)
    monkeypatch.setenv("WEIGHTYARD_DB", f"sqlite:///{tmp_path}/other.db")
    said = cli.refused(2, "--yard", tmp_path / "yard", "ls")
    assert "belongs to registry" in said
    assert "rebuild --adopt" in said


def test_a_database_url_that_makes_no_sense_is_refused_without_showing_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in (
        "secret", "mysql://me:secret@host/x", "postgresql://me:secret@host:port/x",
        "sqlite+aiosqlite:///secret", "postgresql+asyncpg://me:secret@host/x",
    ):  # fmt: skip
        monkeypatch.setenv("WEIGHTYARD_DB", url)
        said = cli.refused(2, "ls")
        assert "postgresql://" in said
        assert "secret" not in said


def test_a_database_with_no_schema_says_which_command_to_run(cli: Cli, tmp_path: Path) -> None:
    db = f"sqlite:///{tmp_path}/new.db"
    ran = cli("db", "current", "--db", db)
    assert ran.code == 1
    assert "weightyard db upgrade" in ran.out
    cli.ok("db", "upgrade", "--db", db)
    assert cli.json("db", "current", "--db", db)["is_current"]


def test_a_database_of_a_newer_weightyard_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    import sqlite3

    cli.ok("init")
    (database,) = (tmp_path / "home" / "store").glob("*.db")
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for command in (["ls"], ["db", "upgrade"]):
        said = cli.refused(2, *command)
        assert said.endswith("newer than this weightyard: run `pip install --upgrade weightyard`")


def test_options_that_do_not_fit_are_usage_errors(cli: Cli, base: Path) -> None:
    for words in (
        ["push", base, BERT, "--metric", "accuracy"],
        ["push", base, BERT, "--metric", "accuracy=good"],
        ["push", base, BERT, "--metric", "accuracy=nan"],
        ["push", base, BERT, "--replication", "0"],
        ["push", base, BERT, "--codec", "zip"],
        ["gc", "--grace", "soon"],
        ["init", "--mode", "9"],
        ["set", BERT],
        ["alias", "set", BERT, "prod", "1", "--expect", "yesterday"],
        ["token", "create", "ci", "--role", "king"],
        ["retention", BERT, "--off", "--keep-last", "1"],
        ["retention", BERT, "--keep-last", "1000001"],
        ["retention", BERT, "--ttl", "999999w"],
    ):
        ran = cli(*words)
        assert ran.code == 2, words
        assert "Usage" in ran.err


def test_a_folder_keeps_one_copy(cli: Cli, base: Path) -> None:
    assert "hdfs://" in cli.refused(2, "push", base, BERT, "--replication", "3")
    assert cli.json("ls")["models"] == []
    cli("push", base, BERT)
    for asked in (["--replication", "2"], ["--policy", "COLD"]):  # of what is there already
        assert "hdfs://" in cli.refused(2, "push", base, BERT, *asked)
    assert cli.json("show", BERT)["version"] == 1
    cli.ok("push", base, BERT)
    assert "one copy" in cli.refused(2, "set", BERT, "--replication", "2")


def test_a_message_too_long_is_refused_before_anything_is_read(cli: Cli, base: Path) -> None:
    assert "message" in cli.refused(2, "push", base, BERT, "-m", "x" * 10_001)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tag", b"k=\xff"), ("--metadata", b"k=\xff"), ("--message", b"\xff"), ("--tag", b"\xff=v")],
)
def test_text_that_is_none_is_refused_before_anything_is_sent(
    cli: Cli, base: Path, option: str, value: bytes
) -> None:
    text = os.fsdecode(value)
    assert cli.refused(2, "push", base, BERT, option, text).startswith(f"weightyard: {option[2:]}")
    cli.ok("push", base, BERT)
    assert cli.refused(2, "annotate", BERT, option, text).startswith(f"weightyard: {option[2:]}")
    assert cli.json("show", BERT)["number"] == 1


def test_a_reason_that_is_no_text_is_refused_and_nothing_is_done(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", base, BERT, "--alias", "prod")
    bad = ("--reason", os.fsdecode(b"\xff"))
    for command in (
        ("alias", "set", BERT, "next", "v1"),
        ("alias", "rollback", BERT, "prod"),
        ("alias", "rm", BERT, "prod"),
        ("rm", f"{BERT}@v1", "--yes"),
    ):
        assert cli.refused(2, *command, *bad).startswith("weightyard: reason: ")
    assert cli.json("show", BERT)["aliases"] == ["prod"]


def test_with_json_an_error_is_json_too(cli: Cli) -> None:
    line = cli.refused(2, "show", BERT, "--json")
    assert json.loads(line)["error"] == "no-such-thing"
    assert BERT in json.loads(line)["message"]


def test_text_others_wrote_is_shown_and_never_obeyed(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT, "-m", "\x1b]0;owned\x07[bold red]hi[/]\nsecond line")
    for command in (["ls", BERT], ["show", BERT]):
        shown = cli.ok(*command)
        assert "\x1b" not in shown
        assert "[bold red]hi[/]" in shown
