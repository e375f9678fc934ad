"""Directions that are uploaded."""

from pathlib import Path

from logsteer.errors import APIError, api_error
from logsteer_server.stores.formats.tensor_file import TensorContent, TensorFileError, read_content


def invalid_direction(detail: str) -> APIError:
    """The error for a direction that cannot be used."""
    return api_error("invalid_vector", f"The direction is invalid: {detail}.")


def read_direction(path: Path) -> TensorContent:
    """What a direction's file holds. Errors: APIError `invalid_vector`."""
    try:
        return read_content(path)
    except TensorFileError as error:
        raise invalid_direction(str(error)) from error
