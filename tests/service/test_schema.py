"""The OpenAPI held against the service: whatever is sent, no server error, no breach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service_world import World, make_world, push, push_file

from weightyard.names import ModelName, Ref
from weightyard.records import Checkpoint, Publication

BERT = ModelName("team", "bert")
RUN = ModelName("team", "run42")

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def fuzzed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    url = None
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_server").create("fuzzed")
    folder = tmp_path_factory.mktemp("fuzzed")
    with make_world(folder, url) as world:
        prepare(world)
        yield world


def prepare(world: World) -> None:
    """A version that nothing can remove, since another one names it as its parent."""
    push_file(world, "team/bert", "file.bin", b"weights" * 1000)
    push(world.registry, world.store, "team/bert", b"2", parent="team/bert@v1", alias="prod")
    push(world.registry, world.store, "team/bert", b"3", parent="team/bert@v2")
    world.registry.begin_generation(RUN)


def described(world: World) -> Any:
    """The service as it describes itself."""
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", world.app, headers=shown(world))


def shown(world: World) -> dict[str, str]:
    return {"Authorization": f"Bearer {world.secrets['boss']}"}


def hold_against_schema(world: World, cases_each: int) -> int:
    """Call every operation so many times with what fits its schema, and with what does not."""
    called = 0
    for found in described(world).get_all_operations():
        operation = found.ok()
        cases = st.one_of(
            operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        )

        @settings(
            max_examples=cases_each,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases, really=st.booleans())
        def hold(case: Case, really: bool) -> None:
            nonlocal called
            called += 1
            if really:
                _aim(world, case)
            if case.path.endswith("/events"):
                case.query["for_s"] = 0  # else it would go on for an hour
            case.call_and_validate(headers=shown(world), checks=CHECKS)

        hold()
    return called


def _aim(world: World, case: Case) -> None:
    """Let a request meet something that is there."""
    real: dict[str, Any] = {
        "project": "team", "name": "bert", "number": 1, "alias": "prod", "selector": "latest",
        "path": "file.bin", "token": "stranger", "rank": 0, "pack": "0a" * 16,
        "block": "0a" * 32, "digest": "0a" * 32,
    }  # fmt: skip
    if "/runs/" in case.path:
        real["name"] = RUN.name
    if "upload" in case.path_parameters:
        upload = world.registry.open_upload(BERT, Publication())
        if "rank" in case.path_parameters:
            at = Checkpoint(step=1, generation=world.registry.run(RUN).generation, ranks=1)
            upload = world.registry.open_upload(RUN, Publication(checkpoint=at))
        real["upload"] = upload.id.hex
    if "lease" in case.path_parameters:
        real["lease"] = world.registry.take_lease(Ref.parse("team/bert@v1"), "test", 60).id
    for name in case.path_parameters:
        case.path_parameters[name] = real[name]
    for condition in ("if-match", "if-none-match", "last-event-id"):
        case.headers.pop(condition, None)
    case.query.pop("after", None)


def test_no_request_is_a_server_error_or_breaks_the_schema(fuzzed: World) -> None:
    cases_each = 5 if fuzzed.registry.database.is_sqlite else 3  # the second time costs as much
    assert hold_against_schema(fuzzed, cases_each) > 36 * cases_each


def test_the_schema_says_what_an_event_in_the_stream_is(fuzzed: World) -> None:
    schema = described(fuzzed)
    (case,) = [
        found.ok().Case(query={"after": "0", "for_s": 0})
        for found in schema.get_all_operations()
        if found.ok().path.endswith("/events")
    ]
    answer = case.call_and_validate(headers=shown(fuzzed), checks=CHECKS)
    assert b"event: " in answer.content


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_are_no_server_error(any_world: World) -> None:
    prepare(any_world)
    assert hold_against_schema(any_world, 300) > 10_000
