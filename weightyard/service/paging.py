"""Pages, and the parameters all lists take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Query
from pydantic import AfterValidator

from weightyard.errors import Refused
from weightyard.names import ModelName
from weightyard.transfer.strict_json import why_not_kept
from weightyard.wire import Page

_T = TypeVar("_T")

MAX_PAGE = 1000


def _require_kept(text: str) -> str:
    if why := why_not_kept(text):
        raise ValueError(why)
    return text


Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="How many at most")]
After = Annotated[
    str | None, Query(max_length=200, description="The `next` of the page before, as it is")
]
Project = Annotated[str, Path(examples=["team"])]
Why = Annotated[
    str, Query(max_length=1000, description="For the history"), AfterValidator(_require_kept)
]
Number = Annotated[int, Path(ge=1, le=999_999_999, examples=[3])]


async def model_name(project: Project, name: Annotated[str, Path(examples=["bert"])]) -> ModelName:
    return ModelName(project, name)


Named = Annotated[ModelName, Depends(model_name)]


def page(items: Sequence[_T], limit: int, key: Callable[[_T], object]) -> Page[_T]:
    """A page of items that were asked for with this limit; there may be more if it is full."""
    return Page(items=list(items), next=str(key(items[-1])) if len(items) == limit else None)


def number_after(after: str | None) -> int | None:
    """Where a list goes on that is ordered by number. Raises Refused."""
    if after is None:
        return None
    if not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise Refused("after: use the `next` of the page before as it is")
    return int(after)
