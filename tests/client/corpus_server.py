"""A server of the endpoints that take rows, whose answers follow from the rows alone; and its jobs.

In memory as a transport, or in threads on a port of this machine, for commands that are killed.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest

import logsteer
from logsteer.corpus import FileScores, JobLimits

from .documents import ANSWER, PROVENANCE

BAD = "bad"
"""A text for which an item is refused."""


def value_of(text: str) -> float:
    """A number that looks like a log-probability, with all of its digits."""
    return -(crc32(text.encode()) % 100_003) / 7919


def answer(path: str, body: dict[str, Any], weights: str = "w") -> tuple[int, dict[str, Any]]:
    """The status and the document that the server answers with."""
    rows, count = read(path, body)
    usage = {"prompt_tokens": count, "scored_tokens": count, "generated_tokens": 0}
    results = [
        refuse(path, place) if BAD in json.dumps(row) else RESULTS[path](row, place, body)
        for place, row in enumerate(rows)
    ]
    provenance = PROVENANCE | {"weights_digest": weights}
    return 200, {"results": results, **ANSWER, "provenance": provenance, "usage": usage}


def encode(document: dict[str, Any], **style: Any) -> bytes:
    """A document as a server writes it, or in another style."""
    own = {"ensure_ascii": False, "separators": (",", ":"), **style}
    return json.dumps(document, **own).encode()


def read(path: str, body: dict[str, Any]) -> tuple[list[Any], int]:
    if path == "/generate":
        rows = body.get("prompts") or body.get("prompt_ids") or body["messages"]
    else:
        rows = body["items"] if path == "/logprob" else body.get("texts") or body["messages"]
    return rows, 3 * len(rows)


def refuse(path: str, place: int) -> dict[str, Any]:
    names = {"/generate": f"prompts[{place}]", "/perplexity": f"texts[{place}]"}
    param = names.get(path, f"items[{place}].targets[1]")
    about = {"status": 422, "detail": "too long", "retryable": False}
    return {"problem": {"code": "context_too_long", "param": param, **about}}


def score_text(row: Any, _place: int, _body: dict[str, Any]) -> dict[str, Any]:
    value = value_of(row if isinstance(row, str) else json.dumps(row))
    counts = {"num_tokens": 3, "num_scored": 3, "num_bytes": 9, "num_chars": 9, "num_words": 2}
    return {
        "sum_logprob": value, "sum_squared_logprob": value * value, **counts,
        "perplexity": 2.0, "word_perplexity": 2.0, "byte_perplexity": 2.0, "bits_per_byte": 1.0,
        "stderr": 0.5, "flags": [],
    }  # fmt: skip


def score_item(row: dict[str, Any], _place: int, _body: dict[str, Any]) -> dict[str, Any]:
    context = json.dumps(row.get("context") or row.get("context_ids") or row.get("messages"))
    targets = [
        {"target": str(target), "logprob": value_of(f"{context}{target}"), "num_tokens": 1,
         "num_bytes": 1, "boundary": "exact", "logprobs": [value_of(context)]}
        for target in row.get("targets") or row["target_ids"]
    ]  # fmt: skip
    return {"targets": targets, "best": 0, "choice_probs": [0.1 + 0.2]}


def continue_prompt(row: Any, place: int, body: dict[str, Any]) -> dict[str, Any]:
    n = body.get("n", 1)
    seeds = [body["seed"] + place * n + k for k in range(n)]
    return {
        "completions": [
            {"text": str(row), "token_ids": [1], "tokens": ["a"], "logprobs": [-1.0],
             "logprob": -1.0, "num_tokens": 1, "finish_reason": "length", "seed": seed}
            for seed in seeds
        ],
        "prompt_ids": [1],
    }  # fmt: skip


RESULTS: dict[str, Callable[..., dict[str, Any]]] = {
    "/perplexity": score_text, "/logprob": score_item, "/generate": continue_prompt,
}  # fmt: skip


class CorpusServer:
    """A transport; `asked` are the requests' bodies. `weights` are those of its model.

    `failures` are what the next requests are met with in place of an answer. Requests end in any
    order, within this many seconds. `style` is that of the answers' JSON.
    """

    def __init__(
        self,
        *failures: Exception | httpx.Response,
        weights: str = "w",
        seconds: float = 0.002,
        **style: Any,
    ) -> None:
        self._style = style
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.failures = list(failures)
        self.weights = weights
        self.at_once = self.most_at_once = 0
        self._random = random.Random(0)
        self._seconds = seconds

    def __call__(self, _url: str = "") -> httpx.AsyncBaseTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self._seconds * self._random.random())
            if self.failures:
                failure = self.failures.pop(0)
                if isinstance(failure, Exception):
                    raise failure
                return failure
            body = json.loads(request.content)
            self.asked.append(body)
            self.headers.append(request.headers)
            status, document = answer(request.url.path, body, self.weights)
            kind = "application/json" if status == 200 else "application/problem+json"
            content = encode(document, **self._style)
            return httpx.Response(status, content=content, headers={"Content-Type": kind})
        finally:
            self.at_once -= 1


@contextmanager
def serve_corpus(delay_s: float = 0.0) -> Iterator[str]:
    """Answer on a port of this machine, each request after a while; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(delay_s)
            status, document = answer(self.path, body)
            kind = "application/json" if status == 200 else "application/problem+json"
            data = encode(document)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: Any) -> None:
            """Say nothing of callers that are killed."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ------------------------------------------------------------------ jobs, whole and interrupted


SMALL = JobLimits(batch_size=4, commit_s=0.0)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "text": f"text {n}"} for n in range(count)]


def score(
    source: Path, target: Path, server: CorpusServer, endpoint: str = "perplexity", **options: Any
) -> FileScores:
    own: dict[str, Any] = {"limits": SMALL, "transport": server, **options}
    return logsteer.score_file(source, target, endpoint, **own)


class PowerCutError(BaseException):
    """The process is gone."""


def interrupt(corpus: Path, target: Path, after: int) -> None:
    """Leave the files of a job as they are when it ends behind so many chunks."""
    from logsteer.corpus.job import FileJob

    count = 0
    write, commit = FileJob.write, FileJob.commit

    def stop(self: FileJob, scored: Any) -> None:
        nonlocal count
        write(self, scored)
        commit(self)
        count += 1
        if count == after:
            raise PowerCutError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCutError):
        patch.setattr(FileJob, "write", stop)
        score(corpus, target, CorpusServer(), id_column="id")
