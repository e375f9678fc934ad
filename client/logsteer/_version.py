"""The version of this package, where it is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("logsteer")
except PackageNotFoundError:
    __version__ = "0.1.0"
