"""Catalogued: the part of a yard that needs only its catalogue, and moves no bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from weightyard.errors import BadSetting, Changed
from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import AliasMove, Model, Retention, Version
from weightyard.transfer.catalogue import ANYTHING, Catalogue
from weightyard.transfer.publish import checked_publication
from weightyard.transfer.strict_json import checked_reason

_T = TypeVar("_T")

_PAGE = 1000
"""How many things one request asks for where all are wanted."""


_ANNOTATED_AGAIN = 10
"""How often to try if others annotate the same version at the same time."""


class Catalogued(ABC):
    """Models, versions, aliases and rules. A part of `Yard`."""

    catalogue: Catalogue

    @abstractmethod
    def settle(self) -> None:
        """Have the records of what was just done written into the store."""

    def resolve(self, ref: str) -> Version:
        """The version a ref means now. Raises NoSuchThing, InvalidName, Retryable."""
        return self.catalogue.resolve(Ref.parse(ref))

    def models(self) -> list[Model]:
        """All models, by name, without runs. Raises Retryable."""
        return _all(
            lambda last: self.catalogue.models(
                after=None if last is None else ModelName.parse(last.name), limit=_PAGE
            )
        )

    def versions(self, name: str) -> list[Version]:
        """All versions of a model or run, the newest first. Raises NoSuchThing."""
        model = ModelName.parse(name)
        return _all(
            lambda last: self.catalogue.versions(
                model, before=None if last is None else last.number, limit=_PAGE
            )
        )

    def annotate(
        self,
        ref: str,
        *,
        message: str | None = None,
        metrics: Mapping[str, float | None] | None = None,
        tags: Mapping[str, str | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Version:
        """Change what is said of a version; its content never changes.

        Keys that are given are set, or removed if their value is None. Other keys stay, also those
        that somebody else sets at the same time. Raises NoSuchThing, Refused, Changed.
        """
        given = {"metrics": metrics, "tags": tags, "metadata": metadata}
        version = self.resolve(ref)
        expect: str | None = version.etag
        for _ in range(_ANNOTATED_AGAIN):
            try:
                return self._annotate(version, message, given, expect)
            except Changed:
                before, version = version, self.resolve(version.ref)
                # If it looks the same as before, a newer service's ETag covers fields that are not
                # known here, so no ETag made here would fit: then without one.
                expect = None if version.etag == before.etag else version.etag
        return self._annotate(version, message, given, expect)

    def _annotate(
        self,
        version: Version,
        message: str | None,
        given: Mapping[str, Mapping[str, Any] | None],
        expect: str | None,
    ) -> Version:
        changes: dict[str, Any] = {} if message is None else {"message": message}
        for name, values in given.items():
            if values is not None:
                merged = {**getattr(version, name), **values}
                changes[name] = {key: value for key, value in merged.items() if value is not None}
        checked_publication(changes)
        annotated = self.catalogue.annotate(Ref.parse(version.ref), changes, expect=expect)
        self.settle()
        return annotated

    def delete(self, ref: str, *, reason: str = "") -> Version:
        """Take a version out of sight; gc frees what no other needs. `reason` is for the audit log.

        Raises NoSuchThing, Protected if an alias is on it or it is needed otherwise.
        """
        removed = self.catalogue.remove(Ref.parse(ref), reason=checked_reason(reason))
        self.settle()
        return removed

    def delete_model(self, name: str) -> None:
        """Remove a model that has no versions any more. Raises NoSuchThing, Protected."""
        self.catalogue.remove_model(ModelName.parse(name))
        self.settle()

    def set_alias(
        self,
        name: str,
        alias: str,
        to: int | str | None,
        *,
        reason: str = "",
        expect: int | None = None,
    ) -> AliasMove:
        """Put an alias on a version (its number, or a selector such as `v3`); None removes it.

            yard.set_alias("team/bert", "prod", 4, reason="better on the eval set", expect=3)

        `expect=3`: only if it is on version 3 now; `expect=0`: only if there is no such alias yet;
        None: wherever it is. `reason` is kept in the alias's log. Raises NoSuchThing, AliasMoved.
        """
        model = ModelName.parse(name)
        if not isinstance(expect, int | None):
            raise BadSetting(f"expect={expect!r}: the number of a version, or 0 for no version")
        number = self.resolve(f"{model}@{to}").number if isinstance(to, str) else to
        expected = ANYTHING if expect is None else expect or None  # 0, no version's number: None
        moved = self.catalogue.move_alias(
            model, AliasName(alias), number, reason=checked_reason(reason), expect=expected
        )
        self.settle()
        return moved

    def alias_log(self, name: str, alias: str, *, as_of: datetime | None = None) -> list[AliasMove]:
        """All moves of an alias, newest first; with `as_of`, those up to that time.

        Empty if there never was such an alias. Raises NoSuchThing if there is no such model.
        """
        model, moved = ModelName.parse(name), AliasName(alias)
        return _all(
            lambda last: self.catalogue.alias_log(
                model,
                moved,
                as_of=as_of,
                before=None if last is None else last.number,
                limit=_PAGE,
            )
        )

    def rollback_alias(self, name: str, alias: str, *, reason: str = "") -> AliasMove:
        """Put an alias back on the version it was on before. Repeated, it goes one further back.

        `reason` is kept in the alias's log. Raises NoSuchThing if it was on none before.
        """
        moved = self.catalogue.rollback_alias(
            ModelName.parse(name), AliasName(alias), reason=checked_reason(reason)
        )
        self.settle()
        return moved

    def set_retention(self, name: str, retention: Retention | None) -> None:
        """Say which versions of a model gc may remove by itself; None: none. Raises NoSuchThing.

        yard.set_retention("team/bert", weightyard.records.Retention(keep_last=10))
        """
        self.catalogue.set_retention(ModelName.parse(name), retention)
        self.settle()


def _all(page: Callable[[_T | None], list[_T]]) -> list[_T]:
    """All that a catalogue lists. `page` returns the next page, after the item it is given."""
    found = more = page(None)
    while len(more) == _PAGE:
        more = page(more[-1])
        found = [*found, *more]
    return found
