"""`GET /`, the playground, and `GET /docs`: pages that hold all that they need, and need no key."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).parents[2] / "playground" / "index.html"
"""What `make playground` builds from `server/playground`."""

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is sent: as it is and packed, and the headers that say what it may do."""

    content: bytes
    packed: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Page":
        """Read a page; what it may run are the scripts and styles that it holds, and no others."""
        content = path.read_bytes()
        policy = {
            "default-src": "'none'",
            "script-src": _list_digests(content, "script"),
            "style-src": _list_digests(content, "style"),
            "connect-src": "'self'",
            "font-src": "data:",
            "img-src": "'self' data: blob:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        headers = {
            "Content-Security-Policy": "; ".join(
                f"{name} {value}" for name, value in policy.items()
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        return cls(content, gzip.compress(content, 9, mtime=0), headers)


def _list_digests(page: bytes, tag: str) -> str:
    """Return the sources that a policy allows: the digest of each element of this name."""
    held = re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>".encode(), page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in held]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


@lru_cache(maxsize=1)
def _read_page(path: Path, _written_ns: int) -> Page:
    return Page.read(path)


@router.get("/", include_in_schema=False)
def show_page(request: Request) -> Response:
    """The playground; 304 for who has it already."""
    page = _read_page(PAGE, PAGE.stat().st_mtime_ns)  # one that was built since needs no restart
    if page.headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=page.headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers = {**page.headers, "Content-Encoding": "gzip"}
        return Response(page.packed, headers=headers, media_type="text/html; charset=utf-8")
    return Response(page.content, headers=page.headers, media_type="text/html; charset=utf-8")


REFERENCE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs", include_in_schema=False)
async def show_reference(request: Request) -> Response:
    """Every endpoint and schema, as `/openapi.json` has them: a page without script or style."""
    document = request.app.openapi()
    parts = [f"<!doctype html><title>{document['info']['title']}</title><h1>Endpoints</h1>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            about = operation.get("description") or operation.get("summary", "")
            parts.append(_fold(f"{method.upper()} {path}", about, operation))
    parts.append("<h1>Schemas</h1>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(_fold(name, schema.get("description", ""), schema))
    parts.append('<p>As a document: <a href="openapi.json">openapi.json</a></p>')
    return HTMLResponse("\n".join(parts), headers=REFERENCE_HEADERS)


def _fold(name: str, about: str, document: Any) -> str:
    """Return an entry that opens to a document."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    summary = f"<summary><code>{escape(name)}</code> {escape(about)}</summary>"
    return f'<details id="{escape(name)}">{summary}<pre>{escape(text)}</pre></details>'
