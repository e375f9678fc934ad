"""What a row of the seam is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

InternalKind = Literal["call", "override", "attribute", "source", "name", "environment"]


@dataclass(frozen=True, slots=True)
class Internal:
    """Something of vLLM's.

    What `relies_on` says depends on `kind`:

    * call: the arguments that we give, as in a signature: those in front of `*` by position. All
      other parameters have defaults.
    * override: all parameters of a method that a function of ours takes the place of.
    * attribute: the name of an attribute of a class.
    * source: code in the body of a function or class; white space is ignored.
    * name: nothing more than that it exists.
    * environment: likewise, for a variable that vLLM reads.
    """

    name: str
    kind: InternalKind
    relies_on: str
    reason: str
    used_in: tuple[str, ...]


def attributes(owner: str, names: str, reason: str, *used_in: str) -> Iterator[Internal]:
    """Make a row for each attribute of a class."""
    for name in names.split():
        yield Internal(owner, "attribute", name, reason, used_in)


def row(kind: InternalKind, name: str, relies_on: str, reason: str, *used_in: str) -> Internal:
    """Make a row."""
    return Internal(name, kind, relies_on, reason, used_in)
