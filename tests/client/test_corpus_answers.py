"""Answers that are cut into lines without being read: what is written is what was answered."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logsteer
from logsteer.corpus.answers import cut_answer, read_answer
from logsteer.corpus.form import KINDS
from logsteer.errors import AnswerError

from .corpus_server import CorpusServer, answer, encode

texts = st.text(st.sampled_from('{}[],:"\\ab\n\u2028é'), max_size=12)
values = st.recursive(
    texts | st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=8,
)
results = st.fixed_dictionaries({"a": values}, optional={"b": values, "c": values}).map(
    lambda found: {"a": found["a"], **found}  # in this order, as results of one kind are
)


@given(st.lists(results, min_size=1, max_size=4), st.fixed_dictionaries({"b": values, "x": values}))
def test_each_result_is_what_stands_in_the_answer(
    found: list[dict[str, Any]], rest: dict[str, Any]
) -> None:
    document = {"results": found, **rest, "usage": {"prompt_tokens": 1}}
    for style in ({}, {"separators": None}, {"indent": 1}):
        own, lines = read_answer(encode(document, **style), len(found))
        assert [json.loads(line) for line in lines] == found
        assert {**own, "results": found} == document
        assert not any(b"\n" in line for line in lines)


@pytest.mark.parametrize("endpoint", KINDS)
def test_results_begin_with_a_field_that_all_of_them_have(endpoint: str) -> None:
    """What tells `cut_answer` where one begins."""
    first = next(iter(KINDS[endpoint].result.model_fields.values()))
    assert first.is_required()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_answers_of_a_server_are_not_read_as_a_whole(count: int) -> None:
    items = [{"context": '"},{"targets":[', "targets": ['},{"targets":[', "é\\"]}] * count
    _, document = answer("/logprob", {"items": items})
    cut = cut_answer(encode(document), count)
    assert cut is not None
    head, lines = cut
    assert lines == [encode(result) for result in document["results"]]
    assert {**head, "results": document["results"]} == document
    assert len(head["results"]) == 1
    assert cut_answer(encode(document), count + 1) is None


def test_what_is_no_whole_answer_is_refused() -> None:
    _, document = answer("/logprob", {"items": [{"context": "a", "targets": ["b"]}] * 3})
    whole = encode(document)
    for size in range(len(whole)):
        with pytest.raises(AnswerError):
            read_answer(whole[:size], 3)
    with pytest.raises(AnswerError, match="2 rows, 3 results"):
        read_answer(whole, 2)


def test_answers_in_another_style_give_the_same_rows(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"context": f'{n} "}},{{"', "targets": ['"},{"targets":[\n', "\\"]} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name, style in (("plain", {}), ("spaced", {"separators": None, "ensure_ascii": True})):
        target = tmp_path / f"{name}.jsonl"
        logsteer.score_file(source, target, transport=CorpusServer(**style))
        found.append([json.loads(line) for line in target.read_text().splitlines()])
    assert found[0] == found[1]
    assert len(found[0]) == 40
