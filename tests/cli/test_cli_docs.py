"""docs/cli.md and what the commands print are the same interface."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_runs import Cli

import weightyard
from weightyard.cli import app, cluster
from weightyard.cli.panels import Panel
from weightyard.names import ModelName
from weightyard.records import Retention
from weightyard.testing.cluster.recorded import Record, RecordedDaemon, Status

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BERT = "team/bert"
RUN = ModelName("team", "run42")

OPEN = {
    "metrics", "tags", "metadata", "structure", "shared_with", "aliases",
    "stages", "stage_bytes", "read_paths", "datanodes", "hosts", "distances",
}  # fmt: skip
"""Whose keys are data."""

_SECTION = re.compile(r"^### (.+?)$\n(.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
_SECTIONS = dict(_SECTION.findall(PAGE.read_text()))


def _documented(section: str) -> set[str]:
    """The keys of a section: those in its list, and those it takes over from another one."""
    text = _SECTIONS[section].partition("JSON:")[2] or _SECTIONS[section]
    if as_other := re.match(r" as \[(.+?)\]", text):
        return _documented(as_other[1])
    keys: set[str] = set()
    for other, inside in re.findall(r"all keys of \[(a \w+)\]\([^)]*\)(?:\s+in\s+`(.+?)`)?", text):
        prefix = f"{inside}." if inside else ""
        keys |= {prefix + key for key in _documented(other[0].upper() + other[1:])}
    for item in re.findall(r"^- (.*?)(?=^- |\Z|\n\n)", text, re.DOTALL | re.MULTILINE):
        # Names after the colon are explanations, except where a list of keys goes on there.
        head = item if re.match(r"with |`\w+`: null, or", item) else item.partition(": ")[0]
        keys |= set(re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)*)`", head))
    return keys


def _printed(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _printed(one, f"{path}[]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            below = f"{path}.{key}" if path else key
            nested = list(_printed(inner, below)) if key not in OPEN else []
            yield from nested or [below]


def _fill(cli: Cli, base: Path, tuned: Path, tmp_path: Path) -> dict[str, Any]:
    """What every command prints, by the heading of its section."""
    run = cli.json
    seen: dict[str, Any] = {}
    seen["push"] = run("push", base, BERT, "--alias", "prod")
    seen["push --dry-run"] = run("push", tuned, BERT, "--dry-run")
    cli.ok("push", tuned, BERT)
    seen["pull"] = run("pull", BERT, tmp_path / "out")
    seen["ls NAME"] = run("ls", BERT)
    seen["retention"] = run("retention", BERT, "--keep-last", "5", "--ttl", "1d")
    seen["ls"] = run("ls")
    with weightyard.open() as yard:
        yard.catalogue.begin_generation(RUN)
        yard.catalogue.set_retention(RUN, Retention(keep_last=3))
    seen["ls --runs"] = run("ls", "--runs")
    seen["show"] = run("show", BERT, "--tensors")
    seen["diff"] = run("diff", f"{BERT}@v1", f"{BERT}@v2")
    seen["annotate"] = run("annotate", BERT, "--tag", "a=b")
    seen["alias set"] = run("alias", "set", BERT, "prod", "2")
    seen["alias log"] = run("alias", "log", BERT, "prod")
    seen["alias rollback"] = run("alias", "rollback", BERT, "prod")
    seen["alias rm"] = run("alias", "rm", BERT, "prod")
    seen["path"] = run("path", BERT)
    seen["follow"] = run("follow", BERT, "--exec", "true", "--once")
    seen["cache ls"] = run("cache", "ls")
    seen["cache prune"] = run("cache", "prune", "--max", "0")
    cli.ok("path", BERT)
    damaged = Path(cli.ok("path", BERT).strip()) / "config.json"
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes()[::-1])
    seen["cache verify"] = json.loads(cli("cache", "verify", "--json").out)
    cli.ok("path", BERT)
    seen["cache rm"] = run("cache", "rm", "--all")
    seen["load"] = run("load", BERT, "--report")
    seen["rm"] = run("rm", f"{BERT}@v2", "--yes")
    cli.ok("rm", f"{BERT}@v1", "--yes")
    seen["rm NAME"] = run("rm", BERT, "--yes")
    cli.ok("push", base, BERT)
    seen["gc"] = run("gc", "--dry-run")
    seen["init"] = run("init")
    seen["doctor"] = run("doctor")
    seen["token create"] = run("token", "create", "ci")
    seen["token ls"] = run("token", "ls")
    seen["token revoke"] = run("token", "revoke", "ci")
    seen["db current"] = run("db", "current")
    seen["db upgrade"] = run("db", "upgrade")
    (tmp_path / "home" / "store" / "packs" / "ff").mkdir(exist_ok=True)
    (tmp_path / "home" / "store" / "packs" / "ff" / ("ff" * 16)).write_bytes(b"?")
    seen["check"] = json.loads(cli("check", "--heal", "--json").out)
    for file in (tmp_path / "home" / "store").glob("registry.db*"):
        file.unlink()
    seen["rebuild"] = run("rebuild", "--yes")
    return seen


def test_the_page_lists_exactly_the_keys_that_are_printed(
    cli: Cli, base: Path, tuned: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    for section, printed in _fill(cli, base, tuned, tmp_path).items():
        keys = set(_printed(printed))
        documented = _documented(section)
        parents = {key[: at.start()] for key in keys for at in re.finditer(r"\[\]|\.", key)}
        assert keys - documented == set(), f"{section}: not documented"
        assert documented - keys - parents == set(), f"{section}: not printed"


def test_the_page_lists_the_keys_of_the_cluster_too() -> None:
    daemon = RecordedDaemon("namenode", "127.0.0.1:9870", 7, 7, "boot")
    record = Record("hdfs://127.0.0.1:9000", "/conf", ("http://127.0.0.1:9870",), (daemon,))
    printed = cluster._as_json(Status(record, ("namenode",), 3, True))
    assert _documented("cluster") == set(_printed(printed))


def _commands(
    typed: typer.Typer, before: str = ""
) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for command in typed.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        yield f"{before}{name}", command.callback, command.rich_help_panel
    for group in typed.registered_groups:
        assert group.typer_instance is not None
        for name, callback, _ in _commands(group.typer_instance, f"{before}{group.name} "):
            yield name, callback, group.rich_help_panel


COMMANDS = {name: (callback, panel) for name, callback, panel in _commands(app)}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_on_the_page_with_an_example_in_the_same_group(name: str) -> None:
    _, panel = COMMANDS[name]
    heading = "cluster" if name.startswith("cluster ") else name
    assert re.search(rf"^\$ .*weightyard.* {heading}", _SECTIONS[heading], re.MULTILINE)
    group = PAGE.read_text().partition(f"### {heading}\n")[0].rpartition("\n## ")[2]
    assert group.startswith(str(Panel(panel)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_the_options_of_every_command(cli: Cli, name: str) -> None:
    shown = cli.ok(*name.split(), "--help")
    assert re.search(rf"Examples?:.*weightyard.* {name}", shown, re.DOTALL)
    if not name.startswith("cluster "):
        for option in ("--yard", "--token", "--json", "--quiet"):
            assert option in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_paragraphs_and_whole_examples_in_80_columns(
    cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli.ok(*name.split(), "--help").partition("╭")[0]
    lines = [line.removeprefix(" ").rstrip() for line in text.splitlines()]
    assert "[[" not in text
    for line, after in itertools.pairwise(lines):
        if line and after:  # a line ends where the next word has no room, and nowhere else
            assert len(f"{line} {after.split()[0]}") > 78, f"{line} | {after}"
    _, _, examples = "\n".join(lines).partition("Examples:\n")
    for line in examples.splitlines():
        assert not line or re.match(r"  (?! ).*\bweightyard ", line), line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_page_in_the_section_of_its_command(name: str) -> None:
    found: Any = typer.main.get_command(app)
    for word in name.split():
        found = found.commands[word]
    heading = "cluster" if name.startswith("cluster ") else name
    about = "".join(  # some commands have more sections than one, such as `push --dry-run`
        f"{title}\n{text}"
        for title, text in _SECTIONS.items()
        if title == heading or (title.startswith(f"{heading} ") and title not in COMMANDS)
    )
    everywhere = {"--yard", "--token", "--json", "--quiet", "--help"}
    for option in found.params:
        names = {*option.opts, *option.secondary_opts}
        if option.param_type_name == "option" and not names & everywhere:
            long = [one for one in names if one.startswith("--")]
            assert any(re.search(rf"(?<![\w-]){one}(?![\w-])", about) for one in long), long


def test_help_groups_commands_by_whom_they_are_for(cli: Cli) -> None:
    shown = cli.ok("--help")
    assert [shown.index(f"─ {panel} ─") for panel in Panel] == sorted(
        shown.index(f"─ {panel} ─") for panel in Panel
    )
