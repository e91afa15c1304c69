"""`weightyard cache`: the snapshots on this node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightyard.cli.session import Session, command
from weightyard.errors import Damaged, InvalidName, NoSuchThing, Refused

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.loader.snapshots import Listed, Snapshots

app = typer.Typer(
    help="The snapshots on this node: what `path` made, and `load` maps.", no_args_is_help=True
)

_SHORTEST_DIGEST = 8


@app.command()
@command
def ls(session: Session) -> None:
    """List the snapshots on this node, the last used first.

    Example: weightyard cache ls
    """
    snapshots = _snapshots(session)
    listed = snapshots.listed()
    used_bytes = snapshots.used_bytes()
    limit_bytes = snapshots.limit_bytes(used_bytes) if snapshots.root.is_dir() else None
    result = {
        "folder": str(snapshots.root),
        "used_bytes": used_bytes,
        "limit_bytes": limit_bytes,
        "snapshots": [_json(one) for one in listed],
    }
    session.show(result, lambda console: _show(console, listed, used_bytes, limit_bytes))


@app.command()
@command
def rm(
    session: Session,
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="REF", help="Refs as `cache ls` shows them, or digests."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Remove snapshots.

    A program that uses one goes on undisturbed. What is needed later is fetched again.

    Examples:

      weightyard cache rm team/bert@v2

      weightyard cache rm --all
    """
    from weightyard.cli.wording import count, size

    if bool(refs) == everything:
        raise Refused("say which snapshots: REF…, or --all")
    snapshots = _snapshots(session)
    chosen = snapshots.listed() if everything else _chosen(session, snapshots, refs or [])
    before = snapshots.used_bytes()
    for one in chosen:
        snapshots.remove(one.place)
    freed_bytes = before - snapshots.used_bytes()
    result = {"removed": [_json(one) for one in chosen], "freed_bytes": freed_bytes}
    session.show(
        result,
        lambda console: console.print(
            f"{count(len(chosen), 'snapshot')} removed, {size(freed_bytes)} freed", markup=False
        ),
    )


@app.command()
@command
def prune(
    session: Session,
    max_size: Annotated[
        str | None,
        typer.Option("--max", metavar="SIZE", help="Keep so much, such as 200G."),
    ] = None,
    unused: Annotated[
        str | None, typer.Option(metavar="T", help="Remove what was not used for so long: 30d.")
    ] = None,
) -> None:
    """Remove the least recently used snapshots over a bound, and what killed processes left.

    The bound is --max, else WEIGHTYARD_CACHE_MAX, else half of what would be free. Snapshots in
    use stay.

    Examples:

      weightyard cache prune --max 200G

      weightyard cache prune --unused 30d
    """
    from weightyard.cli.wording import count, parse_span, size
    from weightyard.settings import parse_size

    try:
        max_bytes = parse_size(max_size) if max_size is not None else None
        unused_s = parse_span(unused) if unused is not None else None
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None
    snapshots = _snapshots(session)
    before = snapshots.used_bytes()
    removed = snapshots.prune(max_bytes=max_bytes, unused_s=unused_s)
    used_bytes = snapshots.used_bytes()
    result = {
        "removed": [_json(one) for one in removed],
        "freed_bytes": before - used_bytes,
        "used_bytes": used_bytes,
    }
    session.show(
        result,
        lambda console: console.print(
            f"{count(len(removed), 'snapshot')} removed, {size(before - used_bytes)} freed, "
            f"{size(used_bytes)} kept",
            markup=False,
        ),
    )


@app.command()
@command
def verify(
    session: Session,
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="REF", help="Which; all by default.")
    ] = None,
) -> None:
    """Read snapshots and compare every byte with what was fetched. Damaged ones are set aside.

    Exit code 5 if there are any; they are fetched again when needed. Without a REF, the next load
    from a yard in a local folder checks its packs again, too.

    Examples:

      weightyard cache verify

      weightyard cache verify team/bert@prod
    """
    from weightyard.cli.wording import count, size
    from weightyard.loader.verified import forget_all

    snapshots = _snapshots(session)
    chosen = _chosen(session, snapshots, refs) if refs else snapshots.listed()
    if not refs:
        forget_all(session.settings().cache)
    damaged: list[dict[str, Any]] = []
    verified = 0
    with session.progress("Verifying", sum(one.record.bytes for one in chosen)) as advance:
        for one in chosen:
            opened = snapshots.open(one.place, is_use=False)
            if opened is None:
                damaged.append({**_json(one), "damaged_files": []})
                continue
            with opened:
                files = opened.verify()
            advance(one.record.bytes)
            verified += 1
            if files:
                damaged.append({**_json(one), "damaged_files": files})

    def show(console: Console) -> None:
        for one in damaged:
            named = ", ".join(one["damaged_files"][:5]) or "its files are not as they were"
            console.print(f"damaged, set aside: {one['ref']}: {named}", style="red", markup=False)
        amount = size(sum(one.record.bytes for one in chosen))
        console.print(
            f"{count(verified, 'snapshot')} with {amount} verified: "
            + (f"{len(damaged)} damaged." if damaged else "all is well."),
            markup=False,
        )

    session.show({"ok": not damaged, "verified": verified, "damaged": damaged}, show)
    if damaged:
        raise typer.Exit(Damaged.exit_code)


def _snapshots(session: Session) -> Snapshots:
    from weightyard.loader.snapshots import Snapshots

    settings = session.settings()
    return Snapshots(settings.cache, settings.cache_max)


def _chosen(session: Session, snapshots: Snapshots, refs: Sequence[str]) -> list[Listed]:
    """The snapshots that refs mean, by what this node knows alone. Raises NoSuchThing."""
    listed = snapshots.listed()
    found: dict[str, Listed] = {}
    for ref in refs:
        digest = _remembered_digest(session, ref)
        meant = [
            one
            for one in listed
            if ref == one.record.ref
            or digest == one.place.digest.hex
            or (len(ref) >= _SHORTEST_DIGEST and one.place.name.startswith(ref))
        ]
        if not meant:
            raise NoSuchThing(f"no snapshot of {ref} on this node; `weightyard cache ls` lists all")
        found |= {one.place.name: one for one in meant}
    return list(found.values())


def _remembered_digest(session: Session, ref: str) -> str | None:
    from weightyard.loader.remembered import Remembered
    from weightyard.names import Ref

    remembered = Remembered(session.settings().cache, session.yard_name())
    try:
        known = remembered.recall(Ref.parse(ref))
    except InvalidName:  # a digest alone
        return None
    return known.digest if known is not None else None


def _json(one: Listed) -> dict[str, Any]:
    return {
        "ref": one.record.ref,
        "digest": one.place.digest.hex,
        "path": str(one.place.folder),
        "whole": one.record.is_whole,
        "files": len(one.record.files),
        "bytes": one.record.bytes,
        "used": one.used.isoformat(),
        "verified": one.checked.isoformat(),
        "in_use": one.is_used,
    }


def _show(
    console: Console, listed: Sequence[Listed], used_bytes: int, limit_bytes: int | None
) -> None:
    from weightyard.cli.tables import table
    from weightyard.cli.wording import ago, count, size

    if not listed:
        console.print(
            "No snapshots on this node yet: `weightyard path REF` makes one", markup=False
        )
        return
    table(
        console,
        ["version", "size", "files", "last used", "verified", "", "digest"],
        [
            (
                one.record.ref,
                size(one.record.bytes),
                str(len(one.record.files)) + ("" if one.record.is_whole else " of some"),
                ago(one.used),
                ago(one.checked),
                "in use" if one.is_used else "",
                one.place.digest.hex[:12],
            )
            for one in listed
        ],
    )
    limit = f" of {size(limit_bytes)}" if limit_bytes is not None else ""
    console.print(
        f"{count(len(listed), 'snapshot')}, {size(used_bytes)}{limit} on disk", markup=False
    )
