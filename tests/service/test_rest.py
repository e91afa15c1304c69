"""Models, versions and aliases over REST; problems, pages and ETags."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import jsonschema_rs
import pytest
from service_world import API, World, push

from weightyard import errors
from weightyard.errors import RegistryUnavailable, YardError
from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import Version
from weightyard.service import openapi, problems

BERT = "models/team/bert"


@pytest.fixture
def two(world: World) -> World:
    push(world.registry, world.store, "team/bert", b"one", alias="prod")
    push(world.registry, world.store, "team/bert", b"two")
    return world


def test_lists_come_in_pages_that_leave_nothing_out(world: World) -> None:
    names = [f"team/m{i}" for i in range(7)]
    for name in names:
        world.registry.create_model(ModelName.parse(name))
    found: list[str] = []
    after = None
    while True:
        params = {"limit": 3} | ({"after": after} if after else {})
        page = world.call("GET", "models", params=params).json()
        found += [model["name"] for model in page["items"]]
        if (after := page["next"]) is None:
            break
    assert found == names


def test_versions_and_the_audit_log_come_in_pages(two: World) -> None:
    for path, key, expected in ((f"{BERT}/versions", "number", [2, 1]), ("audit", "id", None)):
        first = two.call("GET", path, params={"limit": 1}).json()
        second = two.call("GET", path, params={"limit": 1, "after": first["next"]}).json()
        numbers = [page["items"][0][key] for page in (first, second)]
        assert numbers == (expected or sorted(numbers, reverse=True))


@pytest.mark.parametrize("selector", ["latest", "v2"])
def test_a_selector_resolves(two: World, selector: str) -> None:
    assert two.call("GET", f"{BERT}/resolve/{selector}").json()["number"] == 2


def test_an_alias_and_a_digest_resolve(two: World) -> None:
    version = two.call("GET", f"{BERT}/resolve/prod").json()
    assert version["number"] == 1
    assert two.call("GET", f"{BERT}/resolve/{version['digest']}").json() == version


def test_an_alias_moves_only_from_where_it_is_expected(two: World) -> None:
    path = f"{BERT}/aliases/prod"
    tag = two.call("GET", path).headers["etag"]
    assert tag == '"v1"'
    moved = two.call(
        "PUT", path, json={"version": 2, "reason": "better"}, headers={"If-Match": tag}
    )
    assert (moved.status_code, moved.json()["before"], moved.headers["etag"]) == (200, 1, '"v2"')
    late = two.call("PUT", path, json={"version": 1}, headers={"If-Match": tag})
    problem = late.json()
    assert (late.status_code, problem["code"], problem["current"]) == (412, "alias-moved", 2)
    exists = two.call("PUT", path, json={"version": 1}, headers={"If-None-Match": "*"})
    assert exists.status_code == 412
    new = f"{BERT}/aliases/staging"
    assert two.call("PUT", new, json={"version": 1}, headers={"If-None-Match": "*"}).is_success
    late = two.call("DELETE", new, headers={"If-None-Match": "*"})
    assert (late.status_code, late.json()["current"]) == (412, 1)
    assert two.call("GET", new).json()["version"] == 1


def test_an_alias_has_a_log_and_goes_back_in_one_step(two: World) -> None:
    path = f"{BERT}/aliases/prod"
    two.call("PUT", path, json={"version": 2, "reason": "better"}, token="writer")
    two.call("POST", f"{path}/rollback", token="writer", json={"reason": "worse"})
    log = two.call("GET", f"{path}/log").json()["items"]
    assert [(move["before"], move["after"], move["who"], move["reason"]) for move in log] == [
        (2, 1, "writer", "worse"),
        (1, 2, "writer", "better"),
        (None, 1, "service", "published"),
    ]
    seen: list[int] = []
    after = {}
    for _ in range(3):
        page = two.call("GET", f"{path}/log", params={"limit": 1, **after}).json()
        seen += [move["number"] for move in page["items"]]
        after = {"after": page["next"]}
    assert seen == [move["number"] for move in log] == [3, 2, 1]
    then = log[-1]["at"]
    assert len(two.call("GET", f"{path}/log", params={"as_of": then}).json()["items"]) == 1
    assert two.call("DELETE", path, token="writer").json()["after"] is None
    assert two.call("GET", path).status_code == 404


def test_a_version_changes_only_as_it_was_read(two: World) -> None:
    path = f"{BERT}/versions/1"
    tag = two.call("GET", path).headers["etag"]
    changed = two.call("PATCH", path, json={"tags": {"a": "b"}}, headers={"If-Match": tag})
    assert (changed.status_code, changed.json()["tags"]) == (200, {"a": "b"})
    late = two.call("PATCH", path, json={"tags": {}}, headers={"If-Match": tag})
    assert (late.status_code, late.json()["code"]) == (412, "changed")
    assert (
        two.call("GET", path, headers={"If-None-Match": changed.headers["etag"]}).status_code == 304
    )
    assert two.call("PATCH", path, json={"digest": "x"}).status_code == 422


def test_a_client_that_has_many_versions_of_an_answer_is_not_sent_it_again(two: World) -> None:
    tag = two.call("GET", BERT).headers["etag"]
    many = ", ".join([*(f'"{number:032x}"' for number in range(800)), tag])
    assert len(many) > 24_000
    assert two.call("GET", BERT, headers={"If-None-Match": many}).status_code == 304
    changed = two.call("PATCH", f"{BERT}/versions/1", json={}, headers={"If-Match": many})
    assert (changed.status_code, changed.json()["code"]) == (400, "refused")
    assert "one ETag" in changed.json()["detail"]
    too_many = two.call("GET", BERT, headers={"If-None-Match": 2 * many})
    assert (too_many.status_code, too_many.json()["code"]) == (413, "too-large")


def test_what_the_client_has_is_not_sent_again(two: World) -> None:
    tags = {}
    for path in (BERT, f"{BERT}/resolve/prod", f"{BERT}/aliases/prod", f"{BERT}/versions/2"):
        tag = tags[path] = two.call("GET", path).headers["etag"]
        again = two.call("GET", path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), path
    two.call("PUT", f"{BERT}/aliases/prod", json={"version": 2})
    for path in tags:
        assert two.call("GET", path, headers={"If-None-Match": tags[path]}).is_success, path


def test_a_version_with_an_alias_is_protected(two: World) -> None:
    answer = two.call("DELETE", f"{BERT}/versions/1")
    assert (answer.status_code, answer.json()["code"]) == (409, "protected")
    assert two.call("DELETE", f"{BERT}/versions/2").json()["number"] == 2
    assert two.call("GET", f"{BERT}/versions/2").status_code == 404


def test_a_model_with_versions_stays_and_says_which(two: World) -> None:
    refused = two.call("DELETE", BERT, token="lead")
    assert (refused.status_code, refused.json()["code"]) == (409, "protected")
    assert "v2, v1" in refused.json()["detail"]
    two.registry.move_alias(ModelName("team", "bert"), AliasName("prod"), None)
    for number in (1, 2):
        assert two.call("DELETE", f"{BERT}/versions/{number}").status_code == 200
    assert two.call("DELETE", BERT, token="lead").status_code == 204
    assert two.call("GET", BERT).status_code == 404


def test_copies_a_store_cannot_keep_are_refused_and_nothing_changes(two: World) -> None:
    path = f"{BERT}/versions/1/replicas"
    refused = two.call("PUT", path, json={"replication": 3})
    assert (refused.status_code, refused.json()["code"]) == (422, "unsupported")
    for body in ({}, {"replication": 0}, {"policy": "A/B"}, {"copies": 2}, {"policy": None}):
        assert two.call("PUT", path, json=body).status_code == 422
    assert two.call("GET", f"{BERT}/versions/1").json()["replication"] is None


def test_a_body_that_is_not_sent_as_json_is_told_how_to_be(two: World) -> None:
    path, text = f"{BERT}/aliases/prod", b'{"version": 2}'
    for kind in ("application/x-www-form-urlencoded", "text/plain"):  # the first is curl's -d
        answer = two.call("PUT", path, content=text, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["code"]) == (422, "refused")
        assert "Content-Type: application/json" in answer.json()["detail"]
        assert kind in answer.json()["detail"]
    as_json = {"Content-Type": "application/json"}
    for broken, why in ((text[:-1], "truncated"), (b'{"version": NaN}', "malformed")):
        detail = two.call("PUT", path, content=broken, headers=as_json).json()["detail"]
        assert detail.startswith("body: this is not JSON: ")
        assert why in detail
    listed = two.call("PUT", path, content=b"[]", headers=as_json).json()["detail"]
    assert "Content-Type" not in listed


def test_retention_is_set_and_cleared(two: World) -> None:
    rules = {"keep_last": 3, "ttl_s": 60}
    kept = two.call("PUT", f"{BERT}/retention", json=rules).json()["retention"]
    assert {name: value for name, value in kept.items() if value is not None} == rules
    two.call("DELETE", f"{BERT}/retention")
    assert two.call("GET", BERT).json()["retention"] is None


def test_cost_tells_of_other_projects_only_to_those_who_may_read_them(world: World) -> None:
    for model in ("team/bert", "other/gpt", "team/gpt"):
        push(world.registry, world.store, model, b"same" * 30_000)
    shared = world.call("GET", f"{BERT}/versions/1/cost", token="reader").json()["shared_with"]
    assert list(shared) == ["team/gpt@v1"]
    assert len(world.call("GET", f"{BERT}/versions/1/cost").json()["shared_with"]) == 2


def test_a_problem_has_what_programs_and_people_need(world: World) -> None:
    answer = world.call("GET", "models/team/none", headers={"X-Request-ID": "my-request.1"})
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == "my-request.1"
    assert answer.json() == {
        "type": "urn:weightyard:problem:no-such-thing",
        "title": problems.title_of(errors.NoSuchThing),
        "status": 404,
        "detail": "no model team/none",
        "code": "no-such-thing",
        "request_id": "my-request.1",
    }


def test_a_path_that_is_none_is_told_where_rest_is(world: World) -> None:
    for path in ("/docs", "/models/team/bert", f"{API}/model/team/bert"):
        problem = world.call("GET", path, token=None).json()
        assert (problem["status"], problem["code"]) == (404, "no-such-thing")
        assert problem["detail"] == (
            "no such path: REST is under /api/v1, and /api/v1/openapi.json lists all of it"
        )


def test_a_request_id_that_is_not_one_is_replaced(world: World) -> None:
    answer = world.call("GET", "models/team/none", headers={"X-Request-ID": "a b\tc"})
    assert len(answer.json()["request_id"]) == 16
    assert answer.headers["x-request-id"] == answer.json()["request_id"]


def every(kind: type[YardError]) -> list[type[YardError]]:
    return [kind, *(child for sub in kind.__subclasses__() for child in every(sub))]


def test_every_error_has_a_status_and_a_code_of_its_own() -> None:
    kinds = [kind for kind in every(YardError) if kind.__module__ == errors.__name__]
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(codes)
    for kind in kinds:
        error = kind.__new__(kind)
        assert 400 <= problems.status_of(error, "GET") < 600
        assert problems.status_of(error, "POST") != 500 or not isinstance(error, errors.Damaged)


def test_an_error_nobody_foresaw_tells_nothing_of_the_inside(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ref: Ref) -> None:
        raise ValueError("SELECT password FROM users")

    monkeypatch.setattr(world.registry, "resolve", broken)
    answer = world.call("GET", f"{BERT}/versions/1")
    assert (answer.status_code, answer.json()["code"]) == (500, "bug")
    assert "SELECT" not in answer.text
    assert "Traceback" not in answer.text


def test_a_database_that_does_not_answer_is_tried_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(ref: Ref) -> None:
        raise RegistryUnavailable("database: connection to 10.0.0.5 with password hunter2 failed")

    monkeypatch.setattr(world.registry, "resolve", gone)
    answer = world.call("GET", f"{BERT}/versions/1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "hunter2" not in answer.text


class Page(HTMLParser):
    """What a page would load, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if (tag, name) == ("a", "href")]
        self.loaded += [name for name, _ in attrs if name in ("src", "srcset", "style")]


def test_a_browser_that_comes_to_the_address_of_a_service_is_told_what_it_is(two: World) -> None:
    accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    answer = two.call("GET", "/", token=None, headers={"Accept": accept})
    assert (answer.status_code, answer.headers["vary"]) == (200, "Accept")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(answer.text)
    assert not page.tags & {"script", "style", "link", "img", "iframe", "object", "form"}
    assert not page.loaded
    for link in page.links:
        assert two.call("GET", f"/{link}").status_code == 200
        assert "://" not in link, "a proxy may have put the service below a path"
    assert "api/v1/openapi.json" in page.links


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_a_program_that_comes_to_the_address_of_a_service_is_told_where_rest_is(
    two: World, accept: str
) -> None:
    answer = two.call("GET", "/", token=None, headers={"Accept": accept})
    said = answer.json()
    assert (answer.status_code, said["service"], said["api"]) == (200, "weightyard", API)
    for named in ("openapi", "about", "ready"):
        assert two.call("GET", said[named]).status_code == 200


def test_who_shows_no_token_learns_nothing_at_the_address_of_a_service_that_needs_one(
    two: World,
) -> None:
    known = two.call("GET", "about").json()
    for accept in ("text/html", "application/json"):
        text = two.call("GET", "/", token=None, headers={"Accept": accept}).text
        for told in (*(str(value) for value in known.values()), "bert"):
            assert told not in text, told


def test_readiness_tells_what_is_missing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.call("GET", "ready", token=None).json()["status"] == "ok"
    world.service.readiness = None

    def gone() -> int:
        raise RegistryUnavailable("gone")

    monkeypatch.setattr(world.registry, "newest_event", gone)
    answer = world.call("GET", "ready", token=None)
    assert (answer.status_code, answer.json()["database"], answer.json()["store"]) == (
        503, False, True,
    )  # fmt: skip
    assert world.call("GET", "health", token=None).status_code == 200


def test_metrics_count_by_route_and_never_by_name(two: World) -> None:
    two.call("GET", f"{BERT}/versions/1")
    two.call("GET", "/nowhere/secret-name")
    text = two.call("GET", "metrics").text
    assert (
        'weightyard_requests_total{method="GET",route="/models/{project}/{name}/versions/{number}"'
        in text
    )
    assert "bert" not in text
    assert "secret-name" not in text


def test_every_operation_is_documented_with_its_problem(world: World) -> None:
    schema = world.call("GET", "openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["description"], where
            declared = {one["name"] for one in operation.get("parameters", ())}
            assert set(re.findall(r"{(\w+)}", path)) <= declared, where
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    assert parameter["schema"]["examples"], where
            assert "application/problem+json" in operation["responses"]["default"]["content"], where
            declared = operation["responses"].keys()
            assert operation.get("security") == [] or {"401", "403", "503"} <= declared, where
            assert "404" in declared or "{" not in path, where
            takes = {one["name"].lower() for one in operation.get("parameters", ())}
            assert ("412" in declared) == ("if-match" in takes), where
            assert ("416" in declared) == ("range" in takes), where
    assert "Retry-After" in schema["components"]["responses"]["503"]["headers"]
    assert schema["paths"]["/api/v1/health"]["get"]["security"] == []
    assert schema["security"] == [{"token": []}]


def test_every_body_and_answer_has_an_example_that_fits_its_schema(world: World) -> None:
    schema = world.call("GET", "openapi.json").json()
    known = {"components": schema["components"]}
    held = 0
    for method, path, operation in openapi.operations(schema):
        parts = {"body": operation.get("requestBody", {}), **operation["responses"]}
        for name, part in parts.items():
            if "$ref" in part:
                part = schema["components"]["responses"][part["$ref"].rpartition("/")[2]]
            for media_type, content in part.get("content", {}).items():
                if "json" not in media_type:
                    continue
                named = content.get("examples", {}).values()
                examples = [one["value"] for one in named] or [content["example"]]
                for example in examples:
                    where = f"{method} {path} {name}"
                    whole = {**content["schema"], **known}
                    found = list(jsonschema_rs.Draft202012Validator(whole).iter_errors(example))
                    assert not found, (where, found)
                    held += 1
    assert held > 100


def test_the_headers_of_answers_are_declared(two: World) -> None:
    """Those that say something of the answer; the others are HTTP's own."""
    schema = two.call("GET", "openapi.json").json()
    model = "/models/{project}/{name}"
    told = {
        BERT: model,
        f"{BERT}/resolve/prod": f"{model}/resolve/{{selector}}",
        f"{BERT}/aliases/prod": f"{model}/aliases/{{alias}}",
        f"{BERT}/versions/1/manifest": f"{model}/versions/{{number}}/manifest",
    }
    for target, path in told.items():
        sent = two.call("GET", target).headers
        declared = schema["paths"][f"/api/v1{path}"]["get"]["responses"]["200"]["headers"]
        assert {name for name in ("ETag", "Location", "Content-Range") if name in sent} == {"ETag"}
        assert declared.keys() == {"ETag"}, path
    committed = schema["paths"]["/api/v1/uploads/{upload}/commit"]["post"]["responses"]["201"]
    assert committed["headers"].keys() == {"ETag", "Location"}
    files = "/api/v1/models/{project}/{name}/versions/{number}/files/{path}"
    part = schema["paths"][files]["get"]["responses"]["206"]
    assert part["headers"].keys() == {"ETag", "Content-Range"}


def test_a_parent_is_named_only_to_those_who_may_read_it(world: World) -> None:
    push(world.registry, world.store, "other/secret", b"base" * 30_000)
    push(world.registry, world.store, "team/bert", b"tuned" * 30_000, parent="other/secret@v1")
    one = f"{BERT}/versions/1"
    for method, path in (
        ("GET", f"{BERT}/resolve/latest"),
        ("GET", f"{BERT}/versions"),
        ("GET", one),
        ("PATCH", one),
        ("DELETE", one),
    ):
        body = {"message": "why"} if method == "PATCH" else None
        if method != "DELETE":
            assert "other/secret@v1" in world.call(method, path, json=body).text
        hidden = world.call(method, path, token="lead", json=body)
        assert hidden.status_code == 200
        assert "secret" not in hidden.text, (method, path)


def test_those_who_may_not_read_a_parent_can_annotate_what_they_have_seen(world: World) -> None:
    push(world.registry, world.store, "other/secret", b"base" * 30_000)
    push(world.registry, world.store, "team/bert", b"tuned" * 30_000, parent="other/secret@v1")
    answer = world.call("GET", f"{BERT}/versions/1", token="writer")
    tag = answer.headers["ETag"]
    assert tag == f'"{Version.model_validate(answer.json()).etag}"', "a client makes it itself"
    changed = world.call(
        "PATCH",
        f"{BERT}/versions/1",
        token="writer",
        json={"message": "better"},
        headers={"If-Match": tag},
    )
    assert (changed.status_code, changed.json()["parent"]) == (200, None)


def test_what_protects_a_version_is_named_only_to_those_who_may_read_it(world: World) -> None:
    push(world.registry, world.store, "team/bert", b"base" * 30_000)
    push(world.registry, world.store, "other/secret", b"tuned" * 30_000, parent="team/bert@v1")
    refused = world.call("DELETE", f"{BERT}/versions/1", token="lead")
    assert (refused.status_code, refused.json()["code"]) == (409, "protected")
    assert "secret" not in refused.text
    assert "names it as its parent" in refused.json()["detail"]
    assert "other/secret@v1" in world.call("DELETE", f"{BERT}/versions/1").json()["detail"]
