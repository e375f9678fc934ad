"""The logsteer server: resident language models behind HTTP, scored exactly."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("logsteer-server")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.1.0"
