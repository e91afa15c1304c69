"""Runs over REST: taking one over, ranks that finish, checkpoints that go."""

from __future__ import annotations

from typing import Any

import pytest
from checkpointing import RUN, Saving, save
from service_world import World, push

from weightyard.format import manifest as manifests
from weightyard.transfer.publish import store_manifest

AT = "runs/team/run42"


def began(world: World, generation: int = 1) -> World:
    for _ in range(generation):
        world.registry.begin_generation(RUN)
    return world


def checkpoint(**changed: Any) -> dict[str, Any]:
    return {"checkpoint": {"step": 5, "generation": 1, "ranks": 2, **changed}}


def test_a_run_is_taken_over_only_from_the_generation_that_is_expected(any_world: World) -> None:
    world = any_world
    assert world.call("GET", AT).status_code == 404
    first = world.call("POST", f"{AT}/generations", token="writer")
    assert (first.status_code, first.json()["generation"]) == (201, 1)
    assert first.json()["created_by"] == "writer"
    late = world.call("POST", f"{AT}/generations", json={"expect": 0})
    assert (late.status_code, late.json()["code"]) == (409, "run-taken-over")
    assert late.json()["current"] == 1
    assert world.call("POST", f"{AT}/generations", json={"expect": 1}).json()["generation"] == 2
    assert world.call("GET", AT, token="reader").json()["generation"] == 2


@pytest.mark.parametrize("body", [{"expect": -1}, {"expect": 2**53 + 1}, {"expects": 1}, [1]])
def test_an_expectation_that_makes_no_sense_is_refused(world: World, body: object) -> None:
    assert world.call("POST", f"{AT}/generations", json=body).status_code == 422
    assert world.call("GET", AT).status_code == 404, "and no run was made"


def test_ranks_that_have_not_finished_are_named(world: World) -> None:
    began(world)
    saving = Saving(world.registry, world.store, b"0", b"1", step=5)
    saving.write(0)
    saving.write(1)
    upload = f"uploads/{saving.upload.id}"
    for _ in range(2):
        finished = world.call("PUT", f"{upload}/ranks/1")
        assert (finished.status_code, finished.content) == (204, b"")
    assert world.call("GET", upload).json()["model"] == "team/run42"
    digest, stored = manifests.encode(saving.manifest())
    store_manifest(world.store, saving.upload, digest, stored, None, min_replicas=1)
    problem = world.call("POST", f"{upload}/commit", json={"digest": digest.hex})
    assert (problem.status_code, problem.json()["code"]) == (409, "ranks-missing")
    assert problem.json()["missing"] == [0]
    world.call("PUT", f"{upload}/ranks/0")
    version = world.call("POST", f"{upload}/commit", json={"digest": digest.hex})
    assert (version.status_code, version.json()["step"]) == (201, 5)


def test_what_a_checkpoint_cannot_be_is_refused_before_anything_is_written(world: World) -> None:
    began(world, 2)
    push(world.registry, world.store, "team/bert", b"weights")
    run, model = "models/team/run42/uploads", "models/team/bert/uploads"
    old = world.call("POST", run, json=checkpoint())
    assert (old.status_code, old.json()["code"], old.json()["current"]) == (
        409, "run-taken-over", 2,
    )  # fmt: skip
    for path, body in ((run, {}), (model, checkpoint())):
        answer = world.call("POST", path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    for wrong in ({"step": -1}, {"step": 0.5}, {"generation": 0}, {"ranks": 0}, {"ranks": 1 << 40}):
        assert world.call("POST", run, json=checkpoint(**wrong)).status_code == 422, wrong


def test_a_rank_that_is_none_is_refused(world: World) -> None:
    began(world)
    upload = world.call("POST", "models/team/run42/uploads", json=checkpoint()).json()["id"]
    assert world.call("PUT", f"uploads/{upload}/ranks/2").status_code == 400
    for wrong in ("-1", "x", str(1 << 60)):
        assert world.call("PUT", f"uploads/{upload}/ranks/{wrong}").status_code == 422
    plain = world.call("POST", "models/team/bert/uploads").json()["id"]
    assert world.call("PUT", f"uploads/{plain}/ranks/0").status_code == 400
    world.call("DELETE", f"uploads/{upload}")
    assert world.call("GET", f"uploads/{upload}").status_code == 410
    assert world.call("PUT", f"uploads/{upload}/ranks/0").status_code == 410


def test_a_step_resolves_wherever_a_selector_does(world: World) -> None:
    began(world)
    save(world.registry, world.store, b"0", step=1200)
    found = world.call("GET", "models/team/run42/resolve/step-1200").json()
    assert (found["number"], found["step"]) == (1, 1200)
    assert world.call("GET", "models/team/run42/resolve/step-7").status_code == 404
    assert world.call("GET", "models/team/run42/resolve/step-007").status_code == 400
    runs = world.call("GET", "models", params={"kind": "run"}).json()["items"]
    assert [(run["name"], run["latest_step"], run["generation"]) for run in runs] == [
        ("team/run42", 1200, 1)
    ]


def test_a_writer_lets_checkpoints_go_and_only_an_admin_versions_of_models(world: World) -> None:
    began(world)
    for step in (1, 2, 3):
        save(world.registry, world.store, b"%d" % step, step=step)
        push(world.registry, world.store, "team/bert", b"%d" % step)
    rules = {"keep_last": 1, "keep_every": 2, "keep_best": {"metric": "loss"}}
    kept = world.call("PUT", f"{AT}/retention", json=rules, token="writer")
    assert kept.json()["retention"]["keep_best"]["count"] == 1
    gone = world.call("POST", f"{AT}/retention/apply", token="writer")
    assert gone.json()["items"] == ["team/run42@v1"]
    assert world.call("DELETE", f"{AT}/retention", token="writer").status_code == 204
    for method, path in (
        ("PUT", "retention"),
        ("POST", "retention/apply"),
        ("DELETE", "retention"),
    ):
        by_run = world.call(method, f"runs/team/bert/{path}", json=rules, token="writer")
        assert by_run.status_code == 404, "a model is no run"
        by_model = world.call(method, f"models/team/bert/{path}", json=rules, token="writer")
        assert by_model.status_code == 403
    assert world.call("PUT", "models/team/bert/retention", json=rules).status_code == 400
    world.call("PUT", "models/team/bert/retention", json={"keep_last": 1})
    gone = world.call("POST", "models/team/bert/retention/apply", token="lead")
    assert gone.json()["items"] == ["team/bert@v2", "team/bert@v1"]
    assert world.registry.audit(limit=1)[0].who == "lead"


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_every": 0},
        {"keep_best": {"metric": ""}},
        {"keep_best": {"metric": "loss", "mode": "least"}},
        {"keep_best": {"metric": "loss", "count": 0}},
        {"keep_best": "loss"},
    ],
)
def test_rules_that_say_nothing_are_refused(world: World, rules: dict[str, Any]) -> None:
    began(world)
    assert world.call("PUT", f"{AT}/retention", json=rules).status_code == 422
