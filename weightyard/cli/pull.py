"""`weightyard pull`: put a version's files into a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weightyard.cli.session import Session, command


@command
def pull(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="PROJECT/NAME, with @ALIAS, @v3 or @DIGEST.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there.")],
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="G", help="Only files that fit, such as '*.safetensors'."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="G", help="No files that fit.")
    ] = None,
) -> None:
    """Put a version's files into a folder, bit for bit.

    Each file appears when it is whole. What is there already is never overwritten.

    Examples:

      weightyard pull team/bert@prod ./bert

      weightyard pull team/bert@v3 ./bert --include '*.safetensors' --include config.json
    """
    from weightyard.cli.refs import resolve
    from weightyard.cli.wording import count, size
    from weightyard.transfer.gather import is_wanted

    began = time.monotonic()
    with session.open() as yard:
        version = resolve(yard, ref)
        files = [
            file
            for file in yard.manifest(version.ref).files
            if is_wanted(file.path, include, exclude)
        ]
        total_bytes = sum(file.bytes for file in files)
        with session.progress("Pulling", total_bytes) as advance:
            yard.pull(version.ref, folder, include=include, exclude=exclude, progress=advance)
    seconds = time.monotonic() - began
    result = {
        "ref": version.ref,
        "version": version.number,
        "digest": version.digest,
        "folder": str(folder),
        "files": len(files),
        "bytes": total_bytes,
        "seconds": round(seconds, 3),
    }
    session.show(
        result,
        lambda console: console.print(
            f"{version.ref} is in {folder}: {count(len(files), 'file')}, {size(total_bytes)}, "
            f"{seconds:.1f} s",
            markup=False,
        ),
    )
