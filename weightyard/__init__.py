"""weightyard: versioned model weights on HDFS, and a fast way from there into tensors.

    import weightyard

    with weightyard.open() as yard:
        yard.push("./model", "team/bert", alias="prod")
        weights = yard.load("team/bert@prod")

What is not used is not imported: neither torch nor a database until something needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from weightyard.loader.load import Weights
    from weightyard.loader.report import OnLoadEvent
    from weightyard.records import Pushed
    from weightyard.yard import Yard

__all__ = ["Yard", "load", "open", "pull", "push"]


def open(
    url: str | Path | None = None,
    *,
    token: str | None = None,
    on_unavailable: Literal["fail", "cached"] | None = None,
    on_event: OnLoadEvent | None = None,
) -> Yard:
    """Open a yard: `http(s)://…` of a service, `hdfs://…`, `viewfs://…`, `file://…` or a folder.

    Without a URL: what WEIGHTYARD_URL or WEIGHTYARD_STORE says, else a folder in your home.
    `on_unavailable="cached"`: if it does not answer, what this node last knew and has is used.
    `on_event`: is told of what happens in loads, from any thread (docs/loading.md).
    """
    from weightyard.opening import open_yard
    from weightyard.settings import Settings

    given = {} if on_unavailable is None else {"on_unavailable": on_unavailable}
    yard = open_yard(url, token=token, settings=Settings(**given))
    yard.on_event = on_event
    return yard


def push(source: str | Path | Mapping[str, Any], name: str, **options: Any) -> Pushed:
    """`Yard.push` on the default yard."""
    with open() as yard:
        return yard.push(source, name, **options)


def pull(ref: str, dir: str | Path, **options: Any) -> Path:
    """`Yard.pull` on the default yard."""
    with open() as yard:
        return yard.pull(ref, dir, **options)


def load(
    ref: str,
    device: Any = "cpu",
    *,
    on_unavailable: Literal["fail", "cached"] | None = None,
    **options: Any,
) -> Weights:
    """`Yard.load` on the default yard."""
    with open(on_unavailable=on_unavailable) as yard:
        return yard.load(ref, device, **options)


def __getattr__(name: str) -> Any:
    if name == "Yard":
        from weightyard.yard import Yard

        return Yard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
