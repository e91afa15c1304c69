"""What people do with models, on the embedded default, as they would type it."""

from __future__ import annotations

import filecmp
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli
from rich.console import Console

import weightyard
from weightyard.cli.load import _show_report
from weightyard.loader.report import LoadReport

BERT = "team/bert"


def _same(left: Path, right: Path) -> bool:
    names = sorted(path.relative_to(left).as_posix() for path in left.rglob("*") if path.is_file())
    there = sorted(
        path.relative_to(right).as_posix() for path in right.rglob("*") if path.is_file()
    )
    return names == there and filecmp.cmpfiles(left, right, names, shallow=False)[0] == names


def test_what_is_pushed_comes_back_bit_for_bit_by_its_alias(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    said = cli.ok("push", base, BERT, "--alias", "prod", "-m", "first try")
    assert "team/bert@v1" in said
    assert "prod" in said
    assert cli.json("show", BERT)["last_used"] is None
    cli.ok("pull", f"{BERT}@prod", tmp_path / "out")
    assert _same(base, tmp_path / "out")
    assert cli.json("show", BERT)["last_used"] is not None


def test_show_speaks_of_the_namenode_only_where_there_is_one(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    assert "NameNode" not in cli.ok("show", BERT)
    assert cli.json("show", BERT)["cost"]["namenode_objects"] > 0, "the keys stay"


def test_a_project_without_models_is_said_to_have_none(cli: Cli, base: Path) -> None:
    assert re.search(r"^No models yet in /\S+: weightyard push FOLDER PROJECT/NAME$", cli.ok("ls"))
    cli.ok("push", base, BERT)
    said = cli.ok("ls", "other/")
    assert "No models in project other of /" in said
    assert "push FOLDER other/NAME" in said
    assert cli.json("ls", "other/")["models"] == []


def test_a_second_push_of_the_same_sends_nothing(cli: Cli, base: Path) -> None:
    first = cli.json("push", base, BERT)
    again = cli.json("push", base, BERT)
    assert first["new_bytes"] == first["logical_bytes"] > 0
    assert (again["version"], again["digest"]) == (2, first["digest"])
    assert (again["new_bytes"], again["stored_bytes"], again["packs_written"]) == (0, 0, 0)


def test_a_dry_run_tells_what_a_push_then_sends_and_leaves_nothing(
    cli: Cli, base: Path, tuned: Path
) -> None:
    cli.ok("push", base, BERT)
    plan = cli.json("push", tuned, BERT, "--dry-run")
    assert [version["version"] for version in cli.json("ls", BERT)["versions"]] == [1]
    pushed = cli.json("push", tuned, BERT)
    assert (plan["new_bytes"], plan["digest"]) == (pushed["new_bytes"], pushed["digest"])
    assert {file["path"]: file["new_bytes"] for file in plan["files"]}["config.json"] == 0
    assert "Nothing was sent" in cli.ok("push", tuned, BERT, "--dry-run")


def test_a_version_keeps_what_its_author_said_of_it(cli: Cli, base: Path, tuned: Path) -> None:
    cli.ok("push", base, BERT)
    cli.ok(
        "push", tuned, BERT, "--parent", BERT, "-m", "tuned", "--metric", "accuracy=0.93",
        "--metric", "loss=1e-3", "--tag", "data=v2",
    )  # fmt: skip
    shown = cli.json("show", BERT)
    assert shown["parent"] == f"{BERT}@v1"
    assert shown["metrics"] == {"accuracy": 0.93, "loss": 0.001}
    assert (shown["tags"], shown["message"]) == ({"data": "v2"}, "tuned")
    assert shown["structure"]["config"] == {"layers": 2}
    human = cli.ok("show", BERT, "--tensors")
    assert "accuracy=0.93" in human
    assert "256×128" in human


def test_what_is_said_of_a_version_can_be_said_later(cli: Cli, base: Path) -> None:
    cli.ok(
        "push", base, BERT, "--tag", "task=qa", "--metadata", "rows=87599",
        "--metadata", 'data={"name": "squad"}', "--metadata", "by=the lab",
    )  # fmt: skip
    said = {"rows": 87599, "data": {"name": "squad"}, "by": "the lab"}
    assert cli.json("show", BERT)["metadata"] == said
    shown = cli.ok("show", BERT)
    assert 'rows=87599, data={"name": "squad"}, by=the lab' in shown
    changed = cli.json(
        "annotate", BERT, "-m", "better said", "--metric", "f1=0.9", "--tag", "reviewed=yes",
        "--metadata", "rows=3", "--remove", "task", "--remove", "by",
    )  # fmt: skip
    assert (changed["message"], changed["metrics"]) == ("better said", {"f1": 0.9})
    assert (changed["tags"], changed["metadata"]) == (
        {"reviewed": "yes"},
        {"rows": 3, "data": {"name": "squad"}},
    )
    assert "team/bert@v1 is annotated" in cli.ok("annotate", BERT, "--tag", "a=b")
    assert cli("annotate", BERT).code == 2, "something must be said"
    assert cli("annotate", BERT, "--metric", "f1=good").code == 2
    assert "no model" in cli.refused(2, "annotate", "team/none", "--tag", "a=b")


def test_ls_lists_a_project_and_the_versions_with_a_tag(cli: Cli, base: Path) -> None:
    for name in (BERT, "team/gpt", "teammates/bert"):
        cli.ok("push", base, name)
    cli.ok("push", base, BERT, "--tag", "stage=eval", "--tag", "lang=de")
    cli.ok("push", base, BERT, "--tag", "stage=eval")
    assert [model["name"] for model in cli.json("ls", "team/")["models"]] == [BERT, "team/gpt"]
    assert cli.json("ls", "nobody/")["models"] == []

    def tagged(*tags: str) -> list[int]:
        options = [word for tag in tags for word in ("--tag", tag)]
        return [one["number"] for one in cli.json("ls", BERT, *options)["versions"]]

    assert tagged("stage=eval") == [3, 2]
    assert tagged("stage=eval", "lang=de") == [2]
    assert tagged("stage=prod") == []
    none = cli.ok("ls", BERT, "--tag", "stage=prod", "--tag", "lang=de")
    assert none.strip() == "No version of team/bert has the tags stage=prod, lang=de"
    assert cli("ls", "--tag", "a=b").code == 2, "of which model?"
    assert cli("ls", "../").code == 2


def test_diff_names_the_tensor_that_changed_and_the_bytes_shared(
    cli: Cli, base: Path, tuned: Path
) -> None:
    cli.ok("push", base, BERT)
    cli.ok("push", tuned, BERT)
    found = cli.json("diff", f"{BERT}@v1", f"{BERT}@v2")
    assert found["tensors_changed"] == ["model.safetensors:head"]
    assert (found["tensors_same"], found["files_same"]) == (1, 1)
    assert found["shared_bytes"] >= 256 * 256 * 4
    assert "~ tensor model.safetensors:head" in cli.ok("diff", f"{BERT}@v1", f"{BERT}@v2")


def test_an_alias_moves_with_its_history_and_rolls_back(cli: Cli, base: Path, tuned: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    cli.ok("alias", "set", BERT, "prod", "v2", "--reason", "better", "--expect", "1")
    assert cli.json("show", f"{BERT}@prod")["version"] == 2
    cli.ok("alias", "rollback", BERT, "prod", "--reason", "latency")
    moves = cli.json("alias", "log", BERT, "prod")["moves"]
    assert [(move["before"], move["after"]) for move in moves] == [(2, 1), (1, 2), (None, 1)]
    assert [move["reason"] for move in moves[:2]] == ["latency", "better"]
    assert "better" in cli.ok("alias", "log", BERT, "prod")
    before = cli.ok("alias", "log", BERT, "prod", "--as-of", "2001-02-03T04:05:00")
    assert before.strip() == "team/bert had no alias prod by 2001-02-03 04:05 UTC"
    assert cli.ok("alias", "log", BERT, "beta").strip() == "team/bert never had the alias beta"
    cli.ok("alias", "rm", BERT, "prod")
    cli.refused(2, "show", f"{BERT}@prod")


def test_an_alias_is_put_on_a_version_by_its_ref_too(cli: Cli, base: Path, tuned: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    cli.ok("alias", "set", BERT, "prod", f"{BERT}@v2")
    cli.ok("alias", "set", BERT, "canary", f"{BERT}@prod")
    assert cli.json("show", f"{BERT}@canary")["version"] == 2
    assert "no version of team/bert" in cli("alias", "set", BERT, "prod", "team/gpt@v1").err
    assert "leave out" in cli.refused(2, "alias", "set", f"{BERT}@v1", "prod", "v2")


def test_an_alias_that_was_moved_meanwhile_is_a_conflict_that_says_where_it_is(
    cli: Cli, base: Path, tuned: Path
) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    said = cli.refused(4, "alias", "set", BERT, "prod", "2", "--expect", "v2")
    assert "is on v1" in said
    said = cli.refused(4, "alias", "set", BERT, "prod", "2", "--expect", "none")
    assert cli.json("show", f"{BERT}@prod")["version"] == 1


def test_rm_says_what_it_frees_and_asks_where_someone_can_answer(
    cli: Cli, base: Path, tuned: Path
) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    cli.ok("push", tuned, BERT)
    said = cli.refused(2, "rm", f"{BERT}@v2")
    assert "KiB" in said
    assert "--yes" in said
    assert cli.json("ls", BERT)["versions"][0]["version"] == 2
    removed = cli.json("rm", f"{BERT}@v2", "--yes")
    assert 0 < removed["freed_bytes"] < 256 * 256 * 4
    assert [version["version"] for version in cli.json("ls", BERT)["versions"]] == [1]


def test_rm_guesses_no_version_and_takes_none_with_an_alias(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    assert "v1 @prod" in cli.refused(2, "rm", BERT, "--yes")
    assert "alias prod" in cli.refused(2, "rm", f"{BERT}@v1", "--yes")


def test_a_model_goes_when_its_versions_have_gone(cli: Cli, base: Path, tuned: Path) -> None:
    for folder in (base, tuned):
        cli.ok("push", folder, BERT)
    said = cli.refused(2, "rm", BERT, "--yes")
    assert "2 versions (v2, v1)" in said
    for number in (1, 2):
        cli.ok("rm", f"{BERT}@v{number}", "--yes")
    assert "--yes" in cli.refused(2, "rm", BERT)
    assert cli.json("rm", BERT, "--yes") == {"model": BERT}
    assert cli.json("ls")["models"] == []
    assert "no model" in cli.refused(2, "rm", BERT, "--yes")
    assert cli.json("push", base, BERT)["version"] == 3, "its numbers are not given out again"


def test_only_files_that_fit_are_pushed_and_pulled(cli: Cli, base: Path, tmp_path: Path) -> None:
    assert cli.json("push", base, BERT, "--exclude", "*.json")["files"] == 1
    cli.ok("push", base, BERT)
    pulled = cli.json("pull", BERT, tmp_path / "out", "--include", "*.json")
    assert (pulled["files"], pulled["bytes"]) == (1, 13)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_a_pull_that_was_killed_goes_on_with_the_files_that_are_not_there(
    cli: Cli, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for name in ("a.bin", "b.bin", "c.bin"):
        (model / name).write_bytes(os.urandom(3_000_000))
    cli.ok("push", model, BERT)
    killed = subprocess.run([sys.executable, "-c", _KILLED_IN_B, BERT, out], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(file.name for file in out.glob("*.bin")) == ["a.bin"]
    before = (out / "a.bin").stat().st_ino
    assert cli.json("pull", BERT, out)["files"] == 3
    assert (out / "a.bin").stat().st_ino == before
    assert all((out / file.name).read_bytes() == file.read_bytes() for file in model.iterdir())


_KILLED_IN_B = """
import os, pathlib, signal, sys, weightyard

ref, out = sys.argv[1], pathlib.Path(sys.argv[2])

def told(done_bytes):
    if (out / "a.bin").exists():
        os.kill(os.getpid(), signal.SIGKILL)

with weightyard.open() as yard:
    yard.pull(ref, out, progress=told)
"""


def test_one_file_can_be_pushed(cli: Cli, base: Path) -> None:
    pushed = cli.json("push", base / "model.safetensors", BERT)
    assert (pushed["files"], pushed["tensors"]) == (1, 2)


def test_a_delta_comes_back_bit_for_bit(cli: Cli, base: Path, tuned: Path, tmp_path: Path) -> None:
    cli.ok("push", base, BERT)
    cli.ok("push", tuned, BERT, "--parent", f"{BERT}@v1", "--delta", "only")
    cli.ok("pull", f"{BERT}@v2", tmp_path / "out")
    assert _same(tuned, tmp_path / "out")
    assert cli("push", tuned, BERT, "--delta", "only").code == 2


def test_load_tells_what_came(cli: Cli, base: Path) -> None:
    pytest.importorskip("torch")
    cli.ok("push", base, BERT)
    assert cli.json("load", BERT)["tensors"] == 2
    assert "warp" in cli.refused(2, "load", BERT, "--device", "warp")
    assert cli.json("load", BERT, "--tensors", "h*", "--dtype", "bfloat16")["tensors"] == 1
    assert "no tensor fits 'q'" in cli.refused(2, "load", BERT, "--tensors", "q")
    assert "config.json" in cli.refused(2, "load", BERT, "--files", "config.json")


def test_load_reports_each_time_it_loaded_and_where_the_bytes_came_from(
    cli: Cli, base: Path
) -> None:
    pytest.importorskip("torch")
    cli.ok("push", base, BERT)
    first, second = cli.json("load", BERT, "--report", "--repeat", "2")["reports"]
    assert first["bytes"] == second["bytes"] == (256 * 256 + 256 * 128) * 4
    assert first["read_paths"] == {"local": first["stored_bytes"]}
    assert {"resolve", "plan", "read", "fetch", "decode"} <= first["stages"].keys()
    cli.ok("path", BERT)
    assert cli.json("load", BERT, "--report")["reports"][0]["from_snapshot"]
    assert not cli.json("load", BERT, "--report", "--no-cache")["reports"][0]["from_snapshot"]
    human = cli.ok("load", BERT, "--report", "--no-cache", "--verify")
    assert "decode" in human
    assert "local" in human


def test_a_report_shows_how_far_bytes_came_and_what_failed_over_if_that_happened() -> None:
    def shown(**more: Any) -> str:
        report = LoadReport(
            ref="team/bert@v1", digest="d", device="cpu", tensors=1, bytes=8, read_bytes=8,
            stored_bytes=8, requests=1, seconds=1.0, **more,
        )  # fmt: skip
        with (console := Console(width=200)).capture() as said:
            _show_report(console, report)
        return said.get()

    near = {"read_paths": {"direct": 8}, "datanodes": {"dn1:9866": 8}, "hosts": {"dn1": 8}}
    told = shown(**near, distances={"same-rack": 8}, failed_over=3)
    assert "8 B in 1 request " in f"{told} "
    assert {"same-rack 8 B", "dn1 8 B", "failed over"} <= {
        part for part in re.split(r"\s{2,}|\n", told) if part
    }
    assert not re.search("distance|hosts|failed over", shown(read_paths={"local": 8}))


def test_the_yard_of_an_argument_goes_before_the_environment(
    cli: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.ok("--yard", tmp_path / "other", "push", base, BERT)
    assert cli.json("ls")["models"] == []
    monkeypatch.setenv("WEIGHTYARD_STORE", str(tmp_path / "other"))
    assert [model["name"] for model in cli.json("ls")["models"]] == [BERT]
    assert cli.json("ls", "--yard", tmp_path / "third")["models"] == []


def test_a_listing_longer_than_a_page_is_whole(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(b"1")
    with weightyard.open() as yard:
        for name in ("team/a", "team/b", "team/b", "team/b", "team/c"):
            yard.push(tmp_path / "one", name)
    monkeypatch.setattr("weightyard.cli.refs._PAGE", 2)
    assert [model["name"] for model in cli.json("ls")["models"]] == ["team/a", "team/b", "team/c"]
    assert [one["version"] for one in cli.json("ls", "team/b")["versions"]] == [3, 2, 1]
