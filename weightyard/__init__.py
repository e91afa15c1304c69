"""weightyard: versioned model weights on HDFS, and a fast way from there into tensors.

    import weightyard

    with weightyard.open() as yard:
        yard.push("./model", "team/bert", alias="prod")
        weights = yard.load("team/bert@prod")

Nothing is imported before it is needed: neither torch nor anything for databases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Concatenate, ParamSpec, TypeVar

    from weightyard.loader.report import OnLoadEvent
    from weightyard.yard import Yard

    _P = ParamSpec("_P")
    _T = TypeVar("_T")

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
    `token`: for a service; by default WEIGHTYARD_TOKEN.
    `on_unavailable="cached"`: if the yard does not answer, use what this node last knew and has.
    `on_event`: is told of what happens in loads, from any thread (docs/loading.md).

    Raises BadSetting and other Refused if this cannot be opened as a yard, Retryable if it does not
    answer. All errors are in `weightyard.errors`, below YardError.
    """
    from weightyard.opening import open_yard
    from weightyard.settings import Settings
    from weightyard.transfer.options import require_function

    require_function("on_event", on_event)
    given = {} if on_unavailable is None else {"on_unavailable": on_unavailable}
    yard = open_yard(url, token=token, settings=Settings(**given))
    yard.on_event = on_event
    return yard


if TYPE_CHECKING:
    # These tell editors and type checkers every option. They never run, so nothing is imported.
    def _on_default(method: Callable[Concatenate[Yard, _P], _T]) -> Callable[_P, _T]: ...

    push = _on_default(Yard.push)
    pull = _on_default(Yard.pull)
    load = _on_default(Yard.load)
else:

    def push(source, name, **options):
        """`Yard.push` on the default yard."""
        with open() as yard:
            return yard.push(source, name, **options)

    def pull(ref, dir, **options):
        """`Yard.pull` on the default yard."""
        with open() as yard:
            return yard.pull(ref, dir, **options)

    def load(ref, device="cpu", *, on_unavailable=None, **options):
        """`Yard.load` on the default yard."""
        with open(on_unavailable=on_unavailable) as yard:
            return yard.load(ref, device, **options)


def __getattr__(name: str) -> Any:
    if name == "Yard":
        from weightyard.yard import Yard

        return Yard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
