"""`weightyard pull`: put a version's files into a folder."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from weightyard.cli.options import Excluded, Included, RefArgument
from weightyard.cli.session import Session, command
from weightyard.errors import NoSuchThing


@command
def pull(
    session: Session,
    ref: RefArgument,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Made if it is not there.")],
    include: Included = None,
    exclude: Excluded = None,
) -> None:
    """Put a version's files into a folder, bit for bit.

    Each file appears when it is whole. What is there already is never overwritten: a file with the
    same content stays, so a pull that was interrupted goes on when it is repeated; any other is
    refused. A pushed state dict comes as model.safetensors.

    Examples:

      weightyard pull team/bert@prod ./bert

      weightyard pull team/bert@v3 . --include '*.json' --include '*.txt'
    """
    from weightyard.cli.refs import resolve
    from weightyard.cli.wording import count, size
    from weightyard.loader.building import plan_snapshot
    from weightyard.transfer.gather import Choice

    began = time.monotonic()
    with session.open() as yard:
        try:
            version, manifest = yard.use(ref)  # as it was typed: this node remembers it so
        except NoSuchThing:
            resolve(yard, ref)  # its error says what is near
            raise
        files = plan_snapshot(manifest, Choice(include, exclude)).files
        total_bytes = sum(file.bytes for file in files)
        with session.progress("Pulling", total_bytes) as advance:
            target = yard.pull(
                version.ref, folder, include=include, exclude=exclude, progress=advance
            )
    seconds = time.monotonic() - began
    result = {
        "ref": version.ref,
        "version": version.number,
        "digest": version.digest,
        "folder": str(target),
        "files": len(files),
        "bytes": total_bytes,
        "seconds": round(seconds, 3),
    }
    session.show(
        result,
        lambda console: console.print(
            f"{version.ref} is in {target}: {count(len(files), 'file')}, {size(total_bytes)}, "
            f"{seconds:.1f} s",
            markup=False,
        ),
    )
