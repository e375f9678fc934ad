"""The `logsteer` command, one module a group of commands."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from logsteer._version import __version__


def main(argv: Sequence[str] | None = None, **options: Any) -> int:
    """Run the command and return its exit status: see `command.run`.

    What needs no client does not wait for one to be imported.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words == ["--version"]:
        print(f"logsteer {__version__}")
        return 0
    if words[:1] == ["serve"]:
        _serve(words[1:])
    from logsteer.cli.command import run

    return run(words, **options)


def _serve(words: list[str]) -> NoReturn:
    """Become the server, which is a package of its own."""
    import os
    from importlib.util import find_spec

    if find_spec("logsteer_server") is None:
        sys.exit(
            "error: the server is not installed here\n"
            "pip install 'logsteer-server[vllm]', or 'logsteer-server[tlens]' for any machine"
        )
    os.execv(sys.executable, [sys.executable, "-m", "logsteer_server", *words])  # noqa: S606
