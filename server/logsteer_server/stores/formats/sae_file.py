"""Sparse autoencoders: SAELens' two files, and labels of the features, stored as one file.

SAELens' files are `cfg.json` and `sae_weights.safetensors`. With x an activation, s the factor that
scales activations before the autoencoder (mostly 1), w the feature's column of W_enc and d its row
of W_dec:

    z = (s x - b_dec) . w + b_enc        without b_dec if `apply_b_dec_to_input` is false
    the feature adds relu(z) d / s to the reconstruction if z is above its threshold

| architecture | z and its threshold |
|---|---|
| `standard` | 0 |
| `jumprelu` | `threshold`, at least 0 |
| `gated` | z has the slope exp(r_mag) and the bias b_mag; the gate x . w + b_gate > 0 is a |
| | threshold on the same product, b_mag - exp(r_mag) b_gate (arXiv 2404.16014, section 3.2) |
| `topk` | among the k largest of all features, so it depends on the other features |
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas.common import MAX_COUNT
from logsteer_server.numerics.sae import SaeEncoder
from logsteer_server.stores.formats.tensor_file import (
    TensorFile,
    copy_with_metadata,
    read_content,
    refuse_invalid,
)
from logsteer_server.stores.layer_vectors import RESID_POST, LayerVectors, Readout

SAE_KEY = "logsteer.sae"
"""The metadata entry of a joined file with everything except the weights, as JSON."""
ENCODED = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""Supported architecture -> the encoder's tensors of shape [features]."""
TRAINED = ("batchtopk", "matryoshka_batchtopk")
"""Training-only architectures of SAELens, whose features depend on the batch."""
MEASURED = ("layer_norm", "constant_norm_rescale")
"""Normalizations that divide each activation by a statistic of itself."""
SCALED = "expected_average_only_in"
"""The normalization that multiplies all activations by one constant."""
_BLOCK = re.compile(r"blocks\.([0-9]+|\{layer\})\.(?:hook_)?([A-Za-z0-9_.]+)")
_MODULE = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.([0-9]+)")
MAX_LABEL = 512
"""Most characters of a label."""
_LABELS = TypeAdapter(
    dict[
        Annotated[str, Field(pattern=r"^[0-9]+$")],
        Annotated[str, Field(min_length=1, max_length=MAX_LABEL)],
    ]
)
MAX_CONFIG_BYTES, MAX_TENSORS = 2**16, 64
OPENED = 4
"""Autoencoders kept open: a request may name many features, and reading labels takes long."""


refuse_sae = refuse_invalid("invalid_sae", "sparse autoencoder")


@refuse_sae
def join_sae(
    config: bytes,
    labels: bytes | None,
    place: Mapping[str, Any],
    weights: IO[bytes],
    write: Callable[[bytes], None],
) -> None:
    """Write the weights' safetensors file with the other parts in its metadata.

    `config`: SAELens' configuration; `labels`: JSON; `place`: the `layer` and `activation_scale`
    where the configuration lacks them. Errors: APIError `invalid_sae`.
    """
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"cfg.json has more than {MAX_CONFIG_BYTES} bytes")
    told = {} if labels is None else _read_labels(labels)
    document = {"config": json.loads(config), "labels": told, **place}
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    text.encode()  # JSON may contain half of a surrogate pair, which no answer can
    copy_with_metadata(weights, {SAE_KEY: text}, write)


def _read_labels(data: bytes) -> dict[str, str]:
    try:
        labels = _LABELS.validate_json(data)
    except ValidationError as error:
        raise ValueError(
            f"labels are no object of feature -> text of at most {MAX_LABEL} letters, such as "
            f'{{"123": "dogs"}}: {error.errors(include_url=False)[0]["msg"]}'
        ) from error
    return {str(int(feature)): label for feature, label in labels.items()}


class SaeConfig:
    """The settings in `cfg.json`, completed by the upload; SAELens 6 has some in `metadata`.

    Errors: ValueError.
    """

    def __init__(self, document: Any, layer: int | None, scale: float | None) -> None:
        if not isinstance(document, dict):
            raise ValueError("cfg.json is not a JSON object")
        self._document = document
        self.architecture = self._name_architecture()
        normalized = self.get("normalize_activations") or "none"
        self.normalization = SCALED if normalized is True else str(normalized)
        if self.normalization not in (known := ("none", SCALED, *MEASURED)):
            raise ValueError(
                f"cfg.json: normalize_activations {self.normalization[:80]!r} is not known; "
                f"{', '.join(known)} are"
            )
        self.has_centre = self.get("apply_b_dec_to_input") is not False
        self.scale = self._choose_scale(scale)
        self.layer, self.hook = self._choose_place(layer)

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is set, at the top level or in `metadata`."""
        metadata = self._document.get("metadata")
        for name in names:
            for part in (self._document, metadata if isinstance(metadata, dict) else {}):
                if part.get(name) is not None:
                    return part[name]
        return None

    def _name_architecture(self) -> str:
        name = str(self.get("architecture") or "standard")
        function = self.get("activation_fn", "activation_fn_str") or "relu"
        if name == "standard" and function == "topk":
            name = "topk"
        if name in TRAINED:
            raise ValueError(
                f"architecture {name} is what SAELens trains, whose features depend on the batch: "
                f"save it by save_inference_model; {', '.join(ENCODED)} are read"
            )
        if name != "topk" and function != "relu":
            name += f" with {function}"
        if name not in ENCODED:
            raise ValueError(
                f"cfg.json: architecture {name[:80]!r} is not known; {', '.join(ENCODED)} are read"
            )
        return name

    def _choose_scale(self, given: float | None) -> float:
        """Return the constant factor of activations."""
        if self.normalization == SCALED and given is None:
            raise ValueError(
                "cfg.json: activations are multiplied by a constant before this autoencoder, and "
                "the files do not have it: give --activation-scale (activation_scale), SAELens' "
                "norm_scaling_factor; 1 where it was folded in"
            )
        if self.normalization != SCALED and given is not None:
            raise ValueError(
                f"cfg.json: normalize_activations is {self.normalization}, so there is no "
                "activation scale: leave it out"
            )
        return 1.0 if given is None else given

    def _choose_place(self, layer: int | None) -> tuple[int, str]:
        """Return the layer and hook of the activations."""
        if self.get("hook_head_index", "hook_point_head_index") is not None:
            raise ValueError("cfg.json: it reads a single head, which no vector stands for")
        name = str(self.get("hook_name", "hook_point") or "")
        hook, own = RESID_POST, None
        if found := _BLOCK.fullmatch(name):
            hook = RESID_POST if found[2] == "out" else found[2]
            own = self.get("hook_layer", "hook_point_layer") if "{" in found[1] else int(found[1])
        elif found := _MODULE.fullmatch(name):
            own = int(found[1])
        chosen = own if layer is None else layer
        if type(chosen) is not int or not 0 <= chosen <= MAX_COUNT:
            told = f"hook_name {name[:80]!r} is not known" if name else "it names no hook"
            if chosen is not None:
                told = f"there is no layer {chosen!r:.40}"
            raise ValueError(
                f"cfg.json: {told}; give --layer (layer), the block whose output it reads"
            )
        if hook == "resid_pre" and chosen:
            # A block's input is the previous block's output.
            return chosen - 1, RESID_POST
        return chosen, hook


class SaeFile:
    """A joined file, read only where needed.

    Errors: ValueError or KeyError for any other file, or if its encoder is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        about = json.loads(self._file.metadata[SAE_KEY])
        self.config = SaeConfig(about["config"], about["layer"], about["activation_scale"])
        self.size, self.width = self._read_sizes()
        self.layer, self.hook = self.config.layer, self.config.hook
        self.encoder = self._describe_encoder()
        self.labels: Mapping[str, str] = about["labels"]

    def _read_sizes(self) -> tuple[int, int]:
        """Return the number of features and the width."""
        config, shape = self.config, list(self._file.view("W_dec").shape)
        if len(shape) != 2:
            raise ValueError(f"W_dec has shape {shape}, not [features, width]")
        size, width = shape
        expected = {"W_enc": [width, size], **({"b_dec": [width]} if config.has_centre else {})}
        expected |= {name: [size] for name in ENCODED[config.architecture]}
        for name, wanted in expected.items():
            if (found := list(self._file.view(name).shape)) != wanted:
                raise ValueError(
                    f"{name} has shape {found}, W_dec {shape}: they do not belong together"
                )
        for name, count in (("d_in", width), ("d_sae", size)):
            if config.get(name) not in (None, count):
                raise ValueError(
                    f"cfg.json has {name} {config.get(name)}, and W_dec has shape {shape}"
                )
        return size, width

    def _describe_encoder(self) -> SaeEncoder:
        config, name, k = self.config, self.config.architecture, None
        if name == "topk":
            given = config.get("k", "activation_fn_kwargs")
            k = given.get("k") if isinstance(given, dict) else given
            if type(k) is not int or not 1 <= k <= self.size:
                raise ValueError(f"cfg.json has k {k!r:.40}; topk takes 1 to {self.size}")
        return SaeEncoder(
            name,
            self.size,
            self.width,
            self._read,
            centres=config.has_centre,
            scale=config.scale,
            normalization=config.normalization,
            k=k,
            rescales=name == "topk" and bool(config.get("rescale_acts_by_decoder_norm")),
        )

    def _read(self, name: str, *index: Any) -> npt.NDArray[np.float32]:
        return self._file.read(name, *index).astype(np.float32, copy=False)

    def find(self, feature: int | str) -> int:
        """Return the id of a feature, given its id or label. Errors: APIError."""
        if isinstance(feature, int):
            if feature < self.size:
                return feature
            detail = f"There is no feature {feature}: this autoencoder has 0 to {self.size - 1}."
            raise api_error("invalid_request", detail, param="feature")
        found = [int(one) for one, label in self.labels.items() if label == feature]
        if len(found) == 1:
            return found[0]
        told = f"features {found} have" if found else "no feature has"
        detail = f"{told[0].upper()}{told[1:]} the label {feature!r}: give an id."
        raise api_error("invalid_request", detail, param="feature")

    @refuse_sae
    def read_vectors(self, feature: int, *, reads: bool) -> LayerVectors:
        """Return a feature's decoder row, or with `reads` its encoder column.

        The encoder column has a readout, which converts a projection to the feature's activation,
        if the architecture allows it. Errors: APIError `invalid_sae` for a feature of zeros, or of
        numbers beyond float32.
        """
        numbers_D: Any
        try:
            if not reads:
                numbers_D, readout = self._read_written(feature), None
            else:
                numbers_D = self._file.read("W_enc", slice(None), feature).astype(np.float64)
                readout = self._read_out(feature, numbers_D)
            readouts = {} if readout is None else {self.layer: readout}
            return LayerVectors({self.layer: numbers_D}, self.hook, readouts)
        except APIError as error:
            raise ValueError(f"feature {feature}: {error.detail}") from error
        except (OverflowError, ValueError) as error:
            raise ValueError(f"feature {feature}: its readout is beyond float32") from error

    def _read_written(self, feature: int) -> npt.NDArray[np.float64]:
        """Return the vector that a feature with activation 1 adds to the activations."""
        written_D = self._file.read("W_dec", feature).astype(np.float64)
        factor, tuned = 1 / self.config.scale, "finetuning_scaling_factor"
        if self.config.get(tuned) and tuned in self._file.entries:
            factor *= self._read_one(tuned, feature)
        return written_D * (factor / np.linalg.norm(written_D) if self.encoder.rescales else factor)

    def _read_out(self, feature: int, read_D: npt.NDArray[np.float64]) -> Readout | None:
        """Return the readout of a projection on `read_D`; None if it does not give activations."""
        config = self.config
        if config.architecture == "topk" or config.normalization in MEASURED:
            return None
        slope, centre, threshold = config.scale * float(np.linalg.norm(read_D)), 0.0, 0.0
        if config.has_centre:
            centre = math.fsum(self._file.read("b_dec").astype(np.float64) * read_D)
        if config.architecture == "gated":
            growth = math.exp(self._read_one("r_mag", feature))
            magnitude = self._read_one("b_mag", feature)
            # The gate opens where slope c - centre > -b_gate, with the slope before it grows.
            threshold = magnitude - growth * self._read_one("b_gate", feature)
            return Readout("relu", growth * slope, magnitude - growth * centre, max(threshold, 0.0))
        if config.architecture == "jumprelu":
            threshold = self._read_one("threshold", feature)
        return Readout(
            "relu", slope, self._read_one("b_enc", feature) - centre, max(threshold, 0.0)
        )

    def _read_one(self, name: str, feature: int) -> float:
        return float(self._file.read(name, feature))


@lru_cache(maxsize=OPENED)
def open_sae(path: Path) -> SaeFile:
    """Open a content's joined file, whose path contains its SHA-256."""
    return SaeFile(path)


@refuse_sae
def check_sae(path: Path) -> SaeFile:
    """Read all of a joined file, check it, and open it. Errors: APIError `invalid_sae`."""
    content = read_content(path)
    if len(content.shapes) > MAX_TENSORS:
        raise ValueError(f"it has {len(content.shapes)} tensors, at most {MAX_TENSORS} are read")
    sae = SaeFile(path)
    if far := [feature for feature in sae.labels if int(feature) >= sae.size]:
        raise ValueError(f"labels has feature {far[0]}, and there are 0 to {sae.size - 1}")
    return sae
