"""A small model's description and a source without vectors, for tests of steering."""

from logsteer.errors import api_error
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.stores.vectors import StoredVectors

INFO = EngineInfo(
    engine="fake",
    engine_version="0",
    model_path="none",
    tokenizer_path="none",
    weights_digest="none",
    dtype="float32",
    logits_dtype="float32",
    quantization=None,
    tensor_parallel=1,
    pipeline_parallel=1,
    batch_invariant=True,
    context_length=128,
    vocab_size=100,
    columns=("logprob",),
    eos_ids=(2,),
    num_layers=4,
    hidden_size=24,
    hooks=("resid_post",),
)


class NoVectors:
    """A source in which nothing is kept."""

    def find(self, name: str) -> StoredVectors:
        """Never anything. Errors: APIError `unknown_vector`."""
        raise api_error("unknown_vector", f"No vector is named {name!r}.")

    def find_content(self, sha256: str) -> StoredVectors:
        """Never anything. Errors: APIError `unknown_vector`."""
        raise api_error("unknown_vector", f"No vector has the content {sha256}.")

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Never anything. Errors: APIError `unknown_sae`."""
        raise api_error("unknown_sae", f"No sae is named {name!r}.")
