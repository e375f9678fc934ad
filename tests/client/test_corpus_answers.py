"""Answers as lines: what is written is what was answered."""

import json
from pathlib import Path

import pytest

import logsteer
from logsteer.corpus.answers import read_answer
from logsteer.errors import AnswerError

from .corpus_server import CorpusServer, answer, encode


def test_what_is_no_whole_answer_is_refused() -> None:
    _, document = answer("/logprob", {"items": [{"context": "a", "targets": ["b"]}] * 3})
    whole = encode(document)
    assert read_answer(whole, 3) == document
    for size in range(0, len(whole), 7):
        with pytest.raises(AnswerError):
            read_answer(whole[:size], 3)
    with pytest.raises(AnswerError, match="2 rows, 3 results"):
        read_answer(whole, 2)


def test_answers_in_another_style_give_the_same_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"context": f'{n} "}},{{"', "targets": ['"},{"targets":[\n', "\\"]} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name, style in (("plain", {}), ("spaced", {"separators": None, "ensure_ascii": True})):
        target = tmp_path / f"{name}.jsonl"
        logsteer.score_file(source, target, transport=CorpusServer(**style))
        found.append(target.read_bytes())
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 40
