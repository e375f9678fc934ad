"""Errors as answers: problem documents (RFC 9457), and OpenAI's shape under `/v1`."""

import difflib
import logging
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from logsteer.errors import APIError, api_error
from logsteer.schemas.faults import MAX_NAME, describe_faults
from logsteer_server.api.encoding import JSON, encode_json
from logsteer_server.observation.requests import find_record

log = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
CLIENT_CLOSED_REQUEST = 499
MAX_SHOWN_ERRORS = 5
OPENAI_PATHS = "/v1/"
OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "title": "OpenAIError",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""The schema of `describe_openai_error`."""
RETRY_SPREAD = 0.4
MAX_DETAIL = 4000
"""Most characters of a problem's detail: some quote the request, which may have megabytes."""


def add_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error of a route as a problem, and document problems."""
    app.openapi = partial(_describe_api, app.openapi)  # type: ignore[method-assign]
    app.add_exception_handler(APIError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_crash)


def write_problem(error: APIError, request_id: str) -> dict[str, Any]:
    """Return an error's problem document."""
    document: dict[str, Any] = error.problem(request_id).model_dump()
    document["detail"] = error.detail[:MAX_DETAIL]
    return document


def _describe_api(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI document with the media type and schema of errors."""
    document = describe()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation["responses"]["default"]["content"]
            problem = content.pop(JSON, None)
            if path.startswith(OPENAI_PATHS):
                content[JSON] = {"schema": OPENAI_ERROR}
            elif problem is not None:  # it is None where the document was asked for before
                content[PROBLEM] = problem
    return document


def describe_openai_error(error: APIError) -> dict[str, Any]:
    """Write an error in OpenAI's shape."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.detail[:MAX_DETAIL],
            "type": "rate_limit_error" if error.status == 429 else kind,
            "param": error.param,
            "code": error.code,
        }
    }


def answer_problem(request: Request, error: APIError) -> Response:
    """Write an error as the answer to a request that has an id."""
    request_id = request.state.id
    find_record(request.scope).code = error.code
    headers = {
        "X-Request-Id": request_id
    }  # set here too: a crash is answered outside of RequestGate
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(spread(error.retry_after, request_id)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if request.url.path.startswith(OPENAI_PATHS):
        body = encode_json(describe_openai_error(error))
        return Response(body, 400 if error.status == 422 else error.status, headers, JSON)
    body = encode_json(write_problem(error, request_id))
    return Response(body, error.status, headers, PROBLEM)


def spread(seconds: float, request_id: str) -> float:
    """Return a time longer by up to RETRY_SPREAD of it, depending on the request's id.

    Otherwise callers refused at the same time would all retry at the same time.
    """
    return seconds * (1 + RETRY_SPREAD * zlib.crc32(request_id.encode()) / 2**32)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return answer_problem(request, error)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Answer with all reasons why the request does not fit its schema, in one line."""
    assert isinstance(error, RequestValidationError)
    route = request.scope.get("route")
    fields = [
        getattr(route, "body_field", None),
        *getattr(route, "dependant", Dependant()).query_params,
    ]
    kind = next((field.field_info.annotation for field in fields if field), None)
    entries = ({**entry, "loc": entry["loc"][1:]} for entry in error.errors())
    found = list(describe_faults(entries, kind))
    reasons = [fault.text for fault in found[:MAX_SHOWN_ERRORS]]
    if len(found) > MAX_SHOWN_ERRORS:
        reasons.append(f"and {len(found) - MAX_SHOWN_ERRORS} more")
    content_type = request.headers.get("content-type", "")
    if request.method == "POST" and "json" not in content_type and "stream" not in request.url.path:
        reasons = [
            f"The body was sent as {content_type or 'no content type'}; "
            "send JSON with the header Content-Type: application/json."
        ]
    param = found[0].param if found else None
    return answer_problem(request, api_error("invalid_request", " ".join(reasons), param=param))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.__cause__  # FastAPI wraps what reading the body raises
    if isinstance(cause, APIError):
        return answer_problem(request, cause)
    if isinstance(cause, RequestValidationError):
        return await _answer_invalid(request, cause)
    if error.status_code == 405:
        allowed = _find_methods(request)
        detail = f"{request.url.path} does not take {request.method}; send {allowed}."
        answer = answer_problem(request, api_error("method_not_allowed", detail))
        answer.headers["Allow"] = allowed
        return answer
    if error.status_code == 404:
        return answer_problem(request, api_error("not_found", _name_path(request)))
    return answer_problem(
        request, api_error("invalid_request", str(error.detail), status=error.status_code)
    )


def _name_path(request: Request) -> str:
    """Return the detail for an unknown path, with the path probably meant."""
    path = request.url.path
    known = [route.path for route in request.app.routes if isinstance(route, Route)]
    close = difflib.get_close_matches(path[:MAX_NAME], known, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"There is no {path[:MAX_NAME]} here; {meant}/docs lists every path."


def _find_methods(request: Request) -> str:
    """Return the methods that a path supports."""
    matching = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _answer_disconnect(_request: Request, _error: Exception) -> Response:
    """End a request whose caller has disconnected, without a stack trace in the log."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_crash(request: Request, error: Exception) -> Response:
    request_id = request.state.id
    log.error("request %s failed", request_id, exc_info=error)
    detail = f"A fault of the server, not of the request; its log has it under {request_id}."
    return answer_problem(request, api_error("internal", detail))
