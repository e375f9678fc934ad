"""For each alert: series over which it fires, series over which it must not, and its labels.

Values are promtool's: `0+5x20` is 0, 5, 10 … one a minute, `1x9` ten times 1.
"""

from dataclasses import dataclass

ENGINE = 'model="m",replica="0"'
SLOTS = {"steering": "logsteer_steering_slots", "adapter": "logsteer_adapter_slots"}
Series = dict[str, str]


@dataclass(frozen=True)
class AlertCase:
    """An alert at a minute at which it fires over some series and does not over others."""

    fires: Series
    quiet: Series
    minute: int
    labels: dict[str, str]


def pair(upper: str, lower: str, labels: str = "") -> tuple[str, str]:
    """Two series with the same labels."""
    return f"{upper}{{{labels}}}", f"{lower}{{{labels}}}"


def slots(kind: str) -> AlertCase:
    used, size = pair(f"{SLOTS[kind]}_used", SLOTS[kind], ENGINE)
    waits = f"logsteer_engine_sequences_waiting{{{ENGINE}}}"
    return AlertCase(
        {used: "4x20", size: "4x20", waits: "1x20"},
        {used: "3x20", size: "4x20", waits: "1x20"},
        10,
        {"model": "m", "replica": "0"},
    )


def errors(code: str, count: int) -> Series:
    path = 'path="/logprob"'
    return {
        f'logsteer_errors_total{{{path},code="{code}"}}': f"0+{count}x40",
        f'logsteer_requests_total{{{path},status="200"}}': "0+100x40",
    }


def queue(below: int) -> Series:
    name = "logsteer_queue_seconds_bucket"
    return {
        f'{name}{{model="m",le="30"}}': f"0+{below}x40",
        f'{name}{{model="m",le="60"}}': "0+100x40",
        f'{name}{{model="m",le="+Inf"}}': "0+100x40",
    }


def share(upper: str, lower: str, high: int, low: int, labels: str = "") -> tuple[Series, Series]:
    above, below = pair(upper, lower, labels)
    return {above: f"{high}x40", below: "100x40"}, {above: f"{low}x40", below: "100x40"}


def stuck(steps: str) -> Series:
    return {
        f"logsteer_engine_sequences_running{{{ENGINE}}}": "1x40",
        f"logsteer_engine_sequences_waiting{{{ENGINE}}}": "0x40",
        f"logsteer_engine_step_seconds_count{{{ENGINE}}}": steps,
    }


def blocks(used: int, waiting: int) -> Series:
    return {
        f"logsteer_kv_cache_blocks_used{{{ENGINE}}}": f"{used}x40",
        f"logsteer_kv_cache_blocks{{{ENGINE}}}": "100x40",
        f"logsteer_engine_sequences_waiting{{{ENGINE}}}": f"{waiting}x40",
    }


def preempted(times: int) -> Series:
    return {
        f"logsteer_engine_preemptions_total{{{ENGINE}}}": f"0+{times}x40",
        'logsteer_generated_tokens_total{model="m"}': "0+1000x40",
    }


def store(used: int) -> Series:
    return {
        'logsteer_store_bytes{instance="a",kind="vectors",owner="shared"}': f"{used}x40",
        'logsteer_store_bytes{instance="a",kind="vectors",owner="keys"}': "99x40",
        'logsteer_store_limit_bytes{instance="a",kind="vectors"}': "100x40",
    }


UP = 'up{job="logsteer",instance="a"}'
READY = 'logsteer_model_ready{model="m"}'
RESTARTS = f"logsteer_engine_restarts_total{{{ENGINE}}}"
BEAT = f"logsteer_engine_heartbeat_age_seconds{{{ENGINE}}}"
OF_ENGINE = {"model": "m", "replica": "0"}

CASES = {
    "LogsteerDown": AlertCase({UP: "0x9"}, {UP: "1x9"}, 5, {"job": "logsteer", "instance": "a"}),
    "LogsteerModelNotReady": AlertCase(
        {READY: "0x30"}, {READY: "0x10 1 0x19"}, 20, {"model": "m"}
    ),
    "LogsteerEngineRestarts": AlertCase(
        {RESTARTS: "0 1 2 3 4x20"}, {RESTARTS: "0 1 2x20"}, 10, OF_ENGINE
    ),
    "LogsteerHeartbeatLate": AlertCase({BEAT: "12x9"}, {BEAT: "9x9"}, 5, OF_ENGINE),
    "LogsteerEngineStuck": AlertCase(stuck("7x40"), stuck("0+1x40"), 20, OF_ENGINE),
    "LogsteerFaults": AlertCase(
        errors("internal", 3), errors("internal", 1) | errors("invalid_request", 50), 20,
        {"path": "/logprob"},
    ),
    "LogsteerRefusesWork": AlertCase(errors("overloaded", 6), errors("overloaded", 4), 30, {}),
    "LogsteerQueueLong": AlertCase(queue(80), queue(95), 30, {"model": "m"}),
    "LogsteerTokenBudgetFull": AlertCase(
        *share("logsteer_pending_tokens", "logsteer_pending_tokens_limit", 95, 85, 'model="m"'),
        20, {"model": "m"},
    ),
    "LogsteerMemoryBudgetFull": AlertCase(
        *share("logsteer_pending_bytes", "logsteer_pending_bytes_limit", 95, 85), 20, {}
    ),
    "LogsteerCacheBlocksShort": AlertCase(blocks(97, 1), blocks(97, 0), 20, OF_ENGINE),
    "LogsteerPreempts": AlertCase(preempted(12), preempted(8), 30, {"model": "m"}),
    "LogsteerSteeringSlotsShort": slots("steering"),
    "LogsteerAdapterSlotsShort": slots("adapter"),
    "LogsteerStoreFull": AlertCase(store(95), store(85), 30, {"instance": "a", "kind": "vectors"}),
    "LogsteerDiskFull": AlertCase(
        *share("logsteer_store_disk_free_bytes", "logsteer_store_disk_bytes", 4, 6), 30, {}
    ),
    "LogsteerDescriptorsShort": AlertCase(
        *share("process_open_fds", "process_max_fds", 85, 75, 'job="logsteer"'), 20,
        {"job": "logsteer"},
    ),
}  # fmt: skip
