"""Sparse autoencoders: SAELens' two files, and labels of the features, stored as one.

The client's `extras/sae.py` says what SAELens' configuration means and which of them are refused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import APIError, LogsteerError, api_error
from logsteer.extras.sae import SaeConfig, extract_feature, read_sizes
from logsteer.extras.tensors import FLOATS, TensorFile
from logsteer.schemas.common import MAX_COUNT
from logsteer_server.numerics.sae import SaeEncoder
from logsteer_server.stores.formats.tensor_file import (
    TensorFileError,
    copy_with_metadata,
    read_content,
)
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content

SAE_KEY = "logsteer.sae"
"""The entry of a joined file's metadata that has all but the weights: JSON."""
CONFIG = Path("cfg.json")
"""What messages call the configuration."""
ENCODED = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""Architectures whose encoders are known -> their tensors [features]."""
MAX_LABEL = 512
"""Characters of a label."""
MAX_CONFIG_BYTES, MAX_TENSORS = 2**16, 64
OPENED = 4
"""Autoencoders that stay open: a request may name many features, and labels take long to read."""


def invalid_sae(detail: str) -> APIError:
    """Return the error for an autoencoder that cannot be used."""
    return api_error("invalid_sae", f"The sparse autoencoder is invalid: {detail.rstrip('.')}.")


@dataclass(frozen=True, slots=True)
class SaeUpload:
    """What comes with weights: SAELens' configuration, labels as JSON, what they leave open."""

    config: bytes
    labels: bytes | None = None
    layer: int | None = None
    activation_scale: float | None = None


def join_sae(about: SaeUpload, weights: IO[bytes], write: Callable[[bytes], None]) -> None:
    """Write the weights' safetensors file with all else in its metadata.

    Errors: APIError `invalid_sae`.
    """
    if len(about.config) > MAX_CONFIG_BYTES:
        raise invalid_sae(f"cfg.json has more than {MAX_CONFIG_BYTES} bytes")
    try:
        document: dict[str, Any] = {"config": json.loads(about.config)}
        document["labels"] = {} if about.labels is None else _read_labels(about.labels)
        document |= {"layer": about.layer, "activation_scale": about.activation_scale}
        text = json.dumps(document, sort_keys=True, ensure_ascii=False)
        text.encode()  # half of a surrogate pair is JSON, and no answer could show it
        copy_with_metadata(weights, {SAE_KEY: text}, write)
    except TensorFileError as error:
        raise invalid_sae(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise invalid_sae(f"its JSON cannot be read: {error}") from error


def _read_labels(data: bytes) -> dict[str, str]:
    labels = json.loads(data)
    if not isinstance(labels, dict):
        raise invalid_sae('labels are no object of feature -> text, such as {"123": "dogs"}')
    for feature, label in labels.items():
        if not feature.isdecimal() or not isinstance(label, str) or not label:
            raise invalid_sae(f"labels has {feature[:80]!r}: {str(label)[:80]!r}; give id -> text")
        if len(label) > MAX_LABEL:
            raise invalid_sae(f"the label of feature {feature} has more than {MAX_LABEL} letters")
    return {str(int(feature)): label for feature, label in labels.items()}


class SaeFile:
    """A joined file, of which only the requested parts are read.

    Errors: APIError `invalid_sae` for any other file, or if its encoder is not known.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tensors = TensorFile(np.memmap(path, mode="r"))
            about = json.loads(self._tensors.metadata[SAE_KEY])
            self.config = config = SaeConfig.parse(json.dumps(about["config"]), CONFIG)
            self.layer, self.hook = self._place = config.choose_place(about["layer"])
            if self.layer > MAX_COUNT:
                raise invalid_sae(f"there is no layer {self.layer}"[:80])
            self._scale = config.choose_scale(about["activation_scale"])
            self.size, self.width = read_sizes(self._tensors, config)
            self.encoder = self._describe_encoder()
        except (LogsteerError, ValueError, KeyError, RecursionError) as error:
            if isinstance(error, APIError):
                raise
            raise invalid_sae(str(error)) from error
        self.labels: Mapping[str, str] = about["labels"]

    def _describe_encoder(self) -> SaeEncoder:
        config, name = self.config, self.config.architecture
        if name not in ENCODED:
            raise invalid_sae(
                f"architecture {name} is what SAELens trains, whose features depend on the batch: "
                f"save it by save_inference_model; {', '.join(ENCODED)} are read"
            )
        for tensor in ENCODED[name]:
            if (shape := list(self._tensors.read(tensor, FLOATS).shape)) != [self.size]:
                raise invalid_sae(f"{tensor} has shape {shape}, and there are {self.size} features")
        k = None
        if name == "topk":
            given = config.get("k", "activation_fn_kwargs")
            k = given.get("k") if isinstance(given, dict) else given
            if type(k) is not int or not 1 <= k <= self.size:
                raise invalid_sae(f"cfg.json has k {k!r:.40}; topk takes 1 to {self.size}")
        return SaeEncoder(
            name,
            self.size,
            self.width,
            self._read,
            centres=config.has_centre,
            scale=self._scale,
            normalization=config.normalization,
            k=k,
            rescales=name == "topk" and bool(config.get("rescale_acts_by_decoder_norm")),
        )

    def _read(self, name: str, *index: Any) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = self._tensors.read(name, FLOATS, *index)
        return found.astype(np.float32, copy=False)

    def find(self, feature: int | str) -> int:
        """Return the id of a feature, given as an id or a label. Errors: APIError."""
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

    def read_vectors(self, feature: int, *, reads: bool) -> LayerVectors:
        """Return what a feature writes, its decoder row, or what its encoder `reads`.

        What it reads has a readout, which makes its activation of a projection, where there is one.
        Errors: APIError `invalid_sae` for a feature of zeros.
        """
        try:
            found = extract_feature(self._tensors, self.config, feature, self._place, self._scale)
        except (LogsteerError, ValueError) as error:
            raise invalid_sae(str(error)) from error
        return parse_content(found.probe if reads else found.vector)


@lru_cache(maxsize=OPENED)
def open_sae(path: Path) -> SaeFile:
    """Return what the joined file of a content holds, whose SHA-256 its path names."""
    return SaeFile(path)


def check_sae(path: Path) -> SaeFile:
    """Return what a joined file holds, all of it read. Errors: APIError `invalid_sae`."""
    try:
        content = read_content(path)
    except TensorFileError as error:
        raise invalid_sae(str(error)) from error
    if len(content.shapes) > MAX_TENSORS:
        raise invalid_sae(f"it has {len(content.shapes)} tensors, at most {MAX_TENSORS} are read")
    sae = SaeFile(path)
    if far := [feature for feature in sae.labels if int(feature) >= sae.size]:
        raise invalid_sae(f"labels has feature {far[0]}, and there are 0 to {sae.size - 1}")
    return sae
