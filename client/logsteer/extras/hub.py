"""Data sets of the Hugging Face hub, or in directories laid out like those, through `datasets`.

A name is `NAME[/CONFIG][@SPLIT]`. NAME is `owner/name` or `name` on the hub, or a directory; the
split is `train` unless said, which most data sets have.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from logsteer.errors import InvalidRequestError

DEFAULT_SPLIT = "train"
"""The split of a name without one, wherever a name is read."""
_LOCAL = (".", "/", "~")
"""What a name begins with that is a path and nothing else."""


def load_rows(name: str) -> Iterable[Mapping[str, Any]]:
    """Return the rows of `NAME[/CONFIG][@SPLIT]`; the split is `train` unless given.

    Errors: InvalidRequestError where `datasets` is not installed, or there is no such data set,
    configuration or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise _refuse(
            "data sets of Hugging Face need a package: pip install 'logsteer[datasets]'"
        ) from error
    path, split = cut_split(name)
    split = split or DEFAULT_SPLIT
    tried = []
    for repository, config in _list_readings(path):
        tried.append(f"{repository!r}" + (f", configuration {config!r}" if config else ""))
        try:
            rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
                repository, config, split=split
            )
        except (FileNotFoundError, ConnectionError) as error:  # there is none, or nobody answers
            reason = str(error)
            continue
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            told = str(error.__cause__ or error).partition("\nExample")[0].rstrip(".\n ")
            raise _refuse(f"{tried[-1]}: {told}; write NAME/CONFIG@SPLIT") from error
        return rows
    raise _refuse(f"no data set {' and none '.join(tried)} was found: {reason}")


def cut_split(name: str) -> tuple[str, str | None]:
    """Return the two of `NAME@SPLIT`, None for a name without a split.

    A directory may have an @ in its name; a split has no slash.
    """
    path, at, split = name.rpartition("@")
    if not at or "/" in split or not split:
        return name, None
    return path, split


def _list_readings(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield what a name may mean, as repository or directory and configuration.

    `openai/gsm8k/main` is one repository and configuration, and so is `./gsm8k/main`. `gsm8k/main`
    is repository `main` of `gsm8k`, or configuration `main` of `gsm8k`.
    """
    place = Path(name).expanduser()
    parts = name.strip("/").split("/")
    if len(parts) > 1 and _has_configuration(place.parent, place.name):
        yield str(place.parent), place.name
    elif place.is_dir():
        yield str(place), None
    elif name.startswith(_LOCAL):
        if not place.parent.is_dir():
            raise _refuse(f"there is no directory {name!r}")
        yield str(place.parent), place.name
    elif not all(parts) or len(parts) > 3:
        raise _refuse(f"{name!r} is neither a directory nor NAME, OWNER/NAME or OWNER/NAME/CONFIG")
    elif len(parts) == 3:
        yield "/".join(parts[:2]), parts[2]
    else:
        yield name, None
        if len(parts) == 2:
            yield parts[0], parts[1]


def _has_configuration(directory: Path, name: str) -> bool:
    """Return whether the card of a data set in a directory names a configuration."""
    if not (directory / "README.md").is_file():
        return False
    from datasets import get_dataset_config_names

    return name in get_dataset_config_names(str(directory))


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_request", detail, param="source")
