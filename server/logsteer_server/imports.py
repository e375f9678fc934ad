"""How processes import what they run: most of a start, and thousands of modules that then stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

_transformers_lock = Lock()  # two threads that import it at once find it half imported


@contextmanager
def hold_collector() -> Iterator[None]:
    """Keep the garbage collector from what the block imports, while it runs and ever after.

    What modules consist of is never garbage, and an engine's are a million objects: to look through
    all of them takes half a second, many times in the block, whenever vLLM asks for it while it
    loads a model, and while requests run.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def import_tokenizers() -> None:
    """Import what most tokenizers are loaded with, which takes longer than to load one."""
    with _transformers_lock, hold_collector():
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def load_tokenizer(path: Path | str) -> Any:
    """Load the tokenizer of a checkpoint. Errors: OSError or ValueError without one.

    It is that of tokenizer.json if that exists. `AutoTokenizer` makes another of it where the
    configuration names a class of another kind: of bytes as signs, LlamaTokenizer loses the spaces.
    It also brings torch and 450 MB into the HTTP process.
    """
    with _transformers_lock:
        if (Path(path) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        return Tokenizer.from_pretrained(path)


def leave_out_unused() -> None:
    """Have transformers import neither sklearn nor scipy, and with them pandas and pyarrow.

    It asks whether they are installed before it imports them, for assisted decoding and the losses
    of object detection, which no engine uses. Only before transformers loads a model does it count.
    """
    import transformers.utils as asked

    for name in ("is_sklearn_available", "is_scipy_available"):
        setattr(asked, name, _is_left_out)


def _is_left_out() -> bool:
    return False
