"""JSON lines, of a file or of standard input."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from logsteer.errors import LogsteerError


def read_json_lines(lines: Iterable[bytes], name: str, form: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each line that is not blank.

    Where a line may be a text, a JSON string is that text, and whoever asks says which field of an
    object stands for it. `name` is said in errors, and `form`: what to write in a line. Raises
    LogsteerError for a line that is no JSON.
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
