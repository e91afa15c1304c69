"""A NameNode's refusals as our errors: it names a Java class and says why in a line."""

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
    """The folder is in an encryption zone: writers have to encrypt."""


class NotActive(StoreUnavailable):
    """The NameNode is on standby; the other one is to be asked."""


class NotYet(StoreUnavailable):
    """Too few DataNodes have reported the block before as yet."""


class InSafeMode(StoreUnavailable):
    """The NameNode changes nothing: not enough DataNodes have reported yet, or by order."""


BELOW_A_FILE = "(is not a directory)"
"""What a NameNode says of a path below a file; for most calls in the form of a denied access."""

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
    "SafeModeException": InSafeMode,
    "NSQuotaExceededException": StoreFull,
    "DSQuotaExceededException": StoreFull,
    "QuotaByStorageTypeExceededException": StoreFull,
    "MaxDirectoryItemsExceededException": StoreFull,
    "HadoopIllegalArgumentException": Unsupported,
    "UnsupportedOperationException": Unsupported,
}


def short_name(java_class: str) -> str:
    """The name of a Java class without its package and outer class."""
    return java_class.rpartition(".")[2].rpartition("$")[2]


def error(doing: str, java_class: str, message: str) -> YardError:
    """Our error for a Java exception, given the short name of its class and its message."""
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
    """The first line of a text, without the stack trace behind it, and of bounded length."""
    return _LINE_END.split(text, maxsplit=1)[0][:_MAX_LINE_CHARS]
