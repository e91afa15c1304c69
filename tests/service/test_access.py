"""Who may call what: every route, every kind of caller."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from service_world import API, World, make_world, push, push_file

from weightyard.errors import Bug, NotAllowed
from weightyard.names import Ref, TokenName
from weightyard.records import Role
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.service import app as apps
from weightyard.service.app import create_app
from weightyard.service.auth import GuardedRoute
from weightyard.service.serving import open_service
from weightyard.settings import Settings
from weightyard.storage.local import LocalStore
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import Store

_MODEL = "/models/{project}/{name}"
_VERSION = _MODEL + "/versions/{number}"
_ALIAS = _MODEL + "/aliases/{alias}"
_UPLOAD = "/uploads/{upload}"
_RUN = "/runs/{project}/{name}"

# Written down a second time on purpose: a route that is added or relaxed has to be here too.
RULES = {
    "GET /": "open",
    "GET /health": "open",
    "GET /ready": "open",
    "GET /about": "anyone known",
    "GET /about/location": "anyone known",
    "GET /metrics": "anyone known",
    "GET /openapi.json": "anyone known",
    "GET /events": "anyone known",
    "GET /models": "anyone known",
    "POST /placements": "anyone known",
    "POST /models": "write",
    f"GET {_MODEL}": "read",
    f"DELETE {_MODEL}": "admin",
    f"PUT {_MODEL}/retention": "admin",
    f"DELETE {_MODEL}/retention": "admin",
    "GET /quotas/{project}": "read",
    "PUT /quotas/{project}": "yard admin",
    f"GET {_MODEL}/versions": "read",
    f"GET {_MODEL}/resolve/{{selector}}": "read",
    f"GET {_VERSION}": "read",
    f"PATCH {_VERSION}": "write",
    f"DELETE {_VERSION}": "admin",
    f"POST {_VERSION}/used": "read",
    f"GET {_VERSION}/cost": "read",
    f"GET {_VERSION}/manifest": "read",
    f"GET {_VERSION}/placements": "read",
    f"GET {_VERSION}/files/{{path:path}}": "read",
    f"HEAD {_VERSION}/files/{{path:path}}": "read",
    f"GET {_VERSION}/blocks/{{block}}": "read",
    f"GET {_VERSION}/replicas": "read",
    f"GET {_VERSION}/locations": "read",
    f"PUT {_VERSION}/replicas": "write",
    f"POST {_VERSION}/leases": "read",
    "PUT /leases/{lease}": "who took the lease",
    "DELETE /leases/{lease}": "who took the lease",
    f"GET {_ALIAS}": "read",
    f"PUT {_ALIAS}": "write",
    f"DELETE {_ALIAS}": "write",
    f"GET {_ALIAS}/log": "read",
    f"POST {_ALIAS}/rollback": "write",
    f"POST {_MODEL}/uploads": "write",
    f"POST {_UPLOAD}/claims": "writer of the upload",
    f"POST {_UPLOAD}/packs": "writer of the upload",
    f"POST {_UPLOAD}/heartbeat": "writer of the upload",
    f"POST {_UPLOAD}/manifest": "writer of the upload",
    f"PUT {_UPLOAD}/files/{{path:path}}": "writer of the upload",
    f"PUT {_UPLOAD}/packs/{{pack}}": "writer of the upload",
    f"PUT {_UPLOAD}/manifests/{{digest}}": "writer of the upload",
    f"POST {_UPLOAD}/commit": "writer of the upload",
    f"DELETE {_UPLOAD}": "writer of the upload",
    f"GET {_UPLOAD}": "writer of the upload",
    f"PUT {_UPLOAD}/ranks/{{rank}}": "writer of the upload",
    f"GET {_RUN}": "read",
    f"POST {_RUN}/generations": "write",
    f"PUT {_RUN}/retention": "write",
    f"DELETE {_RUN}/retention": "write",
    f"POST {_RUN}/retention/apply": "write",
    f"POST {_MODEL}/retention/apply": "admin",
    "GET /tokens": "yard admin",
    "POST /tokens": "yard admin",
    "DELETE /tokens/{token}": "yard admin",
    "GET /audit": "yard admin",
}

ALLOWED = {
    "open": {"nobody", "reader", "writer", "mate", "lead", "boss", "stranger"},
    "anyone known": {"reader", "writer", "mate", "lead", "boss", "stranger"},
    "read": {"reader", "writer", "mate", "lead", "boss"},
    "who took the lease": {"reader", "lead", "boss"},
    "write": {"writer", "mate", "lead", "boss"},
    "writer of the upload": {"writer", "lead", "boss"},
    "admin": {"lead", "boss"},
    "yard admin": {"boss"},
}
CALLERS = ("nobody", "wrong", "reader", "stranger", "mate", "writer", "lead", "boss")


OUTSIDE = ("/",)
"""Not below the API's prefix."""


def routes() -> Iterator[tuple[str, APIRoute]]:
    """Every route, with the rule's name for it."""
    below = [(router, apps.PREFIX) for router in apps.ROUTERS]
    for router, prefix in (*below, *apps.OPEN_ROUTERS):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            assert prefix == API or route.path in OUTSIDE
            for method in route.methods or ():
                yield f"{method} {route.path}", route


def test_every_route_has_its_rule_written_down_twice() -> None:
    assert {name for name, _ in routes()} == set(RULES)


def test_routes_that_ask_nobody_who_they_are_are_those_that_are_open() -> None:
    unasked = {name for name, route in routes() if not isinstance(route, GuardedRoute)}
    assert unasked == {rule for rule, who in RULES.items() if who == "open"}


def test_the_app_serves_those_routes_and_no_others(world: World) -> None:
    served = {
        f"{method.upper()} {re.sub(API, '', path)}"
        for path, operations in world.app.openapi()["paths"].items()
        for method in operations
    }
    hidden = {"GET /", "GET /openapi.json"}
    assert {re.sub(":path", "", rule) for rule in RULES} == served | hidden


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("crowd")
    with make_world(folder) as world:
        mate = world.registry.create_token(TokenName("mate"), Role.WRITE, ["team"], who="test")
        world.secrets |= {"mate": mate.secret, "wrong": "wy_" + "A" * 43}
        world.registry.create_token(TokenName("victim"), Role.READ, ["team"], who="test")
        push(world.registry, world.store, "team/held", b"held")
        yield world


@pytest.mark.parametrize("rule", list(RULES))
def test_a_route_lets_in_only_whom_its_rule_names(crowd: World, rule: str) -> None:
    method, template = rule.split(" ", 1)
    body = {"name": "team/bert"} if rule == "POST /models" else None
    for caller in CALLERS:
        opened = crowd.call("POST", "models/team/bert/uploads", token="writer").json()
        lease = crowd.registry.take_lease(Ref.parse("team/held"), "serving-7", 60, who="reader")
        path = template
        for name, value in {
            "project": "team", "name": "run42" if template.startswith("/runs") else "bert",
            "number": "1", "alias": "prod", "path:path": "w.bin", "selector": "latest", "rank": "0",
            "upload": opened["id"], "token": "victim", "lease": str(lease.id),
        }.items():  # fmt: skip
            path = path.replace(f"{{{name}}}", value)
        token = None if caller == "nobody" else caller
        params = {"for_s": 0} if template == "/events" else None
        target = path if path in OUTSIDE else API + path
        answer = crowd.call(method, target, token=token, json=body, params=params)
        refused = 404 if RULES[rule] == "who took the lease" else 403  # nor told that it is there
        if caller in ALLOWED[RULES[rule]] or (RULES[rule] == "open"):
            assert answer.status_code not in (401, refused), (caller, answer.text)
            assert RULES[rule] != "open" or answer.status_code == 200, answer.text
        else:
            expected = 401 if caller in ("nobody", "wrong") else refused
            assert answer.status_code == expected, (caller, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"


def test_a_route_without_a_rule_stops_the_service_from_starting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import APIRouter

    forgotten = APIRouter(route_class=GuardedRoute)

    @forgotten.get("/forgotten")
    async def forgotten_route() -> str:
        return "secret"

    monkeypatch.setattr(apps, "_routes", apps._routes.__wrapped__)  # as in a process of its own
    monkeypatch.setattr(apps, "ROUTERS", (*apps.ROUTERS, forgotten))
    with pytest.raises(Bug, match="/forgotten"):
        apps.create_app(world.service)
    monkeypatch.setattr(apps, "_require_rules", lambda router: None)
    world.app = apps.create_app(world.service)
    assert world.call("GET", "forgotten").status_code == 403, "and if it did, it would be closed"


def test_a_caller_is_known_before_a_byte_of_the_body_is_read(world: World) -> None:
    async def body():  # type: ignore[no-untyped-def]
        raise AssertionError("the body was read")
        yield b""

    answer = world.call("POST", "placements", token=None, content=body())
    assert answer.status_code == 401


def test_a_revoked_token_ends_at_once(world: World) -> None:
    assert world.call("GET", "models", token="reader").status_code == 200
    assert world.call("DELETE", "tokens/reader").json()["revoked"] is not None
    assert world.call("GET", "models", token="reader").json()["code"] == "unauthenticated"


def test_a_secret_is_shown_once_and_kept_as_a_hash(world: World) -> None:
    wanted = {"name": "ci", "role": "read", "projects": ["team"]}
    made = world.call("POST", "tokens", json=wanted)
    secret = made.json()["secret"]
    assert secret.startswith("wy_")
    assert len(secret) == 46
    listed = world.call("GET", "tokens?limit=2").json()
    assert listed["next"] == listed["items"][1]["name"]
    rest = world.call("GET", f"tokens?after={listed['next']}").json()["items"]
    assert rest[0]["name"] > listed["next"]
    assert secret not in world.call("GET", "tokens").text + world.call("GET", "audit").text
    assert secret.encode() not in b"".join(
        file.read_bytes() for file in Path(world.store.url[7:]).parent.glob("registry.db*")
    )
    assert world.call("GET", "models", token=secret).status_code == 200


def test_a_token_name_is_never_given_out_again(world: World) -> None:
    wanted = {"name": "reader", "role": "admin", "projects": ["*"]}
    world.call("DELETE", "tokens/reader")
    assert world.call("POST", "tokens", json=wanted).status_code == 409


def test_last_use_of_a_token_is_remembered(world: World) -> None:
    world.call("GET", "models", token="reader")
    used = {
        token["name"]: token["last_used"] for token in world.call("GET", "tokens").json()["items"]
    }
    assert used["reader"] is not None
    assert used["stranger"] is None


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "bearer wy_", "Bearer wy_" + "x" * 5000,
     "Bearer \x7f", "wy_secret"],
)  # fmt: skip
def test_anything_but_a_token_is_not_one(world: World, header: str) -> None:
    answer = world.call("GET", "models", token=None, headers={"Authorization": header})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_secrets_stay_out_of_logs_and_answers(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("weightyard"), "propagate", True)
    secret = world.secrets["boss"]
    push_file(world, "team/bert", "w.bin", b"weights")
    texts = [
        world.call("GET", f"models/team/{secret}", token=secret).text,
        world.call("GET", "models", token=secret + "x").text,
        world.call("POST", "tokens", json={"name": 1}).text,
    ]
    logged = "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("weightyard")
    )
    assert "request.done" in logged
    assert secret not in "".join(texts[1:]) + logged


def test_lists_hold_only_what_the_caller_may_read(world: World) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    push(world.registry, world.store, "other/gpt", b"two")
    names = [model["name"] for model in world.call("GET", "models", token="reader").json()["items"]]
    assert names == ["team/bert"]
    stream = world.call("GET", "events?after=0&for_s=0", token="reader").text
    assert "team/bert@v1" in stream
    assert "other/gpt" not in stream


def test_a_name_with_a_wildcard_character_opens_no_other_project(world: World) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    push(world.registry, world.store, "te_m/bert", b"two")
    made = world.registry.create_token(TokenName("t"), Role.READ, ["te_m"], who="test")
    stream = world.call("GET", "events?after=0&for_s=0", token=made.secret).text
    assert "te_m/bert" in stream
    assert "team/bert" not in stream


class TestOpen:
    """Before the first token, on loopback."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[World]:
        with make_world(tmp_path, tokens=False) as made:
            yield made

    def test_programs_of_this_host_come_in(self, world: World) -> None:
        assert world.call("GET", "models", token=None).status_code == 200

    def test_the_first_token_closes_it(self, world: World) -> None:
        wanted = {"name": "me", "role": "admin", "projects": ["*"]}
        made = world.call("POST", "tokens", token=None, json=wanted)
        assert world.call("GET", "models", token=None).status_code == 401
        world.call("DELETE", "tokens/me", token=made.json()["secret"])
        assert world.call("GET", "models", token=None).status_code == 401, "it stays closed"

    def test_other_hosts_stay_out(self, world: World) -> None:
        assert world.call("GET", "models", token=None, peer="10.0.0.7").status_code == 401

    @pytest.mark.parametrize(
        "headers",
        [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
    )
    def test_web_pages_stay_out(self, world: World, headers: dict[str, str]) -> None:
        assert world.call("GET", "models", token=None, headers=headers).status_code == 401

    @pytest.mark.parametrize("base", ["http://evil.example", "http://127.0.0.1.evil.example:8600"])
    def test_a_name_that_was_made_to_point_here_stays_out(self, world: World, base: str) -> None:
        assert world.call("GET", "models", token=None, base=base).status_code == 401

    @pytest.mark.parametrize(
        "name", ["Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP"]
    )
    def test_a_proxy_on_this_host_brings_nobody_in(self, world: World, name: str) -> None:
        refused = world.call("GET", "models", token=None, headers={name: "for=10.0.0.7"})
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
        assert "token create" in refused.json()["detail"]

    def test_on_another_address_it_does_not_start(self, tmp_path: Path) -> None:
        database = Database(f"sqlite:///{tmp_path}/other.db")
        migrate.upgrade(database)
        store = LocalStore(tmp_path / "other")
        for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
            with pytest.raises(NotAllowed, match="token create"):
                open_service(store, database, Settings(), host)
        database.close()

    def test_a_yard_that_others_use_is_never_served_open(
        self, tmp_path: Path, postgres: Callable[[], str]
    ) -> None:
        elsewhere = LocalStore(tmp_path / "elsewhere")
        cases: list[tuple[str, Store]] = [
            (f"sqlite:///{tmp_path}/other.db", RetryingStore(elsewhere)),
            (postgres(), LocalStore(tmp_path / "folder")),
        ]
        for url, store in cases:
            database = Database(url)
            migrate.upgrade(database)
            with pytest.raises(NotAllowed, match="token create"):
                open_service(store, database, Settings(), "127.0.0.1")
            token = Registry(database).create_token(TokenName("me"), Role.ADMIN, ["*"], who="test")
            service = open_service(store, database, Settings(), "127.0.0.1")
            world = World(service, create_app(service), {"me": token.secret})
            assert world.call("GET", "models", token="me").status_code == 200
            assert world.call("GET", "models", token=None).status_code == 401
            database.close()


COMMON = {"proxy_header": "X-User", "proxy_addresses": "10.1.2.3"}


class TestProxy:
    """Single sign-on by a proxy that says who is asking."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[World]:
        settings = {"proxy_header": "X-Remote-User", "proxy_addresses": "10.1.0.0/16"}
        with make_world(tmp_path, **settings) as made:
            yield made

    def ask(self, world: World, user: str, peer: str = "10.1.2.3") -> int:
        headers = {"X-Remote-User": user}
        return world.call(
            "GET", "models/team/bert", token=None, headers=headers, peer=peer
        ).status_code

    def test_a_user_has_the_rights_of_the_token_of_that_name(self, world: World) -> None:
        push(world.registry, world.store, "team/bert", b"one")
        assert self.ask(world, "reader") == 200
        assert self.ask(world, "stranger") == 403

    def test_a_user_nobody_knows_has_none(self, world: World) -> None:
        assert self.ask(world, "mallory") == 403

    def test_the_header_counts_from_the_proxy_only(self, world: World) -> None:
        assert self.ask(world, "boss", peer="10.2.0.1") == 401
        assert self.ask(world, "boss", peer="127.0.0.1") == 401

    def test_a_proxy_that_says_nothing_or_two_things_is_not_believed(self, world: World) -> None:
        call = world.call
        assert call("GET", "models", token=None, peer="10.1.2.3").status_code == 401
        assert self.ask(world, "") == 401
        two = httpx.Headers([("X-Remote-User", "reader"), ("X-Remote-User", "boss")])
        assert call("GET", "models", token=None, headers=two, peer="10.1.2.3").status_code == 401

    def test_it_is_off_unless_both_are_set(self, tmp_path: Path, world: World) -> None:
        with make_world(tmp_path / "2") as plain:
            assert self.ask(plain, "boss") == 401

    def test_users_without_a_token_may_have_a_role_in_common(self, tmp_path: Path) -> None:
        with make_world(tmp_path / "3", **COMMON, proxy_role="read") as world:
            by = {"headers": {"X-User": "someone"}, "peer": "10.1.2.3", "token": None}
            assert world.call("GET", "models", **by).status_code == 200
            assert world.call("POST", "models", json={"name": "a/b"}, **by).status_code == 403

    def test_revoking_a_token_takes_rights_away_and_gives_none(self, tmp_path: Path) -> None:
        with make_world(tmp_path / "4", **COMMON, proxy_role="write") as world:
            by = {"headers": {"X-User": "reader"}, "peer": "10.1.2.3", "token": None}
            assert world.call("GET", "models", **by).status_code == 200
            world.registry.revoke_token(TokenName("reader"))
            assert world.call("GET", "models", **by).status_code == 403
            assert world.call("POST", "models", json={"name": "a/b"}, **by).status_code == 403

    @pytest.mark.parametrize("user", ["alice/admin@REALM", "CORP\\alice", "Alice Smith"])
    def test_users_whose_name_no_token_can_have_are_users_too(
        self, tmp_path: Path, world: World, user: str
    ) -> None:
        assert self.ask(world, user) == 403
        with make_world(tmp_path / "5", **COMMON, proxy_role="read") as common:
            by = {"headers": {"X-User": user}, "peer": "10.1.2.3", "token": None}
            assert common.call("GET", "models", **by).status_code == 200
            by["headers"] = {"X-User": user * 20}
            assert common.call("GET", "models", **by).status_code == 401
