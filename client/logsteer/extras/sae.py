"""Features of sparse autoencoders as vectors, from the files that SAELens saves.

These are `cfg.json` and `sae_weights.safetensors`. With x an activation, s the factor that
activations are multiplied by before the autoencoder (1 for most), w the feature's column of W_enc
and d its row of W_dec:

    z = (s x - b_dec) . w + b_enc        without b_dec where `apply_b_dec_to_input` is false
    the feature adds relu(z) d / s to the reconstruction, where z is above its threshold

| architecture | z and its threshold |
|---|---|
| `standard` | 0 |
| `jumprelu` | `threshold`, at least 0 |
| `gated` | z has the slope exp(r_mag) and the bias b_mag; the gate x . w + b_gate > 0 is a |
| | threshold on the same product, b_mag - exp(r_mag) b_gate (arXiv 2404.16014, section 3.2) |
| `topk`, `batchtopk` | among the k largest of all features: no matter of this feature alone |
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from logsteer.errors import LogsteerError
from logsteer.extras.datasets import parse_json
from logsteer.extras.tensors import FLOATS, TensorFile, render_tensors
from logsteer.schemas import VectorReadout

READOUTS = "logsteer.readouts"
"""The entry of a vector file's metadata that has its readouts."""

_RELATIVE = ("topk", "batchtopk", "matryoshka_batchtopk")
_ARCHITECTURES = ("standard", "jumprelu", "gated", *_RELATIVE)
_AS_THEY_ARE = ("none", "expected_average_only_in")
"""Ways of normalising activations that multiply all of them by one constant, or by none."""
_MEASURED = ("layer_norm", "constant_norm_rescale")
"""Ways that divide each activation by what is measured on it."""
_BLOCK = re.compile(r"blocks\.([0-9]+|\{layer\})\.(?:hook_)?([A-Za-z0-9_.]+)")
_MODULE = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class SaeFeature:
    """One feature: what it writes and what it reads, as safetensors files of vectors.

    Layer L with hook `resid_post` is the stream that leaves block L. The probe has a readout where
    the feature's activation follows from a projection on it alone.
    """

    vector: bytes
    probe: bytes


class SaeConfig:
    """What `cfg.json` says; since SAELens 6 a part of it is in `metadata`."""

    def __init__(self, document: dict[str, Any], place: Path) -> None:
        self._document = document
        self._place = place
        self.architecture = str(self.get("architecture") or "standard")
        function = self.get("activation_fn", "activation_fn_str") or "relu"
        if self.architecture == "standard" and function == "topk":
            self.architecture = "topk"
        elif self.architecture not in _RELATIVE and function != "relu":
            self.architecture += f" with {function}"
        if self.architecture not in _ARCHITECTURES:
            raise LogsteerError(
                f"{place}: architecture {self.architecture[:80]!r} is not known; "
                f"{', '.join(_ARCHITECTURES)} are read"
            )
        normalized = self.get("normalize_activations") or "none"
        self.normalization = "expected_average_only_in" if normalized is True else str(normalized)
        if self.normalization not in (*_AS_THEY_ARE, *_MEASURED):
            raise LogsteerError(
                f"{place}: normalize_activations {self.normalization[:80]!r} is not known; "
                f"{', '.join((*_AS_THEY_ARE, *_MEASURED))} are"
            )
        self.has_centre = self.get("apply_b_dec_to_input") is not False

    @classmethod
    def parse(cls, content: bytes | str, place: Path) -> Self:
        """Return the configuration that a file has, which messages call `place`.

        Raises LogsteerError.
        """
        document = parse_json(content, str(place))
        if not isinstance(document, dict):
            raise LogsteerError(f"{place}: no JSON object")
        return cls(document, place)

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there, of the whole or of `metadata`."""
        metadata = self._document.get("metadata")
        for name in names:
            for part in (self._document, metadata if isinstance(metadata, dict) else {}):
                if part.get(name) is not None:
                    return part[name]
        return None

    def choose_scale(self, given: float | None) -> float:
        """Return the constant that activations are multiplied by. Raises LogsteerError."""
        if given is not None and not (math.isfinite(given) and given > 0):
            raise LogsteerError(f"the activation scale is {given}; give a number above 0")
        if self.normalization == "expected_average_only_in":
            if given is None:
                raise LogsteerError(
                    f"{self._place}: activations are multiplied by a constant before this "
                    "autoencoder, and the files do not have it: give --activation-scale "
                    "(activation_scale), SAELens' norm_scaling_factor; 1 where it was folded in"
                )
            return given
        if given is not None:
            raise LogsteerError(
                f"{self._place}: normalize_activations is {self.normalization}, so there is no "
                "activation scale: leave it out"
            )
        return 1.0

    def choose_place(self, layer: int | None) -> tuple[int, str]:
        """Return the layer and hook of the activations. Raises LogsteerError."""
        if self.get("hook_head_index", "hook_point_head_index") is not None:
            raise LogsteerError(
                f"{self._place}: it reads a single head, which no vector stands for"
            )
        name = str(self.get("hook_name", "hook_point") or "")
        chosen, hook = layer, "resid_post"
        if found := _BLOCK.fullmatch(name):
            hook = "resid_post" if found[2] == "out" else found[2]
            if layer is None:
                chosen = self._read_layer() if "{" in found[1] else int(found[1])
        elif found := _MODULE.fullmatch(name):
            chosen = int(found[1]) if layer is None else layer
        elif name and layer is None:
            raise LogsteerError(
                f"{self._place}: hook_name {name[:80]!r} is not known; give --layer (layer), the "
                "block whose output it reads"
            )
        if chosen is None:
            raise LogsteerError(
                f"{self._place} names no hook: give --layer (layer), the block whose output it "
                "reads"
            )
        if chosen < 0:
            raise LogsteerError(f"layer {chosen}: layers are counted from 0")
        if hook == "resid_pre" and chosen:
            # The stream that enters a block is the one that leaves the block before.
            chosen, hook = chosen - 1, "resid_post"
        return chosen, hook

    def _read_layer(self) -> int | None:
        """Return `hook_layer`, None where it is not there. Raises LogsteerError."""
        found = self.get("hook_layer", "hook_point_layer")
        if found is not None and (type(found) is not int or found < 0):
            raise LogsteerError(
                f"{self._place}: hook_layer {found!r:.80} is not a layer, counted from 0; "
                "give --layer (layer)"
            )
        return found


def extract_feature(
    tensors: TensorFile, config: SaeConfig, feature: int, place: tuple[int, str], scale: float
) -> SaeFeature:
    """Return a feature of an autoencoder's weights; place and scale are as `config` chooses them.

    Raises LogsteerError, and ValueError for a tensor that is not there or damaged.
    """
    size, _ = read_sizes(tensors, config)
    if not 0 <= feature < size:
        raise LogsteerError(f"there is no feature {feature}: this autoencoder has 0 to {size - 1}")
    written_D = _read_floats(tensors, "W_dec", feature)
    read_D = _read_floats(tensors, "W_enc", slice(None), feature)
    for what, numbers in (("W_dec row", written_D), ("W_enc column", read_D)):
        if not (numbers.any() and math.isfinite(abs(numbers).max())):
            raise LogsteerError(f"feature {feature} has a {what} of zeros, or of NaN or infinity")
    centre = 0.0
    if config.has_centre:
        centre = math.fsum(_read_floats(tensors, "b_dec") * read_D)
    factor = 1 / scale
    if config.get("finetuning_scaling_factor") and "finetuning_scaling_factor" in tensors.entries:
        factor *= _read_one(tensors, "finetuning_scaling_factor", feature)
    if config.architecture in _RELATIVE and config.get("rescale_acts_by_decoder_norm"):
        factor /= _measure(written_D)
    layer, hook = place
    name = f"blocks.{layer}.{hook if '.' in hook else 'hook_' + hook}"
    metadata = {}
    try:
        readout = _read_out(tensors, config, feature, scale * _measure(read_D), centre)
        if readout is not None:
            metadata[READOUTS] = json.dumps({str(layer): readout.model_dump()})
        vector = render_tensors({name: factor * written_D})
        probe = render_tensors({name: read_D}, metadata)
    except OverflowError as error:
        raise LogsteerError(f"feature {feature} has numbers beyond float32, or NaN") from error
    return SaeFeature(vector, probe)


def read_sizes(tensors: TensorFile, config: SaeConfig) -> tuple[int, int]:
    """Return the number of features and the width. Raises LogsteerError for shapes that differ."""
    shape = list(tensors.read("W_dec", FLOATS).shape)
    if len(shape) != 2:
        raise LogsteerError(f"W_dec has shape {shape}, not [features, width]")
    size, width = shape
    expected = {"W_enc": [width, size]}
    if config.has_centre:
        expected["b_dec"] = [width]
    for name, wanted in expected.items():
        if (found := list(tensors.read(name, FLOATS).shape)) != wanted:
            raise LogsteerError(
                f"{name} has shape {found}, W_dec {shape}: they do not belong together"
            )
    for name, count in (("d_in", width), ("d_sae", size)):
        if config.get(name) not in (None, count):
            raise LogsteerError(
                f"cfg.json has {name} {config.get(name)}, and W_dec has shape {shape}"
            )
    return size, width


def _read_out(
    tensors: TensorFile, config: SaeConfig, feature: int, slope: float, centre: float
) -> VectorReadout | None:
    """Return what a projection on the probe means; None where it does not say the activation."""
    if config.architecture in _RELATIVE or config.normalization in _MEASURED:
        return None
    threshold = 0.0
    if config.architecture == "gated":
        growth = math.exp(_read_one(tensors, "r_mag", feature))
        magnitude = _read_one(tensors, "b_mag", feature)
        bias = magnitude - growth * centre
        # The gate opens where slope c - centre > -b_gate, with the slope before it grows.
        threshold = magnitude - growth * _read_one(tensors, "b_gate", feature)
        slope *= growth
    else:
        bias = _read_one(tensors, "b_enc", feature) - centre
        if config.architecture == "jumprelu":
            threshold = _read_one(tensors, "threshold", feature)
    if not math.isfinite(slope + bias + threshold):
        raise OverflowError("the readout has numbers beyond float64, or NaN")
    return VectorReadout(kind="relu", slope=slope, bias=bias, threshold=max(threshold, 0.0))


def _read_floats(tensors: TensorFile, name: str, *index: Any) -> Any:
    """Return a tensor, or what `index` selects of it, in float64. Errors: ValueError."""
    return tensors.read(name, FLOATS, *index).astype("f8")


def _read_one(tensors: TensorFile, name: str, index: int) -> float:
    return float(_read_floats(tensors, name, index))


def _measure(numbers: Any) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(math.fsum(numbers * numbers))
