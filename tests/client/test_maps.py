"""Maps of layers by tokens: what lens and patch answers show in tables, a terminal and plots."""

from typing import Any

import pytest
from rich.console import Console

from logsteer.cli.scoring import draw_map
from logsteer.errors import LogsteerError
from logsteer.extras.labels import map_lens, map_patch
from logsteer.schemas import LensAnswer, PatchAnswer
from tests.client.documents import ANSWER

LOGPROBS = {"0": [-2.0, None], "3": [-0.5, -1.0]}
TARGET: dict[str, Any] = {
    "target": " Paris now", "token_ids": [7, 8], "tokens": [" Paris", " now"], "boundary": "exact",
    "layers": {
        layer: {
            "logprob": None, "logprobs": values,
            "top": {"token_ids": [[7], [9]], "tokens": [[" Paris"], [f"top{layer}"]],
                    "logprobs": [[-0.1], [-0.2]]},
        }
        for layer, values in LOGPROBS.items()
    },
}  # fmt: skip
LENS = LensAnswer.model_validate({**ANSWER, "results": [{"targets": [TARGET]}]})


def patch_answer(direction: str) -> PatchAnswer:
    result = {
        "clean": -1.0, "corrupted": -5.0, "layers": [[0, 1, 2], [4]], "positions": [2, 5],
        "tokens": [" Spain", " is"], "matrix": [[-2.0, -5.0], [None, -6.0]],
        "boundary": "exact",
    }  # fmt: skip
    about = {"hook": "resid_post", "metric": "logprob", "direction": direction}
    return PatchAnswer.model_validate({**ANSWER, **about, "results": [result]})


@pytest.mark.parametrize(
    ("direction", "changes"),
    [("denoise", [[3.0, 0.0], [None, -1.0]]), ("noise", [[-1.0, -4.0], [None, -5.0]])],
)
def test_a_patch_is_compared_with_the_run_that_it_is_put_into(direction: str, changes: Any) -> None:
    found = map_patch(patch_answer(direction))
    assert found.values == changes
    assert found.layers == ["0-2", "4"]
    assert ("into the corrupted" if direction == "denoise" else "into the clean") in found.title


def test_every_cell_is_a_row() -> None:
    rows = LENS.to_pandas().to_dict("records")
    assert [(row["layer"], row["token"], row["predicted"]) for row in rows] == [
        (0, " Paris", " Paris"), (0, " now", "top0"), (3, " Paris", " Paris"), (3, " now", "top3"),
    ]  # fmt: skip
    assert [row["logprob"] for row in rows if row["logprob"] < 0] == [-2.0, -0.5, -1.0]
    cells = patch_answer("noise").to_pandas()
    assert cells["layers"].tolist() == ["0-2", "0-2", "4", "4"]
    assert cells["position"].tolist() == [2, 5, 2, 5]
    assert cells["value"].tolist()[:2] == [-2.0, -5.0]


def test_a_terminal_has_the_first_layer_at_the_bottom() -> None:
    console = Console(width=100, record=True, file=None)
    with console.capture() as printed:
        for part in draw_map(map_lens(LENS.results[0].targets[0])):
            console.print(part)
    lines = [line for line in printed.get().splitlines() if "'" in line][1:]
    assert "0.61" in lines[0]  # exp(-0.5), of layer 3
    assert lines[0].split()[0] == "3"
    assert "0.14" in lines[1]
    assert "'top0' -" in lines[1]


def test_plots_have_an_axis_of_layers_and_one_of_tokens() -> None:
    pytest.importorskip("matplotlib")
    for answer, tokens in ((LENS, [" Paris", " now"]), (patch_answer("noise"), [" Spain", " is"])):
        axes = answer.plot().axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == tokens
        assert axes.get_ylabel() == "layer"
    several = LENS.model_copy(update={"results": [*LENS.results, *LENS.results]})
    with pytest.raises(LogsteerError, match="draw one of the 2 targets"):
        several.plot()
