"""Triton's kernels on a CPU: interpreted, one program after another, by Triton itself.

vLLM's V2 runner prepares each step with Triton kernels, and vLLM's build for CPUs takes no Triton
that has no backend for them. The interpreter needs none; a stand-in says that there is one. It is
slow, a millisecond a kernel, and there for tests: what V2 does with a step is the same as on GPUs.
"""

import os
from types import SimpleNamespace


class CpuDriver:
    """What vLLM and Triton ask of a backend whose kernels are interpreted."""

    @staticmethod
    def is_active() -> bool:
        """Say that this backend's device is there."""
        return True


def interpret_kernels() -> None:
    """Have Triton interpret kernels in this process. Call it before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=CpuDriver, compiler=None)
