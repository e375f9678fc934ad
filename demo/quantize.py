"""Writes quantised checkpoints of a small Llama-style checkpoint, one folder a scheme.

w8a8: weights and activations in int8, w4a16: weights in 4 bits, fp8: weights and activations in
float8, all three as compressed-tensors; awq: weights in 4 bits with zero points, in the format of
AWQ. Weights are rounded to the nearest value that the scheme has; none needs calibration text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from compressed_tensors.compressors import (  # type: ignore[import-untyped]
    ModelCompressor,
)
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

HERE = Path(__file__).resolve().parent
# The head stays as it was: its errors would reach every log-probability with nothing behind them
# to absorb any, and where it is tied to the embedding there is no weight of its own to quantise.
UNQUANTIZED = ("lm_head",)
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
PRESETS = {"w8a8": "W8A8", "w4a16": "W4A16", "fp8": "FP8_DYNAMIC"}
"""Compressed-tensors' own names of the schemes that it writes."""
GROUP = 32
"""Weights of a row that share a scale, in 4 bits: a divisor of every width of a small model."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns stands in each nibble of AWQ's int32, from the lowest."""


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The layers to quantise, by name. Errors: SystemExit where there is none."""
    found = False
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name not in UNQUANTIZED:
            found = True
            yield name, layer
    if not found:
        raise SystemExit("the model has no Linear layer but its head, so nothing was quantised")


def preset(scheme: str) -> QuantizationScheme:
    """What is quantised to what; activations by token, with scales found while the model runs."""
    found = preset_name_to_scheme(PRESETS[scheme], targets=["Linear"])
    if found.weights.group_size:
        found.weights.group_size = GROUP
    return found


def set_scales(layer: nn.Module, args: QuantizationArgs) -> None:
    """Nothing; gives the layer the scale of each channel or group, from its largest weight."""
    weight_NK = layer.get_parameter("weight")
    groups_NGK = torch.unflatten(weight_NK, 1, (-1, args.group_size or weight_NK.shape[1]))
    scale_NG, _ = calculate_qparams(*torch.aminmax(groups_NGK, dim=-1), args)
    layer.get_parameter("weight_scale").copy_(scale_NG)


@torch.no_grad()
def write_compressed(scheme: str, model: PreTrainedModel, output: Path) -> None:
    """Nothing; quantises the model in place and saves it in the format of compressed-tensors."""
    layers = list(linear_layers(model))
    recipe = QuantizationConfig(config_groups={"group_0": preset(scheme)}, ignore=list(UNQUANTIZED))
    apply_quantization_config(model, recipe)
    for _, layer in layers:
        set_scales(layer, layer.quantization_scheme.weights)  # type: ignore[union-attr]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(output)
    compressor.update_config(str(output))


def pack_awq(codes_KN: Tensor) -> Tensor:
    """Numbers from 0 to 15 [K, N], eight columns to an int32 [K, N / 8] in AWQ's order."""
    nibbles = torch.unflatten(codes_KN.to(torch.int32), 1, (-1, 8))[:, :, list(AWQ_ORDER)]
    # The highest nibble reaches the sign, and the sum wraps round to it.
    return (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def to_awq(weight_NK: Tensor) -> dict[str, Tensor]:
    """A layer's tensors in AWQ's format: a weight is (code - zero point) * scale of its group."""
    groups_GKN = torch.unflatten(weight_NK.T.float(), 0, (-1, GROUP))
    low_GN, high_GN = groups_GKN.amin(1).clamp(max=0), groups_GKN.amax(1).clamp(min=0)
    scale_GN = ((high_GN - low_GN) / 15).clamp(min=1e-7).half()
    zero_GN = (-low_GN / scale_GN).round().clamp(0, 15)
    codes_GKN = ((groups_GKN / scale_GN[:, None]).round() + zero_GN[:, None]).clamp(0, 15)
    return {
        "qweight": pack_awq(codes_GKN.flatten(0, 1)),
        "qzeros": pack_awq(zero_GN),
        "scales": scale_GN,
    }


@torch.no_grad()
def write_awq(model: PreTrainedModel, output: Path) -> None:
    """Nothing; saves the model in AWQ's format."""
    layers = dict(linear_layers(model))
    model.save_pretrained(output)
    stored = load_file(output / "model.safetensors")
    for name, layer in layers.items():
        tensors = to_awq(layer.weight)
        del stored[f"{name}.weight"]
        stored |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(stored, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": list(UNQUANTIZED),
    }
    (output / "config.json").write_text(json.dumps(config, indent=2))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Nothing; copies the tokenizer's files unchanged, so that both models read the same ids."""
    for path in sorted(source.iterdir()):
        # The configuration and the index of the weights are written anew.
        taken = path.name == "config.json" or path.name.endswith(".index.json")
        if path.suffix in TOKENIZER_SUFFIXES and not taken:
            shutil.copyfile(path, target / path.name)


def weights_size(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="+", choices=[*PRESETS, "awq"], metavar="SCHEME",
                        help=f"one or more of {', '.join([*PRESETS, 'awq'])}")  # fmt: skip
    parser.add_argument("--model", type=Path, default=HERE / "model", help="folder to read")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write one folder a scheme into"
    )
    return parser.parse_args()


def main() -> None:
    """Nothing; reads, quantises and saves. Errors: SystemExit where the model is not for this."""
    options = parsed()
    config = json.loads((options.model / "config.json").read_text())
    if "quantization_config" in config:
        raise SystemExit(f"{options.model} is quantised already; name an unquantised checkpoint")
    for scheme in options.schemes:
        output = options.output / scheme
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        for _, layer in linear_layers(model):
            layer.float()  # bfloat16 has too few digits to find the nearest of 256 steps
        if scheme in PRESETS:
            write_compressed(scheme, model, output)
        else:
            write_awq(model, output)
        copy_tokenizer(options.model, output)
        before, after = weights_size(options.model), weights_size(output)
        print(f"{output}: {before} bytes of weights became {after}")


if __name__ == "__main__":
    main()
