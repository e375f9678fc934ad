"""A checkpoint's directory on this machine, its configuration, and its digest."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logsteer_server.engines.gguf import convert, is_gguf, read_header
from logsteer_server.imports import load_tokenizer

WEIGHT_PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")
HASHED_WHOLE = 8 * 2**30
"""Checkpoints of up to this many bytes are hashed whole; larger ones by samples of each file."""
SAMPLE = 16 * 2**20


def check_path(path: str) -> None:
    """Refuse a path where nothing is, unless it may be a hub id. Errors: ValueError."""
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ValueError(f"{path}: no such directory; give a checkpoint's directory or a hub id")


def locate_model(path: str) -> Path:
    """Return the directory of a checkpoint: of a path, a GGUF file, a hub id, or ID@REVISION.

    A hub id that the hub's cache lacks is downloaded, and a GGUF file is dequantised into the
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
    """Return the type of most of a GGUF file's numbers; None for any other model."""
    return read_header(path).kind if is_gguf(path) else None


def limit_context(path: Path | str, text_config: Any, limit: int | None, unread: int = 0) -> int:
    """Return how many tokens a model reads: what its text config says, or `limit` if that is less.

    The engine is asked for `unread` positions more. A LongRoPE model reads what keeps its short
    factors: beyond, the engines turn every text of a batch by the long ones, short texts too.

    Errors: ValueError where no number is named, or a LongRoPE model is to read more.
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
    """Return the length up to which a LongRoPE model uses its short factors; None for any other.

    A model of which both factors are the same is none.
    """
    given = getattr(text_config, "rope_parameters", None) or {}
    by_layer = [entry for entry in given.values() if isinstance(entry, dict)]
    for entry in by_layer or [given]:
        pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
        differs = any(entry.get(short) != entry.get(long) for short, long in pairs)
        if entry.get("rope_type") == "longrope" and differs:
            name = "original_max_position_embeddings"
            return int(entry[name] if name in entry else getattr(text_config, name))
    return None


def find_eos(path: Path | str, tokenizer_path: Path | str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a sequence, in order.

    These are those of the generation configuration, or, where it names none, of the model's own;
    and the tokenizer's. Those outside the vocabulary are left out: a model cannot say them.
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
    """Return those of the tokens that a model can say, in order."""
    ids = [i for one in named for i in (one if isinstance(one, list) else [one])]
    return tuple(sorted({int(i) for i in ids if i is not None and 0 <= int(i) < vocab_size}))


def digest_weights(path: Path | str) -> str:
    """Return the SHA-256 over names, sizes and bytes of config and weights, as `sha256:<hex>`.

    Checkpoints above HASHED_WHOLE are read at the start and end of each file only, and the digest
    then says `sampled-sha256`.
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
