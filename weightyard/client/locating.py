"""ServiceLocator: asks the service where packs lie, once for all packs of a version.

So a reader needs neither a NameNode's address nor a Kerberos ticket.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from weightyard.client.connection import ANSWER_S, Connection
from weightyard.errors import DeadlineExceeded, FileMissing, NoSuchThing, TooLarge
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Configuration
from weightyard.storage.hdfs.located import MAX_FILES, MAX_LOCATED_BYTES, Located, from_json
from weightyard.storage.store import Location, StorePath

_log = Log(__name__)

MOST_VERSIONS = 16
LIFE_S = 150.0
"""How long an answer is used; after that the service is asked again."""

_OWN_FILE = "/about/location"


class ServiceLocator:
    """Locations of the packs of versions that are being read. Thread-safe.

    It is told of a version (`expect`) before its packs are asked for. If a path is asked for a
    second time, its first location did not serve: then the service is asked for a newer answer,
    which it makes only now and then.
    """

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._routes: OrderedDict[str, _Known | None] = OrderedDict()

    def expect(self, version: Version) -> None:
        """Say that a version's packs may be asked for. Asks nothing."""
        ref = Ref.parse(version.ref)
        model = ref.model
        route = f"/models/{model.project}/{model.name}/versions/{version.number}/locations"
        with self._lock:
            self._routes.setdefault(route, None)
            self._routes.move_to_end(route)
            while len(self._routes) > MOST_VERSIONS:
                self._routes.popitem(last=False)

    def locate(self, path: StorePath, deadline: Deadline) -> Location:
        """Where a pack of an expected version lies, or the yard's own file.

        Raises FileMissing, NotAllowed, RegistryUnavailable, DeadlineExceeded.
        """
        asked_at = self._clock()
        doing = f"asking the service where {path} is"
        # One at a time: the others most likely wait for what the first is asking for.
        if not self._asking.acquire(timeout=min(deadline.left(doing), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(f"no time left while {doing}")
        try:
            for route, known in self._candidates(path):
                if known is None or self._clock() > known.at + LIFE_S:
                    known = self._ask(route, None, deadline)
                elif known.is_used_up(path, asked_at):
                    known = self._ask(route, known.located.stamp, deadline)
                if (found := known.take(path, self._clock())) is not None:
                    return found
        finally:
            self._asking.release()
        raise FileMissing(f"{path}: the service knows no such pack of the versions read here")

    def _candidates(self, path: StorePath) -> list[tuple[str, _Known | None]]:
        """What may tell a path: answers that have it, versions not asked for yet, other answers."""
        if path == layout.YARD:
            return [(_OWN_FILE, None)]
        with self._lock:
            routes = list(reversed(self._routes.items()))

        def doubt(known: _Known | None) -> int:
            if known is None:
                return 1
            return 0 if path in known.located.locations else 2

        return sorted(routes, key=lambda route: doubt(route[1]))

    def _ask(self, route: str, stale: str | None, deadline: Deadline) -> _Known:
        doing = "asking the service for locations"
        uses_hostname = Configuration.load(self._settings).is_on("dfs.client.use.datanode.hostname")
        query = f"?stale={stale}" if stale else ""  # empty: the service gave no answer before
        text = bytearray()
        try:
            answer_s = deadline.left_at_most(ANSWER_S, doing)
            with self._connection.stream(route + query, {}, answer_s=answer_s) as response:
                for part in response.iter_bytes():
                    deadline.left(doing)
                    text += part
                    if len(text) > MAX_LOCATED_BYTES:
                        raise TooLarge(f"{doing}: over {MAX_LOCATED_BYTES} bytes")
        except NoSuchThing as why:
            # A removed version that a reader still holds: its packs lie where they lay before.
            _log.info("locations.not_told", route=route, reason=why)
            with self._lock:
                before = self._routes.get(route)
            located = before.located if before is not None else Located("", {})
        else:
            located = from_json(bytes(text), uses_hostname=uses_hostname)
        known = _Known(located, self._clock())
        with self._lock:
            if route in self._routes:
                self._routes[route] = known
                self._routes.move_to_end(route)
            self._forget_most()
        return known

    def _forget_most(self) -> None:
        """Keep only the answers used last, with as many locations as one answer may have."""
        room = MAX_FILES
        for route, known in reversed(self._routes.items()):
            if known is not None:
                room -= len(known.located.locations)
                if room < 0:
                    self._routes[route] = None


@dataclass(slots=True)
class _Known:
    """One answer, and which of its locations were given out already."""

    located: Located
    at: float
    given: dict[StorePath, float] = field(default_factory=dict)

    def is_used_up(self, path: StorePath, asked_at: float) -> bool:
        """Whether this answer cannot help a caller that began to ask at that time."""
        if path not in self.located.locations:
            return self.at < asked_at
        return self.given.get(path, asked_at) < asked_at

    def take(self, path: StorePath, now: float) -> Location | None:
        found = self.located.locations.get(path)
        if found is not None:
            self.given.setdefault(path, now)
        return found
