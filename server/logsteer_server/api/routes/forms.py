"""Uploads that are a form of files (multipart/form-data)."""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from logsteer.errors import api_error
from logsteer_server.api.routes.resources import UploadLimit, read_upload
from logsteer_server.stores.upload import Upload, report_faults

MAX_SIDE_BYTES = 2**22
"""Of a file that is no weights."""
WEIGHTS = "weights"


def describe_form(description: str, required: Mapping[str, str], *further: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request whose body is a form of files."""
    files = {part: {"type": "string", "format": "binary"} for part in (*required, *further)}
    schema = {"type": "object", "required": list(required), "properties": files}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


@asynccontextmanager
async def open_form(
    request: Request,
    limit: UploadLimit,
    upload: Upload,
    required: Mapping[str, str],
    *further: str,
) -> AsyncIterator[dict[str, UploadFile]]:
    """Give the files in the body by part, and close them afterwards.

    `required` is part -> what the file is called. The body is read up to `limit`, and `upload`
    reserves its bytes. Errors: APIError for a form without a required file or with a file beside
    the weights that is too large.
    """
    form = await _read_form(request, limit, upload, len(required) + len(further))
    try:
        files = {
            part: file
            for part in (*required, *further)
            if isinstance(file := form.get(part), UploadFile)
        }
        if not required.keys() <= files.keys():
            told = ", ".join(f"{file} as {part}" for part, file in required.items())
            raise api_error("invalid_request", f"Send the files {told}.")
        for part, file in files.items():
            if part != WEIGHTS and (file.size is None or file.size > MAX_SIDE_BYTES):
                named = required.get(part, part)
                detail = f"{part} is larger than {MAX_SIDE_BYTES} bytes; send {named}."
                raise api_error("payload_too_large", detail)
        yield files
    finally:
        await form.close()


async def _read_form(
    request: Request, limit: UploadLimit, upload: Upload, max_files: int
) -> FormData:
    """Return the form in the body. Errors: APIError, for one that is too large or no form."""
    try:
        with report_faults(Path(tempfile.gettempdir())):
            form = _LimitedForm(request, limit, upload)
            return await form.form(max_files=max_files, max_fields=0)
    except HTTPException as error:
        detail = f"The body is not a form of {max_files} files: {error.detail}."
        raise api_error("invalid_request", detail) from error


class _LimitedForm(Request):
    """A request whose form is read up to a limit of bytes, which the upload reserves as it grows.

    Starlette keeps the form's files in the system's directory for temporary files until then.
    """

    def __init__(self, request: Request, limit: UploadLimit, upload: Upload) -> None:
        super().__init__(request.scope)
        self._request = request
        self._limit = limit
        self._upload = upload

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        """Give the body, piece by piece. Errors: APIError, where there is no room for it."""
        size, limit = 0, self._limit
        async for chunk in read_upload(self._request, limit):
            size += len(chunk)
            self._upload.reserve(size)
            yield chunk
