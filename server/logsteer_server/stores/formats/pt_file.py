"""`python -m logsteer_server.stores.formats.pt_file`: torch's file on stdin, safetensors on stdout.

It runs as a process of its own, because the HTTP process does not load torch, and because a file of
a few bytes may unfold without end: address space and CPU time are bounded. The file is loaded
weights-only, which runs none of the code that a pickle can name.

Exit status: 0 done; 3 refused, and stderr says why in one line.
"""

import io
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MEMORY_BYTES = 2**30
"""What loading may take beyond what torch itself has mapped."""
CPU_SECONDS = 60
REFUSED = 3
MAX_TENSORS = 4096

HOOKS = {"decoder_block": "hook_resid_post", "self_attn": "hook_attn_out", "mlp": "hook_mlp_out"}
"""The kinds of layer of the package steering-vectors -> TransformerLens' name of their output."""


class PickledVector:
    """Stands in for the class of the package steering-vectors, whose objects are pickled whole."""

    layer_activations: Any = None
    layer_type: Any = "decoder_block"


def main() -> None:
    """Convert one file."""
    try:
        import safetensors.numpy  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        refuse(f"this server cannot read torch's files ({error}); send safetensors")
    data = sys.stdin.buffer.read()
    limit_resources()
    try:
        content = convert(data)
    except ValueError as error:
        refuse(str(error))
    sys.stdout.buffer.write(content)


def convert(data: bytes) -> bytes:
    """Return the tensors of torch's file as safetensors. Errors: ValueError for all that fails."""
    import torch
    from safetensors.numpy import save

    known: Any = (PickledVector, "steering_vectors.steering_vector.SteeringVector")
    try:
        with torch.serialization.safe_globals([known]):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        tensors = {name: to_numpy(name, tensor) for name, tensor in list_tensors(loaded).items()}
        return save(tensors)
    except MemoryError as error:
        raise ValueError(f"it unfolds to more than {MEMORY_BYTES} bytes") from error
    except Exception as error:  # a broken file makes torch raise anything
        raise ValueError(explain(error)) from error


def limit_resources() -> None:
    """Bound what this process may take from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def list_tensors(loaded: Any) -> dict[str, Any]:
    """Return what was loaded as named tensors. Errors: ValueError for another form."""
    if isinstance(loaded, PickledVector):
        loaded = vars(loaded)
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"it holds a {type(loaded).__name__}; save a dictionary of layer -> 1-D tensor"
        )
    if "layer_activations" in loaded:
        kind = loaded.get("layer_type", "decoder_block")
        if kind not in HOOKS:
            raise ValueError(f"its layer_type is {kind!r}; known are {', '.join(HOOKS)}")
        layers = loaded["layer_activations"]
        if not isinstance(layers, Mapping):
            raise ValueError("its layer_activations are no dictionary")
        loaded = {f"blocks.{layer}.{HOOKS[kind]}": tensor for layer, tensor in layers.items()}
    if len(loaded) > MAX_TENSORS:
        raise ValueError(f"it has {len(loaded)} entries, at most {MAX_TENSORS} are read")
    return {str(name): tensor for name, tensor in loaded.items()}


def to_numpy(name: str, tensor: Any) -> Any:
    """Return a tensor as a contiguous float32 array. Errors: ValueError for anything else."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"entry {name[:80]!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        raise ValueError(f"entry {name[:80]!r} is not a dense tensor of floating-point numbers")
    return tensor.detach().to(torch.float32).contiguous().numpy()


def explain(error: Exception) -> str:
    """Say in one line why a file was not read."""
    text = str(error)
    if "alloc" in text or "memory" in text:
        return f"it unfolds to more than {MEMORY_BYTES} bytes"
    if named := re.search(r"GLOBAL (\S+)", text):
        return (
            f"it names {named[1][:120]}, which only unpickling could run, and pickles are not run "
            "here; save a dictionary of layer -> tensor with torch.save, or send safetensors"
        )
    if isinstance(error, ValueError):
        return text
    return f"torch cannot read it: {' '.join(text.split())[:200]}"


def refuse(reason: str) -> NoReturn:
    """End the process, with the reason on stderr."""
    sys.stderr.write(" ".join(reason.split()) + "\n")
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
