"""`weightyard path`: a folder on this node with a version's files, for other programs."""

from __future__ import annotations

import time

from weightyard.cli.options import Excluded, Included, RefArgument
from weightyard.cli.session import Session, command
from weightyard.errors import NoSuchThing


@command
def path(
    session: Session,
    ref: RefArgument,
    include: Included = None,
    exclude: Excluded = None,
) -> None:
    """Print the folder with a version's real files on this node; they are fetched if need be.

    The folder is this node's snapshot of the version: do not write into it. It stays until its
    room is needed for others (`weightyard cache`).

    Examples:

      vllm serve "$(weightyard path team/bert@prod)"

      weightyard path team/bert@v3 --exclude '*.bin'
    """
    from weightyard.cli.refs import resolve
    from weightyard.loader.snapshot import Place

    began = time.monotonic()
    with session.open() as yard:
        with session.progress("Fetching", None) as advance:
            try:
                found = yard.snapshot(ref, include=include, exclude=exclude, progress=advance)
            except NoSuchThing:
                resolve(yard, ref)  # if the ref means nothing, its error says what is near
                raise
        place = Place.at(found)
        record = place.read_record() if place is not None else None
    files = record.files if record is not None else ()
    result = {
        "ref": ref,
        "digest": found.name[:64],
        "path": str(found),
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "seconds": round(time.monotonic() - began, 3),
    }
    session.show(result, lambda console: print(found))
