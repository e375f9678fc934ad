"""A GGUF file as a model: dequantised once, with transformers' loader, into the user's cache.

Its BOS setting and its chat template come from the file.
"""

import hashlib
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".gguf"
ADD_BOS = "tokenizer.ggml.add_bos_token"
CONFIG = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
"""Name in transformers' configurations -> name in a GGUF file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's description of its model.

    `config`: sizes, by the names of transformers' configurations. `kind`: the commonest data type,
    such as Q4_1.
    """

    architecture: str
    config: dict[str, Any]
    num_parameters: int
    kind: str
    add_bos: bool | None


def is_gguf(path: str) -> bool:
    """Return whether a model's path is that of a GGUF file."""
    return path.endswith(SUFFIX) and Path(path).is_file()


def read_header(file: str | Path) -> GgufHeader:
    """Return a file's description of its model. Errors: ValueError for another or partial file."""
    from gguf import GGUFReader  # here: the import takes a second

    reader = GGUFReader(file)

    def value_of(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    architecture = value_of("general.architecture")
    if architecture is None or (value_of("split.count") or 1) > 1:
        raise ValueError(f"{file}: a model in one file is read; join its parts by llama-gguf-split")
    config = {ours: value_of(f"{architecture}.{name}") for ours, name in CONFIG.items()}
    sizes = Counter[str]()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    ((kind, _),) = sizes.most_common(1)
    return GgufHeader(architecture, config, sizes.total(), kind, value_of(ADD_BOS))


def describe_gguf(file: Path) -> str:
    """Return where a file is or will be dequantised, for `--check`.

    Errors: ValueError as `read_header`, and if transformers does not support its architecture.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    header = read_header(file)
    if header.architecture.replace("moe", "_moe") not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"transformers reads no GGUF file of architecture {header.architecture}; serve the "
            "checkpoint's directory or hub id"
        )
    target = find_converted(file)
    done = "lies dequantised" if target.is_dir() else "is dequantised at the first start, once,"
    return f"{file.name} ({header.kind}) {done} in {target}, as float32"


def find_converted(file: Path) -> Path:
    """Return the directory of a file's checkpoint in the user's cache, which may not exist yet."""
    stat, caches = file.stat(), os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    name = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return Path(caches, "logsteer", "gguf", f"{file.stem}-{digest}")


def convert(file: Path) -> Path:
    """Convert a file to a checkpoint in float32, unless that was done before; return its directory.

    Errors: ValueError as `read_header`, or from transformers' loader.
    """
    target = find_converted(file)
    if target.is_dir():
        return target
    header = read_header(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        own = Path(scratch, "checkpoint")
        _write_checkpoint(file, own, header)
        if not target.is_dir():  # another process may have written the same
            own.rename(target)
    return target


def _write_checkpoint(file: Path, directory: Path, header: GgufHeader) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent, "gguf_file": file.name,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if header.add_bos is not None and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = header.add_bos  # in the post-processor of tokenizer.json
    tokenizer.save_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The model is dequantised; marked as quantised, it could not be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)
