"""The playground: how `/` is served, and that the built page is that of its sources."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer_server.api.routes.page import PAGE
from tests.conftest import ROOT, Server, fake_model
from tests.faults.keys import add_key, serve

SOURCE = ROOT / "server" / "playground"
BUILT = PAGE.read_bytes()
TEXT = BUILT.decode()
MAX_BYTES = 450_000
BESIDE_SOURCE = (
    "build/api-paths.json", "build/types.mjs", "index.html", "package-lock.json", "package.json",
    "tsconfig.json", "vite.config.ts",
)  # fmt: skip
"""What the page is built from beside `src`: as in `vite.config.ts`."""


def read_policy(answer: httpx.Response) -> dict[str, list[str]]:
    rules = answer.headers["content-security-policy"].split("; ")
    return {name: sources for name, *sources in map(str.split, rules)}


def digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


# ------------------------------------------------------------------ as it is served


def test_the_page_is_answered_as_it_was_built(http: httpx.Client) -> None:
    plain = http.get("/", headers={"Accept-Encoding": "identity"})
    assert (plain.status_code, plain.content) == (200, BUILT)
    assert plain.headers["content-type"] == "text/html; charset=utf-8"
    assert "content-encoding" not in plain.headers
    packed = http.get("/", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == BUILT
    assert int(packed.headers["content-length"]) == len(gzip.compress(BUILT, 9, mtime=0))
    assert packed.headers["vary"] == "Accept-Encoding"


def test_only_what_the_page_holds_may_run(http: httpx.Client) -> None:
    answer = http.get("/")
    policy = read_policy(answer)
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", answer.text, re.DOTALL)
    (style,) = re.findall(r"<style[^>]*>(.*?)</style>", answer.text, re.DOTALL)
    assert policy["script-src"] == [digest(script)]
    assert policy["style-src"] == [digest(style)]
    assert policy["connect-src"] == ["'self'"]
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == ["'none'"]
    assert not re.search(r"unsafe|https?:|\*", answer.headers["content-security-policy"])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_names_no_other_site_to_load_from() -> None:
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", TEXT, flags=re.DOTALL)
    loaded = re.findall(r"""(?:src|href|srcset)\s*=\s*["']([^"']+)""", markup)
    assert {link for link in loaded if not link.startswith(("data:", "docs", "#"))} == set()
    style = "".join(re.findall(r"<style[^>]*>(.*?)</style>", TEXT, re.DOTALL))
    assert "@import" not in style
    assert all(url.lstrip("\"'").startswith("data:") for url in re.findall(r"url\(([^)]*)", style))
    assert not re.findall(r"""\bstyle=["']|\bon\w+=["']""", markup)


def test_who_has_the_page_is_told_so(http: httpx.Client) -> None:
    tag = http.get("/").headers["etag"]
    for known in (tag, f'"older", {tag}', f"W/{tag}"):
        again = http.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get("/", headers={"If-None-Match": '"older"'}).status_code == 200
    assert http.get("/").headers["cache-control"] == "no-cache"


def test_the_page_is_this_servers_alone(http: httpx.Client) -> None:
    assert http.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert http.post("/", json={}).status_code == 405
    assert "/" not in http.get("/openapi.json").json()["paths"]


def test_the_page_needs_no_key(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    add_key(key_file, "somebody", "score")
    with serve({"models": [fake_model()], "key_file": str(key_file)}, tmp_path) as server:
        assert httpx.get(server.url + "/").status_code == 200
        assert httpx.get(server.url + "/models").status_code == 401


def test_the_page_is_small() -> None:
    assert len(BUILT) <= MAX_BYTES


# ------------------------------------------------------------------ source and build


def test_the_page_is_that_of_its_sources() -> None:
    """What `vite.config.ts` puts into the page, computed again: no node is needed for that."""
    names = [path.relative_to(SOURCE).as_posix() for path in (SOURCE / "src").rglob("*")]
    files = [name for name in (*BESIDE_SOURCE, *names) if (SOURCE / name).is_file()]
    sources = hashlib.sha256()
    for name in sorted(files):
        content = (SOURCE / name).read_bytes()
        sources.update(f"{name} {len(content)}\n".encode() + content)
    built_from = re.findall(r'<meta name="logsteer-sources" content="(\w+)"', TEXT)
    assert built_from == [sources.hexdigest()], "run `make playground` and commit what it builds"


UNTYPED = {
    "default", "description", "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems",
    "maxLength", "minimum", "minItems", "minLength", "pattern", "title",
}  # fmt: skip
"""What shapes no type, unless it is a property that is called so."""


def is_untyped(key: str, value: Any) -> bool:
    is_object = isinstance(value, dict | list)
    return key in UNTYPED and (not is_object or (key == "default" and "content" not in value))


def prune(document: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The schemas that these paths come to, as far as they shape types: as `build/types.mjs`."""
    schemas: dict[str, Any] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        found = {k: visit(value[k]) for k in sorted(value) if not is_untyped(k, value[k])}
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name and name not in schemas:
            schemas[name] = None
            schemas[name] = visit(document["components"]["schemas"][name])
        return found

    kept = {path: visit(document["paths"][path]) for path in sorted(paths)}
    return {"components": {"schemas": dict(sorted(schemas.items()))}, "paths": kept}


def test_the_pages_types_are_those_of_the_openapi_document() -> None:
    document = json.loads((ROOT / "openapi.json").read_text())
    paths = json.loads((SOURCE / "build" / "api-paths.json").read_text())
    pruned = json.dumps(prune(document, paths), separators=(",", ":"), ensure_ascii=False)
    written = (SOURCE / "src" / "api.d.ts").read_text().partition("\n")[0]
    digest_now = hashlib.sha256(pruned.encode()).hexdigest()
    assert written.endswith(digest_now), "schemas have changed: run `make playground` and commit"


def test_no_file_names_where_packages_came_from() -> None:
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
    assert "registry" not in (SOURCE / ".npmrc").read_text().replace("registry-resolved", "")


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("npm") is None or not (SOURCE / "node_modules").is_dir(),
    reason="SKIPPED BECAUSE THERE IS NO npm, OR `make playground` HAS NOT RUN HERE",
)
def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    types = (SOURCE / "src" / "api.d.ts").read_bytes()
    for command in (["run", "types"], ["run", "check"]):
        subprocess.run(["npm", *command], cwd=SOURCE, check=True, capture_output=True)
    assert (SOURCE / "src" / "api.d.ts").read_bytes() == types
    build = ["npm", "exec", "vite", "build", "--", "--outDir", str(tmp_path), "--emptyOutDir"]
    subprocess.run(build, cwd=SOURCE, check=True, capture_output=True)
    for built in tmp_path.iterdir():
        assert built.read_bytes() == (PAGE.parent / built.name).read_bytes(), built.name


def test_the_reference_needs_no_script_and_no_other_host(fake_server: Server) -> None:
    answer = httpx.get(f"{fake_server.url}/docs", timeout=60)
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<(script|link|img|iframe)|(src|href)=.?(https?:)?//", answer.text)
    document = httpx.get(f"{fake_server.url}/openapi.json", timeout=60).json()
    for name in (*document["paths"], *document["components"]["schemas"]):
        assert f"{name}</code>" in answer.text
