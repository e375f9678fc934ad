"""A checkpoint's directory on this machine, its configuration, and its digest."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from logsteer_server.engines.gguf import convert, is_gguf, read_header
from logsteer_server.imports import load_tokenizer

WEIGHT_PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")
HASHED_WHOLE = 8 * 2**30
"""Checkpoints up to this many bytes are hashed completely; larger ones by samples of each file."""
SAMPLE = 16 * 2**20


def check_path(path: str) -> None:
    """Refuse a path that does not exist, unless it may be a hub id. Errors: ValueError."""
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ValueError(f"{path}: no such directory; give a checkpoint's directory or a hub id")


def locate_model(path: str) -> Path:
    """Return the directory of a checkpoint, given a path, a GGUF file, a hub id, or ID@REVISION.

    A hub model that is not in the hub's cache is downloaded; a GGUF file is dequantised into the
    user's cache. Errors: ValueError as `check_path` and `gguf.convert`.
    """
    check_path(path)
    if is_gguf(path):
        return convert(Path(path))
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub_id, _, asked = path.partition("@")
    revision = asked or None
    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        ignored = ["*.bin", "*.pth", "original/*"]
        return Path(snapshot_download(hub_id, revision=revision, ignore_patterns=ignored))


def find_kind(path: str) -> str | None:
    """Return the commonest data type in a GGUF file; None for any other model."""
    return read_header(path).kind if is_gguf(path) else None


def limit_context(path: Path | str, text_config: Any, limit: int | None, unread: int = 0) -> int:
    """Return a model's context length: its text config's, or `limit` if that is less.

    The engine itself gets `unread` positions more. A LongRoPE model is limited to the length of its
    short factors: beyond it, the engines rotate every text of a batch by the long factors, short
    texts included.

    Errors: ValueError if no length is known, or `limit` is too long for a LongRoPE model.
    """
    derived = getattr(text_config, "max_position_embeddings", None)
    if derived is None and limit is None:
        raise ValueError(f"{path}: its config names no context length; set max_model_len")
    if (original := find_longrope(text_config)) is not None:
        derived = original - unread if derived is None else min(derived, original - unread)
        if limit is not None and limit > derived:
            raise ValueError(
                f"max_model_len: {limit} would have the engine turn all texts by LongRoPE's long "
                f"factors, or all that share a batch with a long one, where the model turns texts "
                f"of up to {original} tokens by the short ones: set at most {derived}"
            )
    return int(min(x for x in (derived, limit) if x is not None))


def find_longrope(text_config: Any) -> int | None:
    """Return the length up to which a LongRoPE model uses its short factors; None for others.

    A model whose short and long factors are equal is not LongRoPE here.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for entry in by_layer or [parameters]:
        pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
        differs = any(entry.get(short) != entry.get(long) for short, long in pairs)
        if entry.get("rope_type") == "longrope" and differs:
            name = "original_max_position_embeddings"
            return int(entry[name] if name in entry else getattr(text_config, name))
    return None


def find_eos(path: Path | str, tokenizer_path: Path | str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end a sequence, sorted.

    They are the generation configuration's, or else the model configuration's, and the tokenizer's.
    Ids outside the vocabulary are left out: a model cannot generate them.
    """
    from transformers import AutoConfig, GenerationConfig

    named: Any = None
    if (Path(path) / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(path).eos_token_id
    if named is None:
        config = AutoConfig.from_pretrained(path)
        named = GenerationConfig.from_model_config(config).eos_token_id
    return choose_eos([named, load_tokenizer(tokenizer_path).eos_token_id], vocab_size)


def choose_eos(named: Sequence[int | list[int] | None], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that are in the vocabulary, sorted."""
    ids = [i for one in named for i in (one if isinstance(one, list) else [one])]
    return tuple(sorted({int(i) for i in ids if i is not None and 0 <= int(i) < vocab_size}))


def digest_weights(path: Path | str) -> str:
    """Return the SHA-256 of names, sizes and bytes of config and weights, as `sha256:<hex>`.

    For checkpoints above HASHED_WHOLE, only the start and end of each file are read, and the digest
    begins with `sampled-sha256`.
    """
    directory = Path(path)
    files = sorted(f for pattern in WEIGHT_PATTERNS for f in directory.glob(pattern))
    whole = sum(f.stat().st_size for f in files) <= HASHED_WHOLE
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if whole or size <= 2 * SAMPLE:
                while block := stream.read(SAMPLE):
                    digest.update(block)
            else:
                digest.update(stream.read(SAMPLE))
                stream.seek(size - SAMPLE)
                digest.update(stream.read(SAMPLE))
    return f"{'' if whole else 'sampled-'}sha256:{digest.hexdigest()}"


def find_weight_shapes(config: Any) -> dict[str, Sequence[int]]:
    """Return the shapes of a model's parameters, by their names in transformers.

    `config` is that of transformers. The shapes do not depend on how a checkpoint packs its
    weights. Empty for a model that transformers does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), suppress(ValueError):
        model = AutoModelForCausalLM.from_config(config)
        return {name: parameter.shape for name, parameter in model.named_parameters()}
    return {}
