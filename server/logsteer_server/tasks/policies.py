"""The sampling fields of a request, as the policy of its jobs."""

from collections.abc import Sequence

from logsteer.errors import api_error
from logsteer.schemas.common import DrawOptions
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Adjustments, Policy
from logsteer_server.text.tokenizer import TextCodec, check_ids


def plan_policy(
    asked: DrawOptions, codec: TextCodec, info: EngineInfo, *, ignore_eos: bool = False
) -> Policy:
    """Return the policy that a request's fields describe.

    Errors: APIError `invalid_request` for an unknown token.
    """
    bias = tuple((int(token), value) for token, value in asked.logit_bias.items())
    allowed = None if asked.allowed_token_ids is None else tuple(asked.allowed_token_ids)
    named: dict[str, Sequence[int]] = {
        "logit_bias": [token for token, _ in bias],
        "allowed_token_ids": allowed or (),
        "stop_token_ids": asked.stop_token_ids,
    }
    for param, ids in named.items():
        check_ids(ids, info.vocab_size, param)
    end_ids = (*asked.stop_token_ids, *(() if ignore_eos else info.eos_ids))
    adjustments = Adjustments(
        repetition=asked.repetition_penalty,
        frequency=asked.frequency_penalty,
        presence=asked.presence_penalty,
        bias=bias,
        allowed=allowed,
        bad_words=_list_bad_words(asked.bad_words, codec),
        min_tokens=asked.min_tokens,
        end_ids=end_ids if asked.min_tokens else (),
    )
    changed = None if adjustments == Adjustments() else adjustments
    return Policy(asked.temperature, max(0, asked.top_k), asked.top_p, asked.min_p, changed)


def refuse_adjustments(policy: Policy) -> None:
    """Refuse a policy with adjustments, for tasks whose rows have no token history.

    Errors: APIError `invalid_request`.
    """
    if policy.adjustments is not None:
        detail = "Penalties, biases and bans of a policy are for /logprob and /diagnostics."
        raise api_error("invalid_request", detail, param="policy")


def _list_bad_words(words: Sequence[str], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Return each word's ids, and the ids with a leading space if they differ in the first token
    and are as many.
    """
    found = []
    for word in words:
        bare, spaced = map(tuple, codec.encode_ids([word.lstrip(), f" {word.lstrip()}"]))
        if not bare:
            detail = f"{word!r} in bad_words has no token; leave it out."
            raise api_error("invalid_request", detail, param="bad_words")
        found.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(found)
