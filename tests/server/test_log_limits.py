"""Messages that repeat are shown a few times, and counted."""

import logging

from logsteer_server.observation.logs import SHOWN, WINDOW_S, RepeatFilter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def record(text: str, *args: object, logger: str = "uvicorn.error") -> logging.LogRecord:
    return logging.LogRecord(logger, logging.WARNING, "file", 1, text, args, None)


def test_a_flood_of_one_message_is_shown_a_few_times_and_counted() -> None:
    clock = Clock()
    repeats = RepeatFilter(clock)
    shown = [repeats.filter(record("bad request from %s", n)) for n in range(500)]
    assert shown == [True] * SHOWN + [False] * (500 - SHOWN)
    assert repeats.filter(record("another message")), "others are not left out with it"
    assert repeats.filter(record("bad request from %s", 1, logger="other"))
    clock.now += WINDOW_S
    later = record("bad request from %s", 7)
    assert repeats.filter(later)
    assert later.getMessage() == f"bad request from 7 ({500 - SHOWN} more like this were left out)"
    again = record("bad request from %s", 8)
    assert repeats.filter(again)
    assert again.getMessage() == "bad request from 8"
