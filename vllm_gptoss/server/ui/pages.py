"""/ui: the static files of the web page, with headers that forbid foreign and inline code."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

FOLDER = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(router: APIRouter) -> None:
    """Adds /ui/ with one route per file, and redirects to it from / and /ui. The files need no API key."""
    for path in ("/", "/ui"):
        router.add_api_route(path, _redirect, methods=["GET"], include_in_schema=False)
    for file in sorted(FOLDER.rglob("*.*")):
        path = "/ui/" + file.relative_to(FOLDER).as_posix()
        path = {"/ui/index.html": "/ui/", "/ui/server.html": "/ui/server"}.get(path, path)
        router.add_route(path, partial(_serve, file), methods=["GET", "HEAD"], include_in_schema=False)


async def _redirect(request: Request) -> Response:
    """Relative, because a proxy may serve the server below a prefix."""
    return RedirectResponse("ui/" if request.url.path.endswith("/") else request.url.path.rpartition("/")[2] + "/")


async def _serve(file: Path, request: Request) -> Response:
    return FileResponse(file, media_type=TYPES[file.suffix], headers=HEADERS)
