"""What engines are set up with: the context that they read."""

from types import SimpleNamespace
from typing import Any

import pytest

from logsteer_server.engines.vllm.config import fit_context_length
from logsteer_server.engines.weights import limit_context

FACTORS = {"short_factor": [1.0, 1.1], "long_factor": [1.0, 4.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}


LLAMA_4 = {"model_type": "llama4_text", "floor_scale": 8192}


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=256, **fields)


class TestContext:
    @pytest.mark.parametrize(("limit", "wanted"), [(None, 256), (100, 100), (300, 256)])
    def test_a_limit_lowers_what_the_config_says(self, limit: int | None, wanted: int) -> None:
        assert limit_context("p", config(), limit, 1) == wanted

    def test_a_model_that_names_no_length_needs_a_limit(self) -> None:
        assert limit_context("p", SimpleNamespace(), 9) == 9
        with pytest.raises(ValueError, match="set max_model_len"):
            limit_context("p", SimpleNamespace(), None)

    @pytest.mark.parametrize(
        "text",
        [
            config(rope_parameters=LONGROPE),
            config(rope_parameters={"full_attention": LONGROPE, "other": {"rope_type": "default"}}),
            config(
                rope_parameters={"rope_type": "longrope", **FACTORS},
                original_max_position_embeddings=64,
            ),
        ],
    )
    def test_longrope_keeps_its_short_factors(self, text: Any) -> None:
        assert [limit_context("p", text, None, unread) for unread in (0, 1)] == [64, 63]
        assert limit_context("p", text, 63, 1) == 63
        assert limit_context("p", text, 20, 1) == 20
        for limit, unread in ((64, 1), (65, 0), (256, 1)):
            with pytest.raises(
                ValueError, match=f"{limit} would have .* set at most {64 - unread}"
            ):
                limit_context("p", text, limit, unread)

    @pytest.mark.parametrize(
        ("tuned", "limit", "fits"),
        [
            (True, 8191, True), (True, 8192, False), (True, 32_767, False), (True, 32_768, True),
            (False, 32_767, True), (False, 32_768, False),
        ],
    )  # fmt: skip
    def test_a_llama_4_is_scaled_as_it_says(self, tuned: bool, limit: int, fits: bool) -> None:
        text = config(**LLAMA_4, attn_temperature_tuning=tuned)
        text.max_position_embeddings = 10**6
        if fits:
            assert fit_context_length("p", text, limit) == limit
        else:
            with pytest.raises(ValueError, match="less than 8192"):
                fit_context_length("p", text, limit)

    @pytest.mark.parametrize(
        "rope",
        [
            LONGROPE | {"short_factor": [1.0, 4.0]},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            None,
        ],
    )
    def test_other_models_read_all_that_they_name(self, rope: Any) -> None:
        assert limit_context("p", config(rope_parameters=rope), None, 1) == 256
