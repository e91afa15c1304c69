"""Runs on the command line: listed, shown by step, and thinned out."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointing import RUN, save
from cli_runs import Cli

import weightyard


@pytest.fixture
def trained(cli: Cli) -> Cli:
    """A run with three checkpoints."""
    with weightyard.open() as yard:
        yard.catalogue.begin_generation(RUN)
        for step, loss in ((100, 3.0), (150, 1.0), (170, 2.0)):
            save(yard.catalogue, yard.store, b"%d" % step, step=step, metrics={"loss": loss})
    return cli


def test_runs_are_listed_apart_from_models(trained: Cli, base: Path) -> None:
    trained.ok("push", base, "team/bert")
    (run,) = trained.json("ls", "--runs")["runs"]
    assert (run["name"], run["latest_step"], run["generation"]) == ("team/run42", 170, 1)
    assert [model["name"] for model in trained.json("ls")["models"]] == ["team/bert"]
    assert "step-170" in trained.ok("ls", "--runs")
    assert trained("ls", "--runs", "team/run42").code == 2


def test_a_yard_without_runs_says_where_they_come_from(cli: Cli) -> None:
    assert "No runs yet" in cli.ok("ls", "--runs")


def test_checkpoints_are_shown_by_their_steps(trained: Cli, tmp_path: Path) -> None:
    listed = trained.ok("ls", "team/run42").splitlines()
    assert [line.split()[1] for line in listed] == ["step", "170", "150", "100"]
    shown = trained.ok("show", "team/run42@step-150")
    assert shown.startswith("team/run42@v2")
    assert "step" in shown
    assert shown.rstrip().splitlines()[-1].startswith("cold load"), "no table of its no files"
    assert trained.json("show", "team/run42@step-150")["step"] == 150
    assert "@step-170" in trained.refused(2, "show", "team/run42@step-7")
    assert "Did you mean team/run42" in trained.refused(2, "show", "team/run43")
    assert trained.json("diff", "team/run42@step-100", "team/run42@step-150")
    trained.ok("alias", "set", "team/run42", "good", "step-150")
    assert trained.json("show", "team/run42@good")["step"] == 150


def test_rules_for_steps_and_metrics_are_set_and_said(trained: Cli) -> None:
    said = trained.ok("retention", "team/run42", "--keep-every", "100", "--keep-best", "loss:min:1")
    assert "multiple of 100" in said
    assert "the 1 with the lowest loss" in said
    rules = trained.json("retention", "team/run42")["retention"]
    assert rules["keep_best"] == {"metric": "loss", "mode": "min", "count": 1}
    with weightyard.open() as yard:
        assert yard.catalogue.apply_retention(RUN) == []
        save(yard.catalogue, yard.store, b"200", step=200)
        assert yard.catalogue.apply_retention(RUN) == ["team/run42@v3"]


@pytest.mark.parametrize(
    "text", ["loss", "loss:min", "loss:least:2", "loss:min:0", ":min:1", "a:min:x"]
)
def test_a_best_that_does_not_say_all_is_refused(trained: Cli, text: str) -> None:
    ran = trained("retention", "team/run42", "--keep-best", text)
    assert ran.code == 2
    assert "loss:min:3" in ran.err
