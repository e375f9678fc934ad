"""The parser of server-sent events."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logsteer._events import EventParser, ServerSentEvent


def parse(*chunks: bytes) -> list[ServerSentEvent]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: a\n\n", [("message", "a")]),
        ("event: x\ndata: a\ndata: b\n\n", [("x", "a\nb")]),
        ("event:x\ndata:a\n\n", [("x", "a")]),
        ("data:  two spaces\n\n", [("message", " two spaces")]),
        ("data\n\n", [("message", "")]),
        ("data: a: b\n\n", [("message", "a: b")]),
        (": keep-alive\n\ndata: a\n: in between\n\n", [("message", "a")]),
        ("event: lost\n\ndata: a\n\n", [("message", "a")]),
        ("id: 1\nretry: 5\nother: x\ndata: a\n\n", [("message", "a")]),
        ("data: a\r\rdata: b\r\n\r\n", [("message", "a"), ("message", "b")]),
        ("\ufeffdata: a\n\n", [("message", "a")]),
        ("data: a\u2028b\x0bc\n\n", [("message", "a\u2028b\x0bc")]),
        ("data: a\n\ndata: cut", [("message", "a")]),
        ("data: a\n\ndata: cut\n", [("message", "a")]),
        ("\n\n\n", []),
    ],
)
def test_the_format(text: str, expected: list[tuple[str, str]]) -> None:
    assert parse(text.encode()) == [ServerSentEvent(*event) for event in expected]


def test_wrong_utf8_is_replaced() -> None:
    assert parse(b"data: \xff\n\n") == [ServerSentEvent("message", "\ufffd")]


def test_an_event_comes_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r\n\r") == [ServerSentEvent("message", "a")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\n\n") == [ServerSentEvent("message", "b")]


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)
NAMES = st.from_regex(re.compile(r"[a-z]{1,6}"), fullmatch=True)
EVENTS = st.lists(st.tuples(NAMES, st.lists(LINES, min_size=1, max_size=3)), max_size=4)


@given(EVENTS, st.sampled_from(["\n", "\r", "\r\n"]), st.data())
@example([("é", ["ü", "\U0001f600"])], "\r\n", None)
def test_any_cut_gives_the_same_events(
    events: list[tuple[str, list[str]]], end: str, data: st.DataObject | None
) -> None:
    body = "".join(
        f": comment{end}event: {name}{end}{''.join(f'data: {line}{end}' for line in lines)}{end}"
        for name, lines in events
    ).encode()
    if data is None:
        cuts = list(range(len(body) + 1))
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    bounds = [0, *cuts, len(body)]
    chunks = [body[start:stop] for start, stop in pairwise(bounds)]
    expected = [ServerSentEvent(name, "\n".join(lines)) for name, lines in events]
    assert parse(*chunks) == expected
