"""What only the HTTP side of a NameNode offers: where blocks are, and storage policies."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from io import BytesIO
from typing import Annotated, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from hdfs.client import Client, InsecureClient, _Request
from hdfs.util import HdfsError
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from weightyard.errors import (
    FileMissing,
    NotAllowed,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.remote import BELOW_A_FILE
from weightyard.storage.hdfs.tickets import TicketAuth
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken
from weightyard.storage.store import Location, Replica, Span, StorePath
from weightyard.storage.watched import Watched

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""About a hundred thousand HDFS blocks."""

STALE_S = 30.0
"""A DataNode the NameNode has not heard from for so long is read last. HDFS still lists it for ten
minutes more."""

_T = TypeVar("_T")

_CONNECT_S, _ANSWER_S = 2.0, 10.0
_MAX_KNOWN_FOLDERS = 4096
_STATES = {"NORMAL": "normal", "DECOMMISSION_INPROGRESS": "decommissioning"}

_Length = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[!-~]*$")]
_Address = Annotated[
    str,
    msgspec.Meta(
        max_length=64,
        pattern=r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[0-9A-Za-z._-]+)?|)\Z",
    ),
]
_TokenText = Annotated[str, msgspec.Meta(max_length=32 * 1024)]


class UnderConstruction(StoreUnavailable):
    """A file that its writer has not closed, or that one has opened again to append to it."""


class Locator(Protocol):
    """Anything that knows where files lie: a NameNode, or a service that asked one."""

    def locate(self, path: StorePath, deadline: Deadline) -> Location:
        """Raises FileMissing, NotAllowed, StoreUnavailable, DeadlineExceeded."""


class NameNode:
    """The NameNodes of a cluster by WebHDFS: the active one is found by asking. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._client = _client(cluster)
        self._encrypted: dict[str, bool] = {}
        self._lock = threading.Lock()

    def locate(self, path: StorePath, deadline: Deadline) -> Location:
        located = self.spread(path, deadline)
        if not any(span.access for span in located.spans):  # no DataNode can be asked for its bytes
            return located
        # In an encryption zone the bytes on DataNodes are ciphertext, which only the status tells.
        # Only an empty folder can become a zone: so for one that holds a file the answer stays.
        folder = self._cluster.at(path).rpartition("/")[0] or "/"
        if self._is_encrypted(folder, path, deadline):
            return Location(
                path,
                located.length,
                tuple(Span(one.offset, one.length, one.replicas) for one in located.spans),
            )
        return located

    def spread(self, path: StorePath, deadline: Deadline) -> Location:
        """Where a file lies, in one call: its bytes there may be ciphertext. Raises as `locate`."""
        file = self._cluster.at(path)
        try:
            with _translated(path):
                answer = self._client.block_locations(file, deadline=deadline)
                raw = _body(answer, path, deadline)
                now_s = _server_time_s(answer)
        except Unsupported:  # a gateway older than Hadoop 3.4 does not know locations
            length = self._status(file, path, deadline).length
            return Location(path, length, (Span(0, length, ()),) if length else ())
        return parse_locations(raw, path, self._cluster.uses_datanode_hostname, now_s)

    def set_policy(
        self, path: StorePath, policy: str, deadline: Deadline, *, is_empty: bool = False
    ) -> None:
        """Set a file's or folder's storage policy; existing blocks move in HDFS's own time.

        `is_empty`: a file that has no blocks yet, so that there is nothing to move.
        Raises FileMissing, Unsupported (no such policy).
        """
        file = self._cluster.at(path)
        with _translated(path):
            _body(
                self._client.set_policy(file, storagepolicy=policy, deadline=deadline),
                path,
                deadline,
            )
        if is_empty:
            return
        try:
            with _translated(path):
                _body(self._client.satisfy_policy(file, deadline=deadline), path, deadline)
        except (StoreUnavailable, Unsupported):
            pass  # Most clusters run no satisfier; there the mover does it.

    def open(
        self, path: StorePath, offset: int, length: int, deadline: Deadline
    ) -> requests.Response:
        """Ask for bytes. The answer has them (a gateway), or redirects to a DataNode that does."""
        with _translated(path):
            answer: requests.Response = self._client.open_at(
                self._cluster.at(path), offset=offset, length=length, deadline=deadline
            )
            return answer

    def is_encrypted(self, folder: StorePath, deadline: Deadline) -> bool:
        """Whether a folder lies in an encryption zone. Raises FileMissing."""
        return self._is_encrypted(self._cluster.at(folder), folder, deadline)

    def clock_s(self, deadline: Deadline) -> float:
        """The NameNode's time, to a second. Raises Unsupported if it does not say."""
        with _translated("/"):
            answer = self._client.file_status("/", deadline=deadline)
            _body(answer, "/", deadline)
        told = _server_time_s(answer)
        if told is None:
            raise Unsupported("the NameNode does not tell its time")
        return told

    def is_transfer_encrypted(self, deadline: Deadline) -> bool:
        """Whether clients are told to encrypt what they send to DataNodes and get from them."""
        with _translated("/"):
            raw = _body(self._client.server_defaults("/", deadline=deadline), "/", deadline)
        return _decoded(raw, _DefaultsAnswer, "/").fs_server_defaults.is_encrypted

    def close(self) -> None:
        self._client.close()

    def _is_encrypted(self, folder: str, path: StorePath, deadline: Deadline) -> bool:
        with self._lock:
            known = self._encrypted.get(folder)
        if known is None:
            known = self._status(folder, path, deadline).enc_bit
            with self._lock:
                if len(self._encrypted) >= _MAX_KNOWN_FOLDERS:
                    self._encrypted.clear()
                self._encrypted[folder] = known
        return known

    def _status(self, file: str, path: StorePath, deadline: Deadline) -> _Status:
        with _translated(path):
            raw = _body(self._client.file_status(file, deadline=deadline), path, deadline)
        return _decoded(raw, _StatusAnswer, path).file_status


def parse_locations(
    raw: bytes, path: StorePath, uses_hostname: bool, now_s: float | None = None
) -> Location:
    """A location from a NameNode's answer, whose blocks must cover the file exactly.

    Blocks without an id (a gateway's answer) and erasure coded ones (their ids are negative) give
    spans without `access`: a single DataNode cannot serve them. Raises UnderConstruction,
    StoreUnavailable.
    """
    answer = _decoded(raw, _LocationsAnswer, path).located_blocks
    if answer.is_under_construction:
        raise UnderConstruction(f"{path} is still being written")
    spans, end = [], 0
    for one in sorted(answer.located_blocks, key=lambda one: one.start_offset):
        length = one.length if one.block is None else one.block.num_bytes
        if one.start_offset != end:
            raise StoreUnavailable(f"{path}: its blocks do not follow each other")
        end += length
        access = None
        if one.block is not None and one.block.block_id >= 0:
            token = BlockToken.from_url_string(one.block_token.url_string)
            access = BlockAccess(
                one.block.block_pool_id,
                one.block.block_id,
                one.block.generation_stamp,
                length,
                token,
            )
        replicas = [_replica(node, uses_hostname, one.is_corrupt, now_s) for node in one.locations]
        spans.append(Span(end - length, length, tuple(replicas), access))
    if answer.file_length not in (None, end):
        raise StoreUnavailable(f"{path}: {answer.file_length} bytes, but its blocks have {end}")
    return Location(path, end, tuple(spans))


def _replica(node: _Node, uses_hostname: bool, is_corrupt: bool, now_s: float | None) -> Replica:
    state = _STATES.get(node.admin_state, node.admin_state.lower())
    if is_corrupt:
        state = "corrupt"
    elif state == "normal" and now_s and node.last_update and now_s > node.heard_s + STALE_S:
        state = "stale"
    address = node.host_name if uses_hostname or not node.ip_addr else node.ip_addr
    if ":" in address:
        address = f"[{address}]"
    return Replica(f"{address}:{node.xfer_port}", node.host_name, node.network_location, state)


class _Block(msgspec.Struct, rename="camel"):
    block_id: _Id
    block_pool_id: _Name
    generation_stamp: _Length
    num_bytes: _Length


class _Token(msgspec.Struct, rename="camel"):
    url_string: _TokenText = "AAAAAA"


class _Node(msgspec.Struct, rename="camel"):
    host_name: _Name
    xfer_port: _Port
    ip_addr: _Address = ""
    network_location: _Name = "/default-rack"
    admin_state: _Name = "NORMAL"
    last_update: _Length = 0

    @property
    def heard_s(self) -> float:
        return self.last_update / 1000


class _LocatedBlock(msgspec.Struct, rename="camel"):
    start_offset: _Length = 0
    length: _Length = 0
    block: _Block | None = None
    block_token: _Token = msgspec.field(default_factory=_Token)
    locations: Annotated[list[_Node], msgspec.Meta(max_length=512)] = []
    is_corrupt: bool = False


class _LocatedBlocks(msgspec.Struct, rename="camel"):
    located_blocks: Annotated[list[_LocatedBlock], msgspec.Meta(max_length=200_000)]
    file_length: _Length | None = None
    is_under_construction: bool = False


class _LocationsAnswer(msgspec.Struct, rename="pascal"):
    located_blocks: _LocatedBlocks


class _Status(msgspec.Struct, rename="camel"):
    length: _Length
    enc_bit: bool = False


class _StatusAnswer(msgspec.Struct, rename="pascal"):
    file_status: _Status


class _Defaults(msgspec.Struct, rename="camel"):
    encrypt_data_transfer: bool | str = False

    @property
    def is_encrypted(self) -> bool:
        return str(self.encrypt_data_transfer).lower() == "true"  # it comes as text


class _DefaultsAnswer(msgspec.Struct):
    fs_server_defaults: _Defaults = msgspec.field(name="FsServerDefaults")


class _Operations:
    """Operations of WebHDFS that the `hdfs` package does not declare, each with a deadline."""

    block_locations = _Request("GET").to_method("GET_BLOCK_LOCATIONS")
    file_status = _Request("GET").to_method("GETFILESTATUS")
    server_defaults = _Request("GET").to_method("GETSERVERDEFAULTS")
    open_at = _Request("GET", allow_redirects=False).to_method("OPEN")
    set_policy = _Request("PUT").to_method("SETSTORAGEPOLICY")
    satisfy_policy = _Request("PUT").to_method("SATISFYSTORAGEPOLICY")

    def close(self) -> None:
        self._session.close()  # type: ignore[attr-defined]

    def resolve(self, path: str) -> str:
        """A path is taken literally: the package would expand `#LATEST` in it."""
        return path

    def _request(self, method: str, url: str, params: dict[str, Any], **more: Any) -> Any:
        """As the package's own, but that has the same time-outs for all calls and NameNodes."""
        query = {**params}
        deadline: Deadline = query.pop("deadline")
        asked = urlsplit(url)
        doing = f"asking a NameNode about {asked.path.removeprefix('/webhdfs/v1')}"
        limits_s = [deadline.left_at_most(s, doing) for s in (_CONNECT_S, _ANSWER_S)]
        answer = self._session.request(  # type: ignore[attr-defined]
            method,
            url,
            params=query,
            timeout=tuple(limits_s),
            headers={"content-type": "application/octet-stream"},  # HttpFS wants it
            stream=True,
            **more,
        )
        if not answer.ok:  # read it here: the package would do so without a deadline
            said = _body(answer, url, deadline)
            # Errors are in JSON, but for those of whoever checks tickets.
            is_about_tickets = (
                answer.status_code == HTTPStatus.UNAUTHORIZED or b"Authentication" in said
            )
            if not is_about_tickets and not said.lstrip().startswith(b"{"):
                raise StoreUnavailable(_not_a_namenodes(asked.netloc, said))
            answer.raw = BytesIO(said)
        return answer


class _SimpleClient(_Operations, InsecureClient):  # type: ignore[misc]
    pass


class _KerberosClient(_Operations, Client):  # type: ignore[misc]
    """Its session shows tickets. A KDC may be asked for them, and GSSAPI knows no deadline."""

    def __init__(self, urls: str, session: requests.Session) -> None:
        super().__init__(urls, session=session)
        self._watched = Watched()

    def close(self) -> None:
        super().close()
        self._watched.close()

    def _request(self, method: str, url: str, params: dict[str, Any], **more: Any) -> Any:
        doing = "asking a NameNode, or a KDC for a ticket"
        limit_s = params["deadline"].left_at_most(_CONNECT_S + _ANSWER_S, doing)
        ask = partial(super()._request, method, url, params, **more)
        return self._watched.call(doing, limit_s, ask)


def _client(cluster: Cluster) -> Any:
    session = requests.Session()
    # A proxy of the environment is for the outside world, and .netrc for other services.
    session.trust_env = False
    session.verify = ssl.get_default_verify_paths().cafile or True
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=32))
    urls = ";".join(cluster.webhdfs)
    if not cluster.is_kerberos:
        return _SimpleClient(urls, user=cluster.user, session=session)
    session.auth = TicketAuth()
    return _KerberosClient(urls, session)


def _body(answer: requests.Response, path: StorePath | str, deadline: Deadline) -> bytes:
    parts, length = [], 0
    with closing(answer):
        # As it comes: a call that waited for more would ignore the deadline meanwhile.
        while part := answer.raw.read1(1 << 20, decode_content=True):
            deadline.left(f"asking a NameNode about {path}")
            parts.append(part)
            length += len(part)
            if length > MAX_ANSWER_BYTES:
                raise StoreUnavailable(f"{path}: an answer of over {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)


def _decoded(raw: bytes, kind: type[_T], path: StorePath | str) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise StoreUnavailable(f"{path}: not a NameNode's answer: {why}") from None


def _server_time_s(answer: requests.Response) -> float | None:
    """The NameNode's clock, by which it gives the times of DataNodes' last signs of life."""
    try:
        return parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


_BY_EXCEPTION: dict[str, type[YardError]] = {
    "FileNotFoundException": FileMissing,
    "AccessControlException": NotAllowed,
    "SecurityException": NotAllowed,
    "IllegalArgumentException": Unsupported,
    "HadoopIllegalArgumentException": Unsupported,
    "QueryParamException": Unsupported,
    "UnsupportedOperationException": Unsupported,
}


def _not_a_namenodes(address: str, said: bytes) -> str:
    line = said.decode("utf-8", "replace").strip()[:200]
    return (
        f"{address} answered as no NameNode does: {line!a}; does HADOOP_CONF_DIR say where it "
        "speaks HTTP (dfs.namenode.http-address)?"
    )


def _asked(why: requests.RequestException | HTTPError) -> str:
    """Who did not answer."""
    request = getattr(why, "request", None)
    address = urlsplit(request.url).netloc.rpartition("@")[2] if request is not None else ""
    return address or "a NameNode"


@contextmanager
def _translated(path: StorePath | str) -> Iterator[None]:
    """Turns what the client raises into the error tree, naming the file."""
    began = time.monotonic()
    try:
        yield
    except HdfsError as why:
        kind = _BY_EXCEPTION.get(why.exception or "", StoreUnavailable)
        if why.exception is None and "Authentication" in str(why):
            kind = NotAllowed
        elif "Cannot find a block policy" in str(why):  # all that a gateway says
            kind = Unsupported
        elif BELOW_A_FILE in str(why):
            kind = FileMissing
        first_line = str(why).split("\n", 1)[0]
        raise kind(f"{path}: {first_line[:500]}") from None
    except (requests.RequestException, HTTPError) as why:
        # Its text has the whole URL, which may hold a delegation token.
        if "CERTIFICATE_VERIFY_FAILED" in str(why):
            raise NotAllowed(
                f"{path}: the certificate of a NameNode or DataNode is not trusted: have "
                "SSL_CERT_FILE name a file with that of its authority"
            ) from None
        waited_s = time.monotonic() - began
        said = f"{type(why).__name__} after {waited_s:.1f} s"
        raise StoreUnavailable(
            f"{path}: no answer from {_asked(why)} by WebHDFS: {said}; is it up, and does "
            "HADOOP_CONF_DIR say where it listens (dfs.namenode.http-address)?"
        ) from None
    except (KeyError, TypeError, ValueError) as why:
        raise StoreUnavailable(f"{path}: not a NameNode's answer: {why!r:.200}") from None
