"""Every error weightyard raises, grouped by what the caller does next.

YardError
├── Retryable                 try again, here or on another replica
│   ├── StoreUnavailable      the store did not answer, or its answer was lost
│   │   └── DataNodeFailed    one DataNode did not serve; another replica may
│   ├── StaleLocation         a location is out of date: locate again
│   ├── DeadlineExceeded      the time given was used up
│   ├── RankFailed            another rank of the group that loads together failed
│   ├── UnderReplicated       written, but on fewer DataNodes than promised
│   └── RegistryUnavailable   the database did not answer, or its answer was lost
├── Conflict                  re-read and decide
│   ├── AlreadyThere          a file of that name exists
│   ├── VersionMoved          the newest version is not the one expected
│   ├── AliasMoved            the alias is not where it was expected
│   ├── Changed               a record is not as it was when it was read
│   ├── UploadExpired         the upload's lease ended; begin a new one
│   ├── RunTakenOver          another process goes on with the run: stop
│   ├── RanksMissing          not all ranks have written their share of a checkpoint
│   └── KeyReused             the idempotency key was used for something else
├── Damaged                   do not use the bytes
│   ├── BlockCorrupt          a block's bytes are not what its id or checksums say
│   ├── ReplicasDamaged       no replica in HDFS has bytes that pass HDFS's own checksums
│   ├── PackInvalid           a pack's structure does not hold together
│   ├── ManifestInvalid       a manifest's structure does not hold together
│   ├── BlockMissing          a version needs a block that lies nowhere
│   └── FileMissing           something that should be in the store is not
├── Refused                   fix the request
│   ├── InvalidName           a name, ref, path or id that does not parse
│   ├── TooLarge              over a stated bound
│   ├── UnknownFormat         written by a newer weightyard
│   ├── Unauthenticated       no token, or one that is not known
│   ├── NotAllowed            the store's permissions, or the token's rights, forbid it
│   ├── StoreFull             quota or disk is used up
│   ├── Unsupported           this store cannot do that
│   ├── NoSuchThing           no model, version, alias, token or file so named
│   ├── NotOnNode             working offline, and it is not on this node
│   ├── Protected             an alias, a dependant or a lease holds it
│   ├── QuotaExceeded         the project's quota is used up
│   ├── ForeignStore          the store belongs to another registry
│   ├── SchemaUnknown         the database's schema is not this weightyard's
│   ├── BadSetting            a setting or option that does not fit
│   ├── DoesNotFit            weights and the module they are for have other keys or shapes
│   └── ClusterFailed         the test cluster did not start
├── Cancelled                 the caller gave up; nothing is wrong
└── Bug                       report it

Each class has a `code`: stable, lower case, never reused. It is what REST problems, exit codes
and logs show; the message is for people and may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class YardError(Exception):
    """The root: catch this to catch everything weightyard raises on purpose."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks send each other copies of errors. Python would make a copy by calling `__init__`
        # with `args`, but these classes' `__init__` takes other arguments.
        return _copied, (type(self), self.args, self.__dict__)


def _copied(kind: type[YardError], args: tuple[Any, ...], fields: dict[str, Any]) -> YardError:
    made = kind.__new__(kind)
    made.args = args
    made.__dict__.update(fields)
    return made


class Retryable(YardError):
    """Nothing is wrong with the request; the same call may succeed later or elsewhere."""

    code = "retryable"
    exit_code = 3


class StoreUnavailable(Retryable):
    """The store did not answer, or its answer was lost: whether the call took effect is unknown."""

    code = "store-unavailable"


class DataNodeFailed(StoreUnavailable):
    """One DataNode did not serve a read. `datanode` names it; other replicas may well serve."""

    code = "datanode-failed"

    def __init__(self, datanode: str, reason: str) -> None:
        super().__init__(f"DataNode {datanode}: {reason}")
        self.datanode = datanode
        self.reason = reason


class StaleLocation(Retryable):
    """A location no longer holds (replaced pack, expired block token): locate again and read."""

    code = "stale-location"


class DeadlineExceeded(Retryable):
    """The time given for a call was used up."""

    code = "deadline-exceeded"


class RankFailed(Retryable):
    """Other ranks of the group failed or are gone, so this one cannot go on. `ranks` names them."""

    code = "rank-failed"

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        named = ", ".join(map(str, ranks)) or "unknown"
        super().__init__(f"rank {named}: {reason}")
        self.ranks = tuple(ranks)
        self.reason = reason


class UnderReplicated(Retryable):
    """A file is closed but lies on fewer DataNodes than `min_replicas` asks for."""

    code = "under-replicated"


class RegistryUnavailable(Retryable):
    """The database did not answer, or its answer was lost: read back before trying again."""

    code = "registry-unavailable"


class Conflict(YardError):
    """The world is not as the caller assumed: re-read and decide."""

    code = "conflict"
    exit_code = 4


class AlreadyThere(Conflict):
    """A file of that name exists. It may be from a call whose answer was lost: compare it."""

    code = "already-there"


class VersionMoved(Conflict):
    """The model's newest version, `current`, is not the one the publisher expected."""

    code = "version-moved"

    def __init__(self, model: str, expected: int, current: int) -> None:
        super().__init__(
            f"{model}: newest is {_version(current)}, expected was {_version(expected)}"
        )
        self.current = current


class AliasMoved(Conflict):
    """The alias does not point to the version the mover expected. `current` says where it is."""

    code = "alias-moved"

    def __init__(self, model: str, alias: str, expected: int | None, current: int | None) -> None:
        found, wanted = _version(current), _version(expected)
        super().__init__(f"{model}: alias {alias} is on {found}, expected was {wanted}")
        self.current = current


class Changed(Conflict):
    """A record is not as it was when the caller read it: read it again, then decide."""

    code = "changed"


class UploadExpired(Conflict):
    """An upload whose lease ended, or that is unknown. What it wrote is kept for a while: push
    again, and nothing that is in the store is sent twice."""

    code = "upload-expired"


class RunTakenOver(Conflict):
    """A run is at another generation than the caller's: another process goes on with it.

    Nothing was published. `current` is the run's generation. A process that is meant to go on with
    the run begins a new one.
    """

    code = "run-taken-over"

    def __init__(self, run: str, generation: int, current: int) -> None:
        super().__init__(
            f"{run} is at generation {current}, not {generation}: another process goes on with "
            "it, so stop; or take it over by beginning a generation"
        )
        self.current = current


class RanksMissing(Conflict):
    """A checkpoint whose ranks have not all finished. Nothing was published.

    `missing` says which, the first thousand of them.
    """

    code = "ranks-missing"

    def __init__(self, upload: str, missing: Sequence[int], ranks: int) -> None:
        shown = ", ".join(map(str, missing[:20])) + (", …" if len(missing) > 20 else "")
        super().__init__(
            f"upload {upload}: of {ranks} ranks these have not finished: {shown}; "
            "commit when they have"
        )
        self.missing = tuple(missing[:1000])


class KeyReused(Conflict):
    """An idempotency key that was used for other content."""

    code = "key-reused"


class Damaged(YardError):
    """Bytes in the store are wrong or gone. They were not handed to anyone."""

    code = "damaged"
    exit_code = 5


class BlockCorrupt(Damaged):
    """A block's bytes do not match its id, its checksums or its declared sizes."""

    code = "block-corrupt"


class ReplicasDamaged(Damaged):
    """No replica of a part of a file passes HDFS's own checksums, though the DataNodes answer."""

    code = "replicas-damaged"


class PackInvalid(Damaged):
    """A pack's trailer, footer or placements do not hold together."""

    code = "pack-invalid"


class ManifestInvalid(Damaged):
    """A manifest is not well formed, or does not cover what it says it covers."""

    code = "manifest-invalid"


class BlockMissing(Damaged):
    """A block that lies in no pack of the store, or in none the writer holds."""

    code = "block-missing"


class FileMissing(Damaged):
    """A file that was asked for by its path is not in the store."""

    code = "file-missing"


class Refused(YardError):
    """The request cannot be carried out as it is: fix it."""

    code = "refused"
    exit_code = 2


class InvalidName(Refused):
    """A name, ref, path or id that does not parse. The message says what is allowed."""

    code = "invalid-name"


class TooLarge(Refused):
    """Over a stated bound; the message names the bound."""

    code = "too-large"


class UnknownFormat(Refused):
    """The bytes carry a format version this weightyard does not know. Upgrade it to read them."""

    code = "unknown-format"

    def __init__(self, what: str, found: int, known: int) -> None:
        super().__init__(
            f"{what} has format version {found}; this weightyard reads up to {known}: upgrade it"
        )
        self.found = found
        self.known = known


class Unauthenticated(Refused):
    """The service was shown no token, or one it does not know."""

    code = "unauthenticated"


class NotAllowed(Refused):
    """The store's permissions, or the role and projects of the token, forbid it."""

    code = "not-allowed"


class StoreFull(Refused):
    """A quota or the disk is used up. Nothing was published."""

    code = "store-full"


class Unsupported(Refused):
    """This store, or this path through it, cannot do what was asked."""

    code = "unsupported"


class NoSuchThing(Refused):
    """No model, version, alias or token of that name, or no file or folder to push."""

    code = "no-such-thing"


class NotOnNode(Refused):
    """The work is offline, and what is asked for is not on this node."""

    code = "not-on-node"


class Protected(Refused):
    """An alias, a dependant or a lease holds it; the message says which."""

    code = "protected"


class QuotaExceeded(Refused):
    """The project's quota is used up; the message says which and by how much."""

    code = "quota-exceeded"


class ForeignStore(Refused):
    """The store belongs to another registry. `weightyard rebuild --adopt` takes it over."""

    code = "foreign-store"


class SchemaUnknown(Refused):
    """The database's schema is not the one this weightyard works with."""

    code = "schema-unknown"


class BadSetting(Refused):
    """A setting or option has a value that does not fit."""

    code = "bad-setting"


class DoesNotFit(Refused):
    """Weights and the module they are for have other keys or shapes; nothing was read."""

    code = "does-not-fit"

    def __init__(self, message: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class ClusterFailed(Refused):
    """The test cluster did not start; the message ends with the log that says why."""

    code = "cluster-failed"


class Cancelled(YardError):
    """The caller ended the call before it was done. What buffers hold then is undefined."""

    code = "cancelled"
    exit_code = 130


class Bug(YardError):
    """Something that cannot happen did. Please report it with the message."""

    code = "bug"
    exit_code = 70


def _version(number: int | None) -> str:
    return f"v{number}" if number else "no version"
