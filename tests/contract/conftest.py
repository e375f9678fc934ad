"""The services that the contract suite runs on: every engine, through HTTP, with one client.

And TransformerLens in this process, started once for all tests of the engine itself. It is imported
where it is used: whoever runs a file of requests does not wait for torch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from logsteer import Client
from tests.conftest import DEMO_MODEL

REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("vllm", "tlens")]
PROMPT = "Once upon a time"


def clients_of(*engines: Any) -> Any:
    """Make the fixture of a client of a server with each of these engines in turn.

    Its default model has the demo's tokenizer.
    """

    @pytest.fixture(params=engines)
    def client(request: pytest.FixtureRequest) -> Client:
        return request.getfixturevalue(f"{request.param}_client")

    return client


client = clients_of("fake", *REAL)


@pytest.fixture
def model(client: Client) -> str:
    """The id of the server's first model."""
    return client.models().models[0].id


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """TransformerLens with the demo model in float32."""
    from tests.contract.tlens_cases import build

    found = build()
    yield found
    assert not found.busy
    found.close()


@pytest.fixture(scope="session")
def reference() -> Any:
    """The demo model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hooked() -> Any:
    """The demo model in transformers, whose activations a test may read and change."""
    from tests.contract.steering import HookedReference

    return HookedReference(DEMO_MODEL)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo model's tokenizer in transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="session")
def prompt(tokenizer: Any) -> np.ndarray:
    """A short prompt's token ids."""
    return np.array(tokenizer(PROMPT)["input_ids"], dtype=np.int32)


@pytest.fixture(scope="session")
def tensors() -> dict[str, Any]:
    """A direction in the demo model's parameters, by their names."""
    from tests.contract.directions import draw_direction, load_model

    return draw_direction(load_model(DEMO_MODEL))


@pytest.fixture(scope="session")
def direction(tensors: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same direction as a stored file."""
    from tests.contract.directions import write_direction

    return write_direction(tmp_path_factory.mktemp("directions"), tensors)
