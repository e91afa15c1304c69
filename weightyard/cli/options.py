"""Arguments and options that several commands take, said once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

RefArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="REF", help="PROJECT/NAME, with @ALIAS, @v3 or @DIGEST.")
]
Included: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="G", help="Only files that fit, such as '*.safetensors'."),
]
Excluded: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="G", help="No files that fit, such as 'logs/*'.")
]
