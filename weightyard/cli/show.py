"""`weightyard show`: all that is known of a version."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.format.manifest import Manifest
    from weightyard.records import Cost, Version
    from weightyard.yard import Yard

_FEW = 20


@command
def show(
    session: Session,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="PROJECT/NAME, with @ALIAS, @v3, @step-1200 or @DIGEST."
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors too.")] = False,
) -> None:
    """Show a version: where it comes from, what it holds, what it costs.

    A name without @ means its newest version.

    Examples:

      weightyard show team/bert@prod

      weightyard show team/bert@v3 --tensors

      weightyard show team/run42@step-1200

      weightyard show team/bert@v3 --json
    """
    from weightyard.cli.refs import resolve, version_json

    with session.open() as yard:
        version = resolve(yard, ref)
        manifest = yard.manifest(version.ref)
        cost = yard.cost(version.ref)
        on_hdfs = _is_on_hdfs(yard)
    result = {
        **version_json(version),
        "cost": cost.model_dump(mode="json"),
        "content": {
            "files": _files(manifest),
            **({"tensors": _tensors(manifest)} if tensors else {}),
        },
    }
    session.show(result, lambda console: _show(console, version, cost, manifest, tensors, on_hdfs))


def _is_on_hdfs(yard: Yard) -> bool:
    """Whether the store is on HDFS, where a NameNode keeps each file in its memory."""
    from weightyard.client.catalogue import HttpCatalogue

    catalogue = yard.catalogue
    url = catalogue.about().store if isinstance(catalogue, HttpCatalogue) else yard.store.url
    return not url.startswith("file:")


def _files(manifest: Manifest) -> list[dict[str, Any]]:
    return [{"path": file.path, "bytes": file.bytes, "kind": file.kind} for file in manifest.files]


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "file": None if tensor.file is None else manifest.files[tensor.file].path,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
        }
        for tensor in manifest.tensors
    ]


def _show(
    console: Console,
    version: Version,
    cost: Cost,
    manifest: Manifest,
    tensors: bool,
    on_hdfs: bool,
) -> None:
    from weightyard.cli.tables import facts, table
    from weightyard.cli.wording import count, size, when

    console.print(version.ref, markup=False, style="bold")
    structure = version.structure
    parameters = structure.get("parameters")
    objects = count(cost.namenode_objects, "object")
    facts(
        console,
        [
            ("damaged", "yes: some of its bytes are missing or wrong" if version.damaged else ""),
            ("step", "" if version.step is None else f"{version.step}"),
            ("aliases", ", ".join(version.aliases)),
            ("message", version.message),
            ("created", f"{when(version.created)} by {version.author or 'nobody named'}"),
            ("last used", when(version.last_used)),
            ("parent", version.parent or ""),
            ("metrics", _pairs(version.metrics)),
            ("tags", _pairs(version.tags)),
            ("metadata", _pairs(version.metadata)),
            ("digest", version.digest),
            ("size", size(version.logical_bytes)),
            ("files", count(version.files, "file")),
            (
                "tensors",
                count(version.tensors, "tensor")
                + (f", {parameters:,} parameters" if parameters else "")
                + _dtypes(structure.get("dtypes")),
            ),
            ("replication", str(version.replication or "")),
            ("policy", version.policy or ""),
            ("stored", f"{size(cost.stored_bytes)} in {count(cost.packs, 'pack')}"),
            ("NameNode", f"{objects}, files and blocks" if on_hdfs else ""),
            ("with copies", size(cost.replicated_bytes)),
            ("only here", f"{size(cost.unique_bytes)}, {size(cost.unique_stored_bytes)} stored"),
            ("cold load", size(cost.cold_load_bytes)),
        ],
    )
    if cost.shared_with:
        most = list(cost.shared_with.items())[:_FEW]
        is_all = cost.shared_with_is_complete and len(most) == len(cost.shared_with)
        title = "shared with" if is_all else "shared with, among others"
        table(console, [title, "bytes"], [(ref, size(amount)) for ref, amount in most])
    if manifest.files:  # a state dict has none
        table(
            console,
            ["file", "size", "kind"],
            [(file.path, size(file.bytes), file.kind) for file in manifest.files],
        )
    if tensors:
        table(
            console,
            ["tensor", "dtype", "shape", "file"],
            [
                (one["name"], one["dtype"], "×".join(map(str, one["shape"])), one["file"] or "")
                for one in _tensors(manifest)
            ],
        )


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dtypes(found: Any) -> str:
    if not isinstance(found, dict) or not found:
        return ""
    return f" ({', '.join(f'{amount} {dtype}' for dtype, amount in found.items())})"
