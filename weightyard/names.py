"""Names of models, aliases, files, blocks and so on: parsed once, then trusted types.

No function of weightyard takes a raw string that may become part of a path: it takes one of these.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from dataclasses import dataclass
from typing import ClassVar, Self

from weightyard.errors import InvalidName

MAX_PATH_BYTES = 1024
"""Length of a file's path inside a version, as UTF-8."""

MAX_TENSOR_NAME_BYTES = 1024
"""Length of a tensor's name, as UTF-8."""

MAX_STEP = 2**53
"""Steps are whole numbers that JSON and every language keep exactly."""

_NAME_PART = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?", re.ASCII | re.IGNORECASE)
_ALIAS = re.compile(r"[a-z](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)
_VERSION = re.compile(r"v([1-9][0-9]{0,8})", re.ASCII)
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})", re.ASCII)
_HEX = re.compile(r"[0-9a-f]+", re.ASCII)
_VERSION_LIKE = re.compile(r"v[0-9]+|step-[0-9]+", re.ASCII)
_HEX_LIKE = re.compile(r"[0-9a-f]{8,64}", re.ASCII)
_TOKEN_NAME = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,95}", re.ASCII | re.IGNORECASE)
_ESCAPE = re.compile(r"%[0-9a-f]{2}", re.IGNORECASE | re.ASCII)
_UNSHOWABLE = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
"""Unicode categories that change or break the line a name is shown in."""
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Marks and letters that show nothing, though their category does not say so."""
_LIKE_A_SLASH = frozenset("\u2044\u2215\u29f8\u29f9")
_LIKE_ONE_ANOTHER = frozenset(("LATIN", "CYRILLIC", "GREEK", "COPTIC", "ARMENIAN", "CHEROKEE"))
"""Scripts that have letters which look the same."""
_WINDOWS_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class _HexName:
    """A fixed number of lower-case hex digits."""

    hex: str

    bytes_long: ClassVar[int] = 32
    what: ClassVar[str] = "id"

    def __post_init__(self) -> None:
        digits = 2 * self.bytes_long
        if len(self.hex) != digits or not _HEX.fullmatch(self.hex):
            raise InvalidName(f"{self.what} must be {digits} hex digits, not {_shown(self.hex)}")

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """The name whose bytes these are."""
        return cls(raw.hex())

    @property
    def raw(self) -> bytes:
        return bytes.fromhex(self.hex)

    def __str__(self) -> str:
        return self.hex


class BlockId(_HexName):
    """BLAKE3-256 of a block's raw bytes. The only name a block has."""

    __slots__ = ()
    what = "block id"


class Digest(_HexName):
    """BLAKE3-256 of a manifest's JSON. Names a version's content."""

    __slots__ = ()
    what = "digest"


class PackId(_HexName):
    """A random name, given to a pack before a byte of it is written."""

    __slots__ = ()
    bytes_long = 16
    what = "pack id"

    @classmethod
    def new(cls) -> Self:
        return cls.of(secrets.token_bytes(16))


class UploadId(_HexName):
    """A random name for one writer's lease; its staging folder is called after it."""

    __slots__ = ()
    bytes_long = 16
    what = "upload id"

    @classmethod
    def new(cls) -> Self:
        return cls.of(secrets.token_bytes(16))


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """`project/name`: a line of versions."""

    project: str
    name: str

    def __post_init__(self) -> None:
        for part in (self.project, self.name):
            if (
                not _NAME_PART.fullmatch(part)
                or ".." in part
                or "--" in part
                or part.endswith(".git")
            ):
                raise InvalidName(
                    f"model name {_shown(part)}: 1 to 96 ASCII letters, digits, '.', '_', '-'; "
                    "first and last a letter or digit, without '..', '--' or a '.git' end"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        _require_text("model name", text)
        project, slash, name = text.partition("/")
        if not slash:
            raise InvalidName(f"model name {_shown(text)} needs a project: PROJECT/NAME")
        if "@" in name:
            raise InvalidName(f"model name {_shown(text)} is a ref: leave out what follows the @")
        return cls(project, name)

    def __str__(self) -> str:
        return f"{self.project}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class AliasName:
    """A movable name on a version, such as `prod`."""

    text: str

    def __post_init__(self) -> None:
        _require_text("name of an alias", self.text, like="prod")
        if not _ALIAS.fullmatch(self.text):
            raise InvalidName(
                f"alias {_shown(self.text)}: 1 to 64 lower-case ASCII letters, digits, '.', '_', "
                "'-', beginning with a letter and ending with a letter or digit"
            )
        if (
            self.text == "latest"
            or _VERSION_LIKE.fullmatch(self.text)
            or _HEX_LIKE.fullmatch(self.text)
        ):
            raise InvalidName(
                f"alias {_shown(self.text)} would read as a version: 'latest', 'v<digits>', "
                "'step-<digits>' and hex digests are not alias names"
            )

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, order=True)
class TokenName:
    """Whom a token is for: a person, such as `alice@lab`, or a program, such as `nightly-ci`."""

    text: str

    def __post_init__(self) -> None:
        if not _TOKEN_NAME.fullmatch(self.text):
            raise InvalidName(
                f"token name {_shown(self.text)}: 1 to 96 ASCII letters, digits, '.', '_', '@', "
                "'+', '-', beginning with a letter or digit"
            )

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """The step of its run at which a checkpoint was made: `step-1200`."""

    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MAX_STEP:
            raise InvalidName(f"a step is a whole number from 0 to {MAX_STEP}")

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _STEP.fullmatch(text)
        if found is None:
            raise InvalidName(
                f"step {_shown(text)}: 'step-' and a whole number without leading zeros"
            )
        return cls(int(found[1]))

    def __str__(self) -> str:
        return f"step-{self.number}"


@dataclass(frozen=True, slots=True)
class Ref:
    """What users type: `team/bert@prod`, `@v3`, `@<digest>`, `@latest` or nothing (newest).

    A checkpoint of a run also goes by its step: `team/run42@step-1200`.
    """

    model: ModelName
    selector: AliasName | int | Step | Digest | None = None
    """An alias, a version number, a step, a content digest, or None for the newest version."""

    @classmethod
    def parse(cls, text: str) -> Self:
        _require_text("ref", text)
        head, at, selector = text.partition("@")
        model = ModelName.parse(head)
        if not at or selector == "latest":
            return cls(model)
        if version := _VERSION.fullmatch(selector):
            return cls(model, int(version[1]))
        if _STEP.fullmatch(selector):
            return cls(model, Step.parse(selector))
        if _HEX_LIKE.fullmatch(selector):
            if len(selector) != 64:
                raise InvalidName(
                    f"ref {_shown(text)}: a digest has 64 hex digits, this one {len(selector)}; "
                    "`weightyard show` prints all of them"
                )
            return cls(model, Digest(selector))
        return cls(model, AliasName(selector))

    def __str__(self) -> str:
        match self.selector:
            case None:
                return f"{self.model}@latest"
            case int(number):
                return f"{self.model}@v{number}"
            case other:
                return f"{self.model}@{other}"


@dataclass(frozen=True, slots=True, order=True)
class FilePath:
    """A path inside a version. On any system it stays within the folder it is put under."""

    text: str

    def __post_init__(self) -> None:
        text = self.text
        if len(text.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
            raise InvalidName(f"path {_shown(text)} is over {MAX_PATH_BYTES} bytes")
        if not is_plain_text(text) or "\\" in text or ":" in text:
            raise InvalidName(
                f"path {_shown(text)}: NFC text without control characters, backslash or colon"
            )
        for part in text.split("/"):
            if part in ("", ".", "..") or part[-1] in ". " or _WINDOWS_RESERVED.fullmatch(part):
                raise InvalidName(
                    f"path {_shown(text)}: relative, with parts that are not empty, '.', '..', "
                    "a reserved device name, or ending in a dot or space"
                )
            if len(part.encode()) > 255:
                raise InvalidName(f"path {_shown(text)}: a part is over 255 bytes")

    @classmethod
    def of_new(cls, text: str) -> Self:
        """The path of a file that is to be published. One that looks like another is refused.

        Only here, so that what was published before this rule stays readable.
        """
        path = cls(text)
        if why := _looks_like_another(text):
            raise InvalidName(f"path {_shown(text)} could be taken for another one: {why}")
        return path

    @classmethod
    def from_url(cls, text: str) -> Self:
        """The path that a URL names for a new file. Stricter, since proxies read URLs as well.

        Refuses paths that would be others if they were decoded once more, and characters that have
        a meaning in URLs.
        """
        path = cls.of_new(text)
        if _ESCAPE.search(text):
            raise InvalidName(f"path {_shown(text)} could be read as another one")
        if any(mark in text for mark in ";#?"):
            raise InvalidName(f"path {_shown(text)}: without ';', '#' and '?'")
        return path

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.text.split("/"))

    def __str__(self) -> str:
        return self.text


def is_plain_text(text: str) -> bool:
    """Whether text is not empty, NFC, and free of controls, surrogates and invisible marks."""
    return (
        bool(text)
        and unicodedata.is_normalized("NFC", text)
        and not any(unicodedata.category(ch) in _UNSHOWABLE for ch in text)
    )


def _looks_like_another(text: str) -> str | None:
    """Why people could take a text for another one; None if they could not."""
    if text.isascii():
        return None
    for ch in text:
        name = unicodedata.name(ch, f"U+{ord(ch):04X}")
        if not unicodedata.is_normalized("NFKC", ch):
            return f"{name} is another way to write {_shown(unicodedata.normalize('NFKC', ch))}"
        if ch in _UNSEEN or "VARIATION SELECTOR" in name:
            return f"{name} cannot be seen"
        if ch in _LIKE_A_SLASH or (unicodedata.category(ch) == "Zs" and ch != " "):
            return f"{name} looks like a slash or a space"
    if not unicodedata.is_normalized("NFKC", text):
        return "it is another way to write the same"
    return next(filter(None, map(_mixed_scripts, _words(text))), None)


def _words(text: str) -> list[str]:
    """The words of a text: runs of letters, with their combining marks."""
    letters = "".join(ch if unicodedata.category(ch)[0] in "LM" else " " for ch in text)
    return letters.split()


def _mixed_scripts(word: str) -> str | None:
    found = {unicodedata.name(ch, "").partition(" ")[0] for ch in word} & _LIKE_ONE_ANOTHER
    if len(found) < 2:
        return None
    return f"{_shown(word)} mixes {' and '.join(sorted(one.title() for one in found))} letters"


def is_tensor_name(text: str) -> bool:
    """Whether text can name a tensor. Programs choose these names, so much is allowed.

    1 to MAX_TENSOR_NAME_BYTES bytes, any characters but controls, surrogates, invisible marks
    and line ends; not normalised, since it never becomes a path and must come back as it was.
    """
    if text.isascii():
        return 0 < len(text) <= MAX_TENSOR_NAME_BYTES and text.isprintable()
    if any(unicodedata.category(ch) in _UNSHOWABLE for ch in text[:MAX_TENSOR_NAME_BYTES]):
        return False
    return len(text.encode("utf-8", "surrogatepass")) <= MAX_TENSOR_NAME_BYTES


def _require_text(what: str, given: object, like: str = "team/bert") -> None:
    """Raises InvalidName for what is no text: a caller may have mixed up its arguments."""
    if not isinstance(given, str):
        raise InvalidName(f"a {what} is text such as {like!r}, not a {type(given).__name__}")


def _shown(text: str) -> str:
    """Hostile text, made short and printable for a message."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")
