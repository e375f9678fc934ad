"""Runs `pt_file` in forks of one process that has torch loaded, instead of loading it every time.

What a fork runs is the whole of `main`, bounds on its resources included.
"""

import io
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from logsteer_server.stores.formats import pt_file

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "safetensors.numpy", pt_file.__name__])
RUN = subprocess.run


def convert(connection: Connection, data: bytes) -> None:
    """Send the exit status, stdout and stderr of `main` for this file."""
    out, err = io.BytesIO(), io.StringIO()
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(data)), io.TextIOWrapper(out)
    sys.stderr = err
    status: Any = 0
    try:
        pt_file.main()
    except SystemExit as ending:
        status = ending.code
    connection.send((status, out.getvalue(), err.getvalue().encode()))


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, forked where the command is the reader of torch's files."""
    if command[-2:] != ["-m", pt_file.__name__]:
        return RUN(command, **options)
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=convert, args=(sender, options["input"]))
    process.start()
    sender.close()
    try:
        status, out, err = receiver.recv()
    except EOFError:  # it was killed
        process.join()
        status, out, err = process.exitcode, b"", b""
    process.join()
    receiver.close()
    return subprocess.CompletedProcess(command, status, out, err)
