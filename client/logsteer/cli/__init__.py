"""The `logsteer` command, one module a group of commands."""

from logsteer.cli.command import main

__all__ = ["main"]
