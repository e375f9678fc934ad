"""Every endpoint that scores says the same of a changed model."""

from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import Client
from logsteer.schemas import PerplexityAnswer

TEXT = "Once upon a time there was a little girl who had a red ball and a dog."
SUM = 1e-3
PER_TOKEN = 1e-4


def check_agreement(client: Client, **changes: Any) -> None:
    """The text's tokens after the first have one probability, whoever is asked.

    Of the scores at scale 0 and unsteered, too, where the changes are no steering.
    """
    ids = client.tokenize([TEXT]).results[0].token_ids
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    found = client.logprob([item], **changes)
    target = found.results[0].targets[0]
    assert np.abs(target.logprob - client.logprob([item]).results[0].targets[0].logprob) > 10 * SUM

    answer = client.perplexity(TEXT, **changes)
    assert answer.total.sum_logprob == pytest.approx(target.logprob, abs=SUM)
    *_, last = client.perplexity_stream([TEXT.encode()], **changes)
    assert isinstance(last, PerplexityAnswer)
    assert last.total.sum_logprob == pytest.approx(target.logprob, abs=SUM)
    for told in (answer, last):
        assert (told.override, told.adapter) == (found.override, found.adapter)
        assert (told.steering is None) == ("steering" not in changes)

    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0, "model": found.model}
    body |= changes
    echo = httpx.post(f"{client.base_url}/v1/completions", json=body, timeout=300).json()
    assert echo["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        target.logprobs, abs=PER_TOKEN
    )
    assert changes.keys() <= echo.keys()


def check_sweep(client: Client, steering: dict[str, Any], **changes: Any) -> None:
    """A sweep starts from the changed model, and steers that."""
    ids = client.tokenize([TEXT]).results[0].token_ids
    item = {"context_ids": ids[:5], "target_ids": [ids[5:]]}
    sweep = client.sweep(steering, [0.0, 1.0], items=[item], texts=[TEXT], **changes)
    plain, steered = (
        client.logprob([item], **changes, **more).results[0].targets[0].logprob
        for more in ({}, {"steering": steering})
    )
    for point, wanted in ((sweep.unsteered, plain), (sweep.points[0], plain)):
        assert point.items[0].targets[0].logprob == pytest.approx(wanted, abs=SUM)
        assert point.items[0].kl == pytest.approx(0, abs=1e-5)
    assert sweep.points[1].items[0].targets[0].logprob == pytest.approx(steered, abs=SUM)
    assert sweep.points[1].items[0].kl > 1e-6
    whole = client.perplexity(TEXT, **changes)
    assert sweep.unsteered.texts[0].sum_logprob == pytest.approx(whole.total.sum_logprob, abs=SUM)
    assert (sweep.override, sweep.adapter) == (whole.override, whole.adapter)
