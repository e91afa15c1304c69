"""A cluster that lives on after the command that started it, until it is taken down."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from weightyard.errors import BadSetting, ClusterFailed
from weightyard.settings import Settings
from weightyard.testing.cluster import startup
from weightyard.testing.cluster.configuration import ClusterPlan
from weightyard.testing.cluster.java import installed_java
from weightyard.testing.cluster.observed import namenode_state
from weightyard.testing.cluster.ports import PortBlock
from weightyard.testing.cluster.processes import Leash, ProcessIdentity
from weightyard.testing.cluster.shared_classes import sharing

_RECORD = "cluster.json"
_MAX_RECORD_BYTES = 1 << 20
_TAKEN_APART = re.compile(r"[:,#?%\n]")
"""Signs in the path of a folder that mean something in a class path, a list of folders or a URI."""
_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 20.0


class RecordedDaemon(msgspec.Struct, frozen=True):
    """A daemon, and which process it is."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-z]{2}[0-9]{1,2}\Z")]
    """Also that of the folder which `down` removes."""
    http: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_ticks: int
    boot: str

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot)


class Record(msgspec.Struct, frozen=True):
    """What `up` leaves behind for `status` and `down`."""

    url: Annotated[str, msgspec.Meta(pattern=r"\Ahdfs://[A-Za-z0-9.:]+\Z")]
    conf_dir: str
    namenode_http: tuple[str, ...]
    daemons: tuple[RecordedDaemon, ...]

    @property
    def exports(self) -> str:
        """The line that makes a shell use this cluster."""
        conf_dir = shlex.quote(self.conf_dir)
        return f"export HADOOP_CONF_DIR={conf_dir} WEIGHTYARD_STORE={self.url}/weightyard"


@dataclass(frozen=True, slots=True)
class Status:
    """How a recorded cluster is doing."""

    record: Record
    running: tuple[str, ...]
    """Names of the daemons whose process is there."""
    live_datanodes: int
    is_ready: bool


def up(
    folder: Path, *, plan: Callable[[PortBlock], ClusterPlan], say: Callable[[str], None]
) -> Record:
    """Start a cluster in a folder, leave it running, and write down what was started.

    If this is interrupted at any point before it returns, nothing is left running. Raises
    ClusterFailed if the folder has a running cluster, or holds anything else.
    """
    folder = folder.absolute()
    if odd := _TAKEN_APART.search(str(folder)):
        raise BadSetting(f"{folder}: Hadoop takes paths apart at {odd[0]!r}: choose another --dir")
    java = installed_java(Settings(), say=say)
    with _locked(folder), closing(PortBlock.reserve()) as ports:
        _make_room(folder)
        planned = plan(ports)
        with closing(Leash(folder)) as leash:
            daemons = startup.bring_up(
                planned,
                folder,
                sharing(java) or java,
                leash,
                timeout_s=_START_TIMEOUT_S,
                say=say,
            )
            record = Record(
                url=planned.url,
                conf_dir=str(folder / "conf"),
                namenode_http=tuple(one.http for one in planned.namenodes),
                daemons=tuple(
                    RecordedDaemon(
                        name=one.name,
                        http=one.plan.http,
                        pid=one.identity.pid,
                        start_ticks=one.identity.start_ticks,
                        boot=one.identity.boot,
                    )
                    for one in daemons
                ),
            )
            (folder / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
            leash.release()
    return record


def status(folder: Path) -> Status | None:
    """How the cluster of a folder is doing; None if there is none."""
    record = _read(folder)
    if record is None:
        return None
    running = tuple(one.name for one in record.daemons if one.identity.is_alive)
    states = [state for http in record.namenode_http if (state := namenode_state(http))]
    active = next((state for state in states if state.is_active), None)
    return Status(
        record=record,
        running=running,
        live_datanodes=active.live_datanodes if active else 0,
        is_ready=active is not None and not active.in_safe_mode,
    )


def down(folder: Path) -> Record | None:
    """End the daemons of a folder's cluster and remove their data; None if there was none."""
    if not folder.exists():
        return None
    with _locked(folder):
        record = _read(folder)
        if record is not None:
            _end(record)
            _remove(folder, record)
        with suppress(OSError):  # someone's files are in it
            folder.rmdir()
        return record


def _end(record: Record) -> None:
    for one in record.daemons:
        one.identity.send(signal.SIGKILL)
    for one in record.daemons:
        if not one.identity.wait_gone(_END_TIMEOUT_S):
            raise ClusterFailed(f"{one.name}, process {one.pid}, does not end")


def _remove(folder: Path, record: Record) -> None:
    """Remove what `up` made. A file someone else put into the folder stays."""
    for name in ("conf", *(one.name for one in record.daemons)):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / _RECORD).unlink(missing_ok=True)


def _make_room(folder: Path) -> None:
    """Leave an empty folder where a cluster can be made, or refuse."""
    found = status(folder)
    if found is not None and found.running:
        raise ClusterFailed(
            f"{folder} has a running cluster ({', '.join(found.running)}): to use it, "
            f"`{found.record.exports}`; else take it down first, or choose another --dir"
        )
    if found is not None:
        _remove(folder, found.record)  # its daemons ended without `down`, as after a reboot
    if any(folder.iterdir()):
        raise ClusterFailed(f"{folder} is not empty and holds no {_RECORD}: choose another --dir")


def _read(folder: Path) -> Record | None:
    path = folder / _RECORD
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=Record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as why:
        raise ClusterFailed(f"{path} cannot be read: {why.strerror}") from why
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise ClusterFailed(f"{path} does not parse: {why}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `up` or `down` of a folder at a time; who comes second is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as why:
        raise BadSetting(f"{folder} cannot be a cluster's folder: {why}") from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterFailed(f"another `cluster up` or `down` is at work on {folder}") from None
        yield
    finally:
        os.close(held)
