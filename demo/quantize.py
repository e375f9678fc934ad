"""Writes an INT8 W8A8 compressed-tensors checkpoint of a small Llama-style checkpoint."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import (  # type: ignore[import-untyped]
    ModelCompressor,
)
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

HERE = Path(__file__).resolve().parent
# The head stays as it was: its errors would reach every log-probability with nothing behind them
# to absorb any, and where it is tied to the embedding there is no weight of its own to quantise.
UNQUANTIZED = ("lm_head",)
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def recipe() -> QuantizationConfig:
    """What is quantised: each Linear, weights by output channel, activations by token as they come.

    Both are symmetric; activations need no calibration, since their scales are found at run time.
    """
    group = preset_name_to_scheme("W8A8", targets=["Linear"])
    return QuantizationConfig(config_groups={"group_0": group}, ignore=list(UNQUANTIZED))


def set_scales(layer: nn.Module, args: QuantizationArgs) -> None:
    """Nothing; gives the layer the scale of each output channel, from its largest weight."""
    low, high = torch.aminmax(layer.get_parameter("weight"), dim=1, keepdim=True)
    scale, _ = calculate_qparams(low, high, args)
    layer.get_parameter("weight_scale").copy_(scale)


@torch.no_grad()
def quantize(model: PreTrainedModel) -> tuple[ModelCompressor, list[str]]:
    """The compressor that describes the model, and the layers that it quantised in place.

    Errors: SystemExit where the model has no layer to quantise.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name not in UNQUANTIZED:
            layer.float()  # bfloat16 has too few digits to find the nearest of 256 steps
    apply_quantization_config(model, recipe())
    names = []
    for name, layer in model.named_modules():
        scheme = getattr(layer, "quantization_scheme", None)
        if scheme is not None:
            set_scales(layer, scheme.weights)
            names.append(name)
    if not names:
        raise SystemExit("the model has no Linear layer but its head, so nothing was quantised")
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor, names


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
    parser.add_argument("--model", type=Path, default=HERE / "model", help="folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    return parser.parse_args()


def main() -> None:
    """Nothing; reads, quantises and saves. Errors: SystemExit where the model is not for this."""
    options = parsed()
    if options.output.resolve() == options.model.resolve():
        raise SystemExit("--output is the folder of the model itself; name another one")
    config = json.loads((options.model / "config.json").read_text())
    if "quantization_config" in config:
        raise SystemExit(f"{options.model} is quantised already; name an unquantised checkpoint")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    compressor, names = quantize(model)
    model.save_pretrained(options.output)
    compressor.update_config(str(options.output))
    copy_tokenizer(options.model, options.output)
    before, after = weights_size(options.model), weights_size(options.output)
    print(f"{len(names)} layers in int8; {before} bytes of weights became {after}")


if __name__ == "__main__":
    main()
