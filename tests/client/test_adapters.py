"""`client.adapters`, `logsteer adapters` and `--adapter`: what is sent, and what comes back."""

from collections.abc import AsyncIterator, Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer import InvalidRequestError, OverloadedError, TransportError

from .scripted import Caller, Output, Script, answer, problem, run

CARD: dict[str, Any] = {
    "name": "lora",
    "sha256": "ab" * 32,
    "model": "demo",
    "weights_digest": "w",
    "rank": 8,
    "alpha": 16.0,
    "modules": ["[red]q_proj", "v_proj"],
    "tensors": 4,
    "updated": None,
    "norm": 1.5,
    "bytes": 400,
    "created": "2026-01-02T03:04:05.678Z",
}
CONFIG = b'{"r": 8}\n'
WEIGHTS = bytes(range(256)) * 4000
BUSY = problem("overloaded", 429, retryable=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What PEFT writes, as far as the client looks at it."""
    (tmp_path / "adapter_config.json").write_bytes(CONFIG)
    (tmp_path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "README.md").write_text("not sent")
    return tmp_path


def parts_of(request: httpx.Request, body: bytes) -> dict[str, tuple[str | None, bytes]]:
    """The parts of a form: name -> the file's name, its bytes."""
    head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
    form = message_from_bytes(head + body)
    assert form.get_content_type() == "multipart/form-data"
    parts: Any = form.get_payload()
    return {
        part.get_param("name", header="Content-Disposition"): (
            part.get_filename(),
            part.get_payload(decode=True),
        )
        for part in parts
    }


WHOLE = {
    "config": ("adapter_config.json", CONFIG),
    "weights": ("adapter_model.safetensors", WEIGHTS),
}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_directory_is_put_as_a_form(
    call: Caller, directory: Path, kind: Callable[[Path], Any]
) -> None:
    server = answer(CARD)
    card = call(server, lambda client: client.adapters.put("lora", kind(directory)))
    assert card.sha256 == "ab" * 32
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PUT", "/adapters/lora")
    assert not request.url.params
    assert parts_of(request, server.bodies[0]) == WHOLE


def test_the_model_is_the_clients_own_or_the_given(call: Caller, directory: Path) -> None:
    server = answer(CARD)
    call(server, lambda client: client.adapters.put("lora", directory), model="mine")
    call(server, lambda client: client.adapters.put("lora", directory, "other"), model="mine")
    assert [dict(r.url.params) for r in server.requests] == [{"model": "mine"}, {"model": "other"}]


class Breaking(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Breaks the first connection in the middle of the body; takes the chunks of the second.

    `tell` says how far the file was read when it broke.
    """

    def __init__(self, tell: Callable[[], int]) -> None:
        self.tell = tell
        self.position = 0
        self.chunks: list[bytes] = []
        self.request: httpx.Request | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        stream: Iterator[bytes] = iter(request.stream)  # type: ignore[arg-type]
        if self.request is None:
            self.request = request
            while len(next(stream)) < 10_000:
                pass
            self.position = self.tell()
            raise httpx.WriteError("reset")
        self.request, self.chunks = request, list(stream)
        return httpx.Response(200, json=CARD)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        stream: AsyncIterator[bytes] = aiter(request.stream)  # type: ignore[arg-type]
        if self.request is None:
            self.request = request
            while len(await anext(stream)) < 10_000:
                pass
            self.position = self.tell()
            raise httpx.WriteError("reset")
        self.request, self.chunks = request, [chunk async for chunk in stream]
        return httpx.Response(200, json=CARD)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every file that is opened by its path."""
    files: list[Any] = []
    plain = Path.open

    def record(path: Path, *arguments: Any, **more: Any) -> Any:
        files.append(plain(path, *arguments, **more))
        return files[-1]

    monkeypatch.setattr(Path, "open", record)
    return files


def test_an_interrupted_upload_is_sent_again_from_the_start(
    call: Caller, pauses: list[float], directory: Path, opened: list[Any]
) -> None:
    transport = Breaking(lambda: opened[-1].tell())
    call(transport, lambda client: client.adapters.put("lora", directory))
    assert transport.request is not None and len(pauses) == 1
    assert parts_of(transport.request, b"".join(transport.chunks)) == WHOLE
    # Files are read while they are sent, a piece at a time.
    assert transport.position == 64 * 1024
    assert max(map(len, transport.chunks)) == 64 * 1024


def test_files_are_closed_after_errors(call: Caller, directory: Path, opened: list[Any]) -> None:
    broken = Breaking(lambda: 0)
    with pytest.raises(TransportError, match="reset") as caught:
        call(broken, lambda client: client.adapters.put("lora", directory), max_retries=0)
    # The error holds the request, and with it what was being sent.
    assert isinstance(caught.value.__cause__, httpx.WriteError)
    assert len(opened) == 2 and all(file.closed for file in opened)
    opened.clear()
    with pytest.raises(OverloadedError):
        call(Script(BUSY), lambda client: client.adapters.put("lora", directory), max_retries=0)
    assert len(opened) == 2 and all(file.closed for file in opened)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["adapter_config.json"], r"has no adapter_config\.json: "),
        (["adapter_model.safetensors"], r"has no adapter_model\.safetensors: "),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            r"has no adapter_config\.json and no adapter_model\.safetensors: ",
        ),
    ],
)
def test_a_missing_file_is_told_before_anything_is_sent(
    call: Caller, directory: Path, missing: list[str], named: str
) -> None:
    for name in missing:
        (directory / name).unlink()
    server = answer(CARD)
    with pytest.raises(InvalidRequestError, match=named) as caught:
        call(server, lambda client: client.adapters.put("lora", directory))
    assert str(directory) in caught.value.detail
    assert "PEFT's save_pretrained" in caught.value.detail
    assert (caught.value.param, caught.value.request_id) == ("directory", None)
    assert server.requests == []


def test_the_commands_about_adapters(capsys: Output, directory: Path) -> None:
    server = answer(CARD)
    assert run(server, "adapters", "put", "lora", str(directory), "--model", "demo") == 0
    assert "ab" * 6 in capsys.readouterr().out
    assert server.requests[0].url.path == "/adapters/lora"
    assert dict(server.requests[0].url.params) == {"model": "demo"}
    assert parts_of(server.requests[0], server.bodies[0]) == WHOLE
