"""Front: what a service says at `/` to whoever comes by, and where to go on from there."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

router = APIRouter(include_in_schema=False)
"""Answered without asking who calls, so it says nothing of this yard, nor which weightyard it is:
`about` and the description do, to whom they know."""

_WHAT = "Versioned model weights on HDFS. This is a service for programs: REST under /api/v1."

# Links go on from where the page was found: a proxy may have put it below a path. Browsers are
# told to load nothing, so there is no style.
_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>weightyard</title>
<h1>weightyard</h1>
<p>{_WHAT}</p>
<ul>
<li><a href="api/v1/openapi.json">api/v1/openapi.json</a>: all of it, with examples</li>
<li><a href="api/v1/about">api/v1/about</a>: which yard this is, and which weightyard</li>
<li><a href="api/v1/ready">api/v1/ready</a>: whether it can serve now</li>
</ul>
<p>Once a token was made, the first two want one: <code>Authorization: Bearer wy_…</code></p>
<p>The command line works through it with <code>WEIGHTYARD_URL</code> set to the address of this
page, and <code>WEIGHTYARD_TOKEN</code> to a token.</p>
</html>
"""

_FOR_PROGRAMS = {
    "service": "weightyard",
    "what": _WHAT,
    "api": "/api/v1",
    "openapi": "/api/v1/openapi.json",
    "about": "/api/v1/about",
    "ready": "/api/v1/ready",
}


@router.get("/")
async def front(request: Request) -> Response:
    """What this is: a page for browsers, JSON for programs."""
    vary = {"Vary": "Accept"}
    if "text/html" in request.headers.get("accept", "").lower():
        return HTMLResponse(_PAGE, headers=vary)
    return JSONResponse(_FOR_PROGRAMS, headers=vary)
