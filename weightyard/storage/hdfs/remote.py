"""What a NameNode refuses, as the error tree: it names a Java class and says why in a line."""

from __future__ import annotations

import re

from weightyard.errors import (
    AlreadyThere,
    Conflict,
    FileMissing,
    NotAllowed,
    StoreFull,
    StoreUnavailable,
    Unsupported,
    YardError,
)

_LINE_END = re.compile(r"\n|\\n")
_MAX_LINE_CHARS = 500
_RUNNING = re.compile(r"There are (\d+) datanode\(s\) running and (\d+|no) node\(s\) are excluded")


class BlockTooSmall(Unsupported):
    """A file was to have smaller blocks than the NameNode allows."""


class NotEmpty(Conflict):
    """A folder with something in it cannot be deleted."""


class MustBeEncrypted(Unsupported):
    """The folder is in an encryption zone: who writes there has to encrypt."""


class NotActive(StoreUnavailable):
    """The NameNode is on standby; the other one is to be asked."""


class NotYet(StoreUnavailable):
    """The block before is not on enough DataNodes yet, by what they have told."""


BELOW_A_FILE = "(is not a directory)"
"""What a NameNode says of a path below a file: for most calls as if it were forbidden."""

_BY_JAVA_CLASS: dict[str, type[YardError]] = {
    "FileNotFoundException": FileMissing,
    "ParentNotDirectoryException": FileMissing,
    "PathIsNotEmptyDirectoryException": NotEmpty,
    "FileAlreadyExistsException": AlreadyThere,
    "AlreadyBeingCreatedException": AlreadyThere,
    "AccessControlException": NotAllowed,
    "AuthorizationException": NotAllowed,
    "UnknownCryptoProtocolVersionException": MustBeEncrypted,
    "StandbyException": NotActive,
    "NotReplicatedYetException": NotYet,
    "NSQuotaExceededException": StoreFull,
    "DSQuotaExceededException": StoreFull,
    "QuotaByStorageTypeExceededException": StoreFull,
    "MaxDirectoryItemsExceededException": StoreFull,
    "HadoopIllegalArgumentException": Unsupported,
    "UnsupportedOperationException": Unsupported,
}


def short_name(java_class: str) -> str:
    """Of a class of Java's, without its package and the class it lies in."""
    return java_class.rpartition(".")[2].rpartition("$")[2]


def error(doing: str, java_class: str, message: str) -> YardError:
    """The error for an exception of Java's: its class by its short name, and what it says."""
    kind = _BY_JAVA_CLASS.get(java_class, StoreUnavailable)
    if "replication factor" in message or "less than configured minimum" in message:
        kind = BlockTooSmall if "min-block-size" in message else Unsupported
    if "must both be directories" in message:  # a folder has the name that a file is to get
        kind = AlreadyThere
    if BELOW_A_FILE in message:
        kind = FileMissing
    running = _RUNNING.search(message)
    if running and int(running[1]) > int(running[2].replace("no", "0")):
        kind = StoreFull
    return kind(f"{doing}: {first_line(f'{java_class}: {message}')}")


def first_line(text: str) -> str:
    """Without the stack trace that follows it, and not endless."""
    return _LINE_END.split(text, maxsplit=1)[0][:_MAX_LINE_CHARS]
