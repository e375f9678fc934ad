"""docs/engines.md, held against what the engines do."""

from typing import Any

import pytest

from logsteer import Client
from logsteer.errors import APIError
from tests.conftest import ROOT
from tests.contract.conftest import REAL
from tests.contract.steering import DATA

ITEMS: Any = [{"context": "Once upon a time", "targets": [" there was"]}]
SHORT_NAMES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
NOBODY: dict[str, Any] = {"override": {"name": "nobody", "eta": 0.5}, "adapter": "nobody"}


def read_table() -> dict[str, list[str]]:
    """First cell of each row -> what it says of vLLM and of TransformerLens."""
    lines = (ROOT / "docs" / "engines.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "|" in line
    ]
    return {row[0].strip("| "): row[1:] for row in rows if len(row) == 3}


TABLE = read_table()


def cell_of(client: Client, beginning: str) -> str:
    engine = client.models().models[0].engine
    (cells,) = (cells for name, cells in TABLE.items() if name.startswith(beginning))
    return cells[("vllm", "transformer_lens").index(engine)]


def find_code(client: Client, **options: Any) -> str | None:
    """The code of the error that a request gives; None where it is answered."""
    try:
        client.logprob(ITEMS, model="demo", **options)
    except APIError as error:
        return error.code
    return None


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_features_are_those_of_the_table(client: Client) -> None:
    for feature in ("override", "adapter"):
        code = find_code(client, **{feature: NOBODY[feature]})
        # Both shared servers are without adapter_slots.
        has = cell_of(client, f"`{feature}`").startswith("yes")
        assert code == (f"unknown_{feature}" if has else "unsupported_by_engine"), feature
    for feature, options in (
        ("`steering`", {"steering": {"vectors": [DATA]}}),
        ("`probes`", {"probes": [DATA]}),
        ("`probes`", {"steering": {"vectors": [DATA | {"when": {"probe": DATA, "above": 0.0}}]}}),
    ):
        assert (find_code(client, **options) is None) == cell_of(client, feature).startswith("yes")
    try:
        client.gradient(ITEMS, wrt={"layers": [1]}, model="demo")
        has_gradients = True
    except APIError as error:
        assert error.code == "unsupported_by_engine"
        has_gradients = False
    assert has_gradients == (cell_of(client, "`gradient`") == "yes")


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_hooks_are_those_of_the_table(client: Client) -> None:
    cell = cell_of(client, "hooks")
    for hook in SHORT_NAMES:
        code = find_code(client, steering={"vectors": [DATA | {"hook": hook}]})
        assert (code is None) == (f"`{hook}`" in cell), (hook, code)
        is_renamed = hook == "resid_pre" and "in steering also" in cell
        probed = "unsupported_by_engine" if is_renamed else code
        assert find_code(client, probes=[DATA | {"hook": hook}]) == probed
    bridge = find_code(client, steering={"vectors": [DATA | {"hook": "ln1.hook_out"}]})
    assert (bridge is None) == ("every hook of the bridge" in cell)


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_prefixes_are_shared_as_the_table_says(client: Client) -> None:
    context = " ".join(f"A story of dog number {n} and its hat." for n in range(20))
    targets = [" It was red and", " It was blue and", " It was green and"]
    answer = client.logprob([{"context": context, "targets": targets}], model="demo")
    assert (answer.usage.cached_tokens > 0) == (cell_of(client, "a prefix") == "yes")
