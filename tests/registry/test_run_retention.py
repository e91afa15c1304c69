"""Which checkpoints of a run stay: the newest, those at round steps, the best."""

from __future__ import annotations

import pytest
from checkpointing import RUN, save
from collecting import gc
from pushing import BERT, push
from racing import race, reaching

from weightyard.errors import NoSuchThing, Refused
from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import KeepBest, Retention
from weightyard.registry import binding, retention
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore

LOSSES = {100: 5.0, 150: 4.0, 200: 2.0, 250: 3.0, 300: 2.0, 350: 4.5, 400: None, 450: 9.0}

TABLE = {
    Retention(keep_last=2): [400, 450],
    Retention(keep_every=100): [100, 200, 300, 400, 450],
    Retention(keep_every=10_000): [450],
    Retention(keep_best=KeepBest(metric="loss")): [300, 450],
    Retention(keep_best=KeepBest(metric="loss", count=3)): [200, 250, 300, 450],
    Retention(keep_best=KeepBest(metric="loss", mode="max", count=2)): [100, 450],
    Retention(keep_best=KeepBest(metric="accuracy", count=9)): [450],
    Retention(keep_last=2, keep_every=200): [200, 400, 450],
    Retention(keep_last=3, keep_every=300, keep_best=KeepBest(metric="loss", count=2)): [
        200, 300, 350, 400, 450,
    ],
    Retention(keep_last=1, ttl_s=3600, keep_every=300): sorted(LOSSES),
}  # fmt: skip
"""Rules, and the steps that stay. Of two equal losses the newer is better."""


def steps(registry: Registry, run: ModelName = RUN) -> list[int]:
    return sorted(version.step for version in registry.versions(run) if version.step is not None)


def train(registry: Registry, store: LocalStore, run: ModelName = RUN) -> None:
    registry.begin_generation(run)
    for step, loss in LOSSES.items():
        metrics = {} if loss is None else {"loss": loss}
        save(registry, store, b"%d" % step, step=step, run=run, metrics=metrics)


def test_a_checkpoint_stays_while_any_rule_keeps_it(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    train(registry, store)
    refs = {version.ref: version.step for version in registry.versions(RUN)}
    for rules, kept in TABLE.items():
        registry.set_retention(RUN, rules)
        due = {due.ref for due in database.read(lambda tx: list(retention.plan(tx, RUN)))}
        assert sorted(step for ref, step in refs.items() if ref not in due) == kept, rules


def test_gc_keeps_the_same_as_applying_the_rules_does(
    registry: Registry, store: LocalStore
) -> None:
    train(registry, store)
    other = ModelName("team", "other")
    train(registry, store, other)
    rules = Retention(keep_last=2, keep_every=200, keep_best=KeepBest(metric="loss"))
    registry.set_retention(RUN, rules)
    registry.set_retention(other, rules)
    assert registry.apply_retention(other) == [f"team/other@v{number}" for number in (6, 4, 2, 1)]
    assert registry.apply_retention(other) == []
    report = gc(registry, store)
    assert steps(registry) == steps(registry, other) == [200, 300, 400, 450]
    (why,) = {item.why for item in report.items if item.kind == "version"}
    assert why == (
        "retention: not among the 2 newest and not at a multiple of 200 steps "
        "and not among the 1 best by loss"
    )


def test_only_the_versions_of_the_one_model_go_and_without_a_rule_none(
    registry: Registry, store: LocalStore
) -> None:
    other = ModelName("team", "other")
    train(registry, store)
    train(registry, store, other)
    registry.set_retention(other, Retention(keep_last=1))
    assert registry.apply_retention(RUN) == []
    registry.set_retention(RUN, Retention(keep_last=6))
    assert registry.apply_retention(RUN) == ["team/run42@v2", "team/run42@v1"]
    assert steps(registry, other) == sorted(LOSSES)
    with pytest.raises(NoSuchThing):
        registry.apply_retention(ModelName("team", "nobody"))


def test_an_alias_a_child_and_a_reader_keep_a_checkpoint(
    registry: Registry, store: LocalStore
) -> None:
    train(registry, store)
    registry.move_alias(RUN, AliasName("good"), 1)
    push(registry, store, b"published", parent="team/run42@step-150")
    registry.take_lease(Ref.parse("team/run42@step-200"), "serving", 60)
    registry.set_retention(RUN, Retention(keep_every=1000))
    registry.apply_retention(RUN)
    assert steps(registry) == [100, 150, 200, 450]


def test_steps_are_a_rule_for_runs_only(registry: Registry, store: LocalStore) -> None:
    for content in (b"1", b"2", b"3"):
        push(registry, store, content, metrics={"loss": float(content)})
    with pytest.raises(Refused, match="no steps"):
        registry.set_retention(BERT, Retention(keep_every=100))
    registry.set_retention(BERT, Retention(keep_best=KeepBest(metric="loss")))
    assert registry.apply_retention(BERT) == ["team/bert@v2"], "a metric is one for models, too"


@pytest.mark.parametrize("metric", ['a"b', "it's", "$.x", "a.b[0]", "{}", "naïve ✓", "%s", "\\"])
def test_a_metric_may_have_any_name(registry: Registry, store: LocalStore, metric: str) -> None:
    for value in (1.0, 3.0, 2.0):
        push(registry, store, b"%f" % value, metrics={metric: value, "x": -value})
    registry.set_retention(BERT, Retention(keep_best=KeepBest(metric=metric, mode="max")))
    assert registry.apply_retention(BERT) == ["team/bert@v1"]


def test_a_version_that_becomes_the_best_while_others_are_removed_stays(
    database: Database, database_url: str, store: LocalStore
) -> None:
    binding.bind(database, store)
    one = Registry(database, store=store, who="one")
    train(one, store)
    one.set_retention(RUN, Retention(keep_best=KeepBest(metric="loss")))
    # It has its plan by then: SQLite keeps it waiting to write at all, PostgreSQL to tell of it.
    planned = reaching(database, "BEGIN IMMEDIATE", "UPDATE versions SET removed_ms")
    with Registry(Database(database_url), store=store, who="two") as two, planned as reached:
        ref = Ref.parse("team/run42@step-150")
        done = race(
            two.database,
            "INSERT INTO outbox",
            lambda: two.annotate(ref, {"metrics": {"loss": 0.1}}),
            lambda: one.apply_retention(RUN),
            second_reached=reached,
        )
        assert done.errors == []
        assert done.second_waited
    assert steps(one) == [150, 300, 450], "and the one that was the best, until next time"
