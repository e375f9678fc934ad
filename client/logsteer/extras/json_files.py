"""Text and JSON of files, or of standard input, with errors that say where they are wrong."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from logsteer.errors import LogsteerError


def read_json_lines(lines: Iterable[bytes], name: str, form: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each line that is not blank.

    Where a line may be a text, a JSON string is that text, and the caller says which field of an
    object stands for it. `name` is said in errors, and `form`: what to write in a line. Raises
    LogsteerError for a line that is not JSON.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
        except RecursionError:
            reason = "nested too deeply"
        except ValueError as error:  # no UTF-8, or an integer of too many digits
            reason = str(error)
        else:
            yield number, value
            continue
        raise LogsteerError(f"{name}, line {number}: no JSON: {reason}; write {form}")


def load_steering(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a steering object from itself, from its JSON, or from a file of that.

    Raises LogsteerError where there is no JSON object, OSError where there is no file. The fields
    are checked by the request that they go into.
    """
    if isinstance(source, Mapping):
        return dict(source)
    place, text = "steering", str(source)
    if not text.lstrip().startswith("{"):
        place, text = text, read_text(Path(text))
    try:
        found = json.loads(text)
    except ValueError as error:
        raise LogsteerError(f"{place}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise LogsteerError(f'{place}: no steering object such as {{"vectors": [{{"name": …}}]}}')
    return found


def read_text(path: Path) -> str:
    """Return the text of a file; LogsteerError where it is not UTF-8 or empty."""
    return decode_text(path.read_bytes(), str(path))


def decode_text(data: bytes, name: str) -> str:
    """Return the text of UTF-8 bytes; LogsteerError, with the name, for other bytes or none."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise LogsteerError(f"{name} is not UTF-8: {error}") from error
    if not text:
        raise LogsteerError(f"{name} is empty")
    return text
