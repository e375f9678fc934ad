"""Every metric and every field of a log line: its name, and what it means.

`/metrics` and `docs/metrics.md` are written from these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
PREFIX = "logsteer_"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric: its name without PREFIX and without a counter's `_total`, and its labels."""

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    text: str

    @property
    def full_name(self) -> str:
        """The name under which it is queried; a histogram's without `_bucket`, `_sum`, `_count`."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _row(name: str, kind: MetricKind, unit: str, labels: str, text: str) -> MetricRow:
    return MetricRow(name, kind, unit, tuple(labels.split()), text)


ENGINE = "model replica"

_ROWS = (
    _row("build_info", "gauge", "", "version python", "1; the labels say what runs."),
    # requests
    _row("requests", "counter", "requests", "path status",
         "Requests answered, by route and status."),
    _row("request_seconds", "histogram", "s", "path",
         "Time from a request's arrival to the end of its answer."),
    _row("requests_in_flight", "gauge", "requests", "",
         "Requests that have come and are not answered to the end."),
    _row("errors", "counter", "requests", "path code",
         "Requests that ended with a problem, by its code; in a stream, too."),
    # models
    _row("model_ready", "gauge", "", "model", "1 where the model answers, else 0."),
    _row("queue_seconds", "histogram", "s", "model",
         "Time from a request's acceptance until the engine took its first job; of requests that "
         "reached the engine."),
    _row("engine_seconds", "histogram", "s", "model",
         "Time from then until the request's last result."),
    _row("time_to_first_token_seconds", "histogram", "s", "model",
         "Time from a streamed request's acceptance to its first generated token."),
    _row("time_between_tokens_seconds", "histogram", "s", "model",
         "Time between two generated tokens of a streamed sequence; each token counts."),
    _row("prompt_tokens", "counter", "tokens", "model", "Tokens that the engine was given."),
    _row("scored_tokens", "counter", "tokens", "model", "Tokens that the engine scored."),
    _row("generated_tokens", "counter", "tokens", "model", "Tokens that the engine generated."),
    _row("prefix_cached_tokens", "counter", "tokens", "model",
         "Prompt tokens that the engine's prefix cache had."),
    _row("steered_tokens", "counter", "tokens", "model",
         "Tokens whose activations were steered, as receipts report them."),
    _row("pending_tokens", "gauge", "tokens", "model", "Tokens of accepted unfinished work."),
    _row("pending_tokens_limit", "gauge", "tokens", "model",
         "What logsteer_pending_tokens may come to: max_pending_tokens."),
    _row("result_cache_hits", "counter", "sequences", "model",
         "Sequences answered without the engine."),
    _row("result_cache_misses", "counter", "sequences", "model",
         "Sequences looked up, and given to the engine."),
    # engines
    _row("engine_restarts", "counter", "restarts", ENGINE, "Restarts of the engine's process."),
    _row("engine_heartbeat_age_seconds", "gauge", "s", ENGINE,
         "Time since the engine's last heartbeat, one of which comes a second; absent while it "
         "loads."),
    _row("engine_step_seconds", "histogram", "s", ENGINE,
         "Time of one step of the engine, of the process that runs now."),
    _row("engine_sequences_running", "gauge", "sequences", ENGINE,
         "Sequences in the engine's batch."),
    _row("engine_sequences_waiting", "gauge", "sequences", ENGINE,
         "Sequences that the engine has and has not begun."),
    _row("engine_sequences_queued", "gauge", "sequences", ENGINE,
         "Sequences that wait in front of the engine, in the order of keys and priorities."),
    _row("kv_cache_blocks", "gauge", "blocks", ENGINE,
         "Blocks of the key-value cache; vLLM alone has them."),
    _row("kv_cache_blocks_used", "gauge", "blocks", ENGINE,
         "Blocks that sequences hold; one that only the prefix cache has is free."),
    _row("engine_preemptions", "counter", "sequences", ENGINE,
         "Sequences that had to give their blocks back and are computed again, each time; vLLM "
         "alone has them."),
    _row("steering_slots", "gauge", "slots", ENGINE,
         "Different steering plans that can run at once: steering_slots; vLLM alone has them."),
    _row("steering_slots_used", "gauge", "slots", ENGINE, "Steering plans that run."),
    _row("adapter_slots", "gauge", "slots", ENGINE,
         "Different adapters that can run at once: adapter_slots; vLLM alone has them."),
    _row("adapter_slots_used", "gauge", "slots", ENGINE, "Adapters that run."),
    _row("engine_process_cpu_seconds", "counter", "s", ENGINE,
         "Processor time of the engine's process and those of its ranks, since it started."),
    _row("engine_process_resident_memory_bytes", "gauge", "B", ENGINE,
         "Resident memory of these processes; what they share counts for each."),
    _row("gpu_memory_held_bytes", "gauge", "B", "model replica device",
         "Memory of a GPU that the engine holds; absent without a GPU. Its name is that of "
         "CUDA_VISIBLE_DEVICES, or its index."),
    _row("gpu_memory_free_bytes", "gauge", "B", "model replica device",
         "Memory of the GPU that nobody holds."),
    _row("gpu_memory_bytes", "gauge", "B", "model replica device", "Memory of the GPU."),
    # what all models share
    _row("pending_bytes", "gauge", "B", "", "Memory expected for requests and answers at work."),
    _row("pending_bytes_limit", "gauge", "B", "",
         "What logsteer_pending_bytes may come to: max_pending_bytes."),
    _row("result_cache_bytes", "gauge", "B", "", "Memory that cached results take."),
    _row("result_cache_limit_bytes", "gauge", "B", "", "What it may come to: cache_bytes."),
    _row("result_cache_file_bytes", "gauge", "B", "",
         "Bytes of cache_file; absent where there is none."),
    _row("store_bytes", "gauge", "B", "kind owner",
         "Bytes of stored vectors, overrides and adapters, read once a minute, or behind store_url "
         "every ten minutes; owner: shared, or keys for those of all keys together."),
    _row("store_limit_bytes", "gauge", "B", "kind",
         "What everybody's store of the kind may hold."),
    _row("store_disk_free_bytes", "gauge", "B", "",
         "Free bytes of the disk that the stores lie on."),
    _row("store_disk_bytes", "gauge", "B", "", "Size of that disk."),
    _row("cluster_part_away", "gauge", "", "part",
         "1 while a part of a service on Ray, ledger or coordinator, does not answer this ingress, "
         "else 0; absent on one machine."),
    # keys
    _row("key_requests", "counter", "requests", "key",
         "Requests of a key, by its name; beyond max_metric_keys names: key other."),
    _row("key_errors", "counter", "requests", "key",
         "Requests of a key that ended with a problem."),
    _row("key_tokens", "counter", "tokens", "key kind",
         "Tokens of a key's answers, those of known results too; kind: prompt, scored, generated."),
)  # fmt: skip

METRICS: Mapping[str, MetricRow] = {row.name: row for row in _ROWS}
"""Name without the prefix -> metric, in the order in which they are exposed."""

PROCESS_METRICS: Mapping[str, str] = {
    "process_cpu_seconds_total": "Processor time of the HTTP process.",
    "process_resident_memory_bytes": "Resident memory of the HTTP process.",
    "process_virtual_memory_bytes": "Address space of the HTTP process.",
    "process_start_time_seconds": "When the HTTP process started, in seconds since 1970.",
    "process_open_fds": "Files and connections that the HTTP process has open.",
    "process_max_fds": "How many it may have open.",
}
"""What Prometheus' client tells of the process that it is in."""

LogLine = Literal["all", "access", "audit"]


@dataclass(frozen=True, slots=True)
class LogField:
    """A field of JSON log lines, and the lines that have it."""

    name: str
    lines: tuple[LogLine, ...]
    text: str


_BOTH: tuple[LogLine, ...] = ("access", "audit")

LOG_FIELDS = (
    LogField("time", ("all",), "When it was logged: RFC 3339, UTC, milliseconds."),
    LogField("level", ("all",), "debug, info, warning, error or critical."),
    LogField("logger", ("all",), "logsteer.access, logsteer.audit, or the module that logs."),
    LogField("process", ("all",), "Process id: the HTTP process's, or an engine's."),
    LogField("message", ("all",), "What is said; `request` and `change` in the two logs."),
    LogField("request_id", ("all",),
             "Id of the request at work, as X-Request-Id answers it; absent where there is none."),
    LogField("exception", ("all",), "The stack trace of an error; absent where there is none."),
    LogField("client", _BOTH, "The caller's address; null on a Unix domain socket."),
    LogField("key", _BOTH, "Name of the caller's key; null without a key file."),
    LogField("method", _BOTH, "HTTP method."),
    LogField("route", _BOTH, "The route's template, `other` for a path that none has."),
    LogField("status", _BOTH, "HTTP status."),
    LogField("code", _BOTH, "Code of the problem that it ended with; null where it succeeded."),
    LogField("model", ("access",), "Id of the model; null where none was asked."),
    LogField("ms", ("access",), "Milliseconds from the request's arrival to its answer's end."),
    LogField("queue_ms", ("access",), "Milliseconds until the engine took its first job."),
    LogField("request_bytes", ("access",), "Bytes of the body as announced; null where not."),
    LogField("response_bytes", ("access",), "Bytes of the answer's body."),
    LogField("prompt_tokens", ("access",), "Tokens that the engine was given."),
    LogField("scored_tokens", ("access",), "Tokens that the engine scored."),
    LogField("generated_tokens", ("access",), "Tokens that it generated."),
    LogField("cached_tokens", ("access",), "Prompt tokens that its prefix cache had."),
    LogField("cached_results", ("access",), "Sequences that earlier work answered."),
    LogField("scope", ("audit",), "The scope that it takes: write or admin."),
    LogField("name", ("audit",), "What it was done to: a stored name, or a model's id."),
    LogField("sha256", ("audit",), "Content that was stored or removed; null where none was."),
    LogField("result", ("audit",), "done or refused; `code` says why."),
)  # fmt: skip
