"""A model's way through the service, told in containers: each part runs in one of them.

story.py send      where only the service is reached: files as raw bodies of REST requests
story.py push      where HDFS is reached too: by the client, bytes straight to and from DataNodes
story.py again     where only the service is reached, after it was restarted

WEIGHTYARD_URL and WEIGHTYARD_TOKEN say which service, and who is asking.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save

from weightyard.doctor import examine
from weightyard.opening import open_yard
from weightyard.settings import Settings

SENT, PUSHED = "team/sent", "team/pushed"


def model(seed: int) -> Mapping[str, bytes]:
    """Files that are the same wherever they are made, so that all can tell what comes back."""
    random = np.random.default_rng(seed)
    tensors = {
        f"layers.{layer}.weight": random.normal(0, 0.02, (1024, 1024)).astype(np.float32)
        for layer in range(6)
    }
    return {
        "config.json": json.dumps({"layers": 6, "seed": seed}).encode(),
        "model.safetensors": save(tensors),
        "notes/words.bin": random.bytes(3_000_001),
    }


def send() -> None:
    """Publish and fetch back by REST alone."""
    assert not reaches_hdfs(), "this part belongs where HDFS is out of reach"
    with service(token=None) as stranger:
        assert stranger.get(f"models/{SENT}").status_code == httpx.codes.UNAUTHORIZED
    with service() as asked:
        said = {"message": "sent as raw bodies", "alias": "prod"}
        upload = answered(asked.post(f"models/{SENT}/uploads", json=said)).json()["id"]
        for path, content in model(1).items():
            answered(asked.put(f"uploads/{upload}/files/{path}", content=content))
        number = answered(asked.post(f"uploads/{upload}/commit")).json()["number"]
        assert number == 1
        assert_comes_back(asked, SENT, model(1))


def push() -> None:
    """Publish, name and fetch with access to the store."""
    assert reaches_hdfs(), "this part belongs where HDFS is reached"
    with open_yard() as yard, tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        for path, content in model(2).items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(content)
        pushed = yard.push(source, PUSHED, message="pushed to HDFS")
        assert yard.push(source, PUSHED).new_bytes == 0, "what is there is not stored again"
        yard.set_alias(PUSHED, "prod", pushed.number, reason="the first", expect=0)
        for name, seed in ((PUSHED, 2), (SENT, 1)):
            pulled = yard.pull(f"{name}@prod", Path(scratch, str(seed)))
            for path, content in model(seed).items():
                assert (pulled / path).read_bytes() == content, f"{name}: {path} is different"
    found = {one.check: one for one in examine()}
    for way in ("read path", "write path"):
        print(f"{way}: {found[way].message}")
        assert found[way].state == "ok"


def again() -> None:
    """What was published outlives the process that served it."""
    with service() as asked:
        for name, seed in ((SENT, 1), (PUSHED, 2)):
            assert_comes_back(asked, name, model(seed))


def assert_comes_back(asked: httpx.Client, name: str, files: Mapping[str, bytes]) -> None:
    number = answered(asked.get(f"models/{name}/resolve/prod")).json()["number"]
    assert number == 1
    for path, content in files.items():
        got = answered(asked.get(f"models/{name}/versions/{number}/files/{path}")).content
        assert got == content, f"{name}: {path} is different"


def service(token: str | None = "") -> httpx.Client:
    """The service of the settings; with their token, unless another or none is given."""
    settings = Settings()
    if token == "" and settings.token is not None:
        token = settings.token.get_secret_value()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(
        base_url=f"{settings.url}/api/v1", headers=headers, timeout=60, trust_env=False
    )


def answered(answer: httpx.Response) -> httpx.Response:
    assert answer.is_success, f"{answer.request.url}: {answer.status_code} {answer.text[:500]}"
    return answer


def reaches_hdfs() -> bool:
    try:
        socket.create_connection(("namenode", 8020), timeout=5).close()
    except OSError:
        return False
    return True


match sys.argv[1:]:
    case ["send"]:
        send()
    case ["push"]:
        push()
    case ["again"]:
        again()
    case _:
        sys.exit(__doc__)
print(f"{sys.argv[1]}: bit for bit")
