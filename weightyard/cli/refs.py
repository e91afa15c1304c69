"""Refs as users type them: looks them up, and says what is near where they mean nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weightyard.errors import NoSuchThing
from weightyard.names import ModelName, Ref

if TYPE_CHECKING:
    from weightyard.records import Model, Version
    from weightyard.yard import Yard

_PAGE = 1000


def resolve(yard: Yard, ref: str) -> Version:
    """The version a ref means now. Raises NoSuchThing, which names what is near."""
    try:
        return yard.resolve(ref)
    except NoSuchThing as why:
        raise NoSuchThing(f"{why}{_near(yard, Ref.parse(ref))}") from None


def find_model(yard: Yard, name: str) -> Model:
    """A model. Raises NoSuchThing, which names those with a name much like it."""
    model = ModelName.parse(name)
    try:
        return yard.catalogue.model(model)
    except NoSuchThing as why:
        raise NoSuchThing(f"{why}{_near(yard, Ref(model))}") from None


def all_models(yard: Yard, kind: str = "model") -> Iterator[Model]:
    """Every model, or every run, page by page."""
    after: ModelName | None = None
    while page := yard.catalogue.models(kind=kind, after=after, limit=_PAGE):
        yield from page
        after = ModelName.parse(page[-1].name)


def all_versions(yard: Yard, name: ModelName) -> Iterator[Version]:
    """Every version of a model, the newest first, page by page."""
    before: int | None = None
    while page := yard.catalogue.versions(name, before=before, limit=_PAGE):
        yield from page
        before = page[-1].number


def version_json(version: Version) -> dict[str, Any]:
    """A version as `--json` shows it."""
    return {"ref": version.ref, "version": version.number, **version.model_dump(mode="json")}


def _near(yard: Yard, ref: Ref) -> str:
    try:
        found = yard.catalogue.model(ref.model)
    except NoSuchThing:
        names = _names_near(yard, ref.model)
        near = difflib.get_close_matches(str(ref.model), names, n=3, cutoff=0.5)
        if near:
            return f". Did you mean {' or '.join(near)}?"
        return "" if names else ". There are no models yet: `weightyard push FOLDER PROJECT/NAME`"
    if found.latest is None:
        return f". {found.name} has no versions"
    newest = f"v{found.latest}" if found.latest_step is None else f"step-{found.latest_step}"
    selectors = [*sorted(found.aliases), newest]
    return f". {found.name} has @{', @'.join(selectors)} (`weightyard ls {found.name}` lists all)"


def _names_near(yard: Yard, model: ModelName) -> list[str]:
    """Names that may have been meant. Of a large yard only some: the first names, the first in the
    project, and those that begin with the same letter as the name that was given."""
    names: dict[str, None] = {}
    for after in (None, ModelName(model.project, "0"), ModelName(model.project, model.name[0])):
        page = yard.catalogue.models(kind=None, after=after, limit=_PAGE)
        names |= dict.fromkeys(one.name for one in page)
        if after is None and len(page) < _PAGE:
            break
    return [*names]
