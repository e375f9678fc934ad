"""What is asked of each figure, the table that says which is met, and the page of all results.

A figure is where a row's result in `bench/results.json` has it: [smallest, median, largest].
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit of the median of a figure: the least it may be, or the most.

    `name` is that of the figure among the row's `ratios`, or in another part of its result. The
    whole spread is to be above `all_above`, where that is given.
    """

    row: str
    what: str
    name: str
    least: float | None = None
    most: float | None = None
    all_above: float | None = None
    part: str = "ratios"

    @property
    def limit(self) -> str:
        """The limit in words."""
        words = f"at least {self.least:g}" if self.most is None else f"at most {self.most:g}"
        return words if self.all_above is None else f"{words}, all above {self.all_above:g}"

    def is_met(self, figure: tuple[float, float, float]) -> bool:
        """Return whether smallest, median and largest are within the limit."""
        smallest, median, _ = figure
        return (
            (self.least is None or median >= self.least)
            and (self.most is None or median <= self.most)
            and (self.all_above is None or smallest > self.all_above)
        )


ALONE = "tokenising and JSON alone"
REPENG = "repeng ControlModel generate"
TLENS_MODELS = ("demo model", "SmolLM2-135M")

BARS = (
    Bar(
        "http_cpu", "HTTP process, text in, JSON out, against tokenising and JSON",
        f"HTTP process, text in, JSON out / {ALONE}", most=1.2,
    ),
    Bar(
        "http_cpu", "HTTP process, ids in, MessagePack out, against tokenising and JSON",
        f"HTTP process, ids in, MessagePack out / {ALONE}", most=0.8,
    ),
    Bar(
        "http_cpu", "pipe and engine loop, text in, JSON out, against tokenising and JSON",
        f"pipe and engine loop, text in, JSON out / {ALONE}", most=0.6,
    ),
    Bar(
        "http_memory", "HTTP process, 65,536 items in one call of 8 MB, MiB above idle",
        "HTTP process, MiB above idle", most=400, part="figures",
    ),
    Bar(
        "lm_eval", "short sequences through lm-evaluation-harness, against `hf` in-process",
        "logsteer / hf in-process", least=1.3, all_above=1.0,
    ),
    Bar(
        "lm_eval", "the same against tuned `local-completions` on stock vLLM",
        "logsteer / local-completions on stock vLLM, 4 x 64", least=6,
    ),
    Bar(
        "captures", "`/captures` of one layer at every token, against `/perplexity` without it",
        "logsteer, /captures / logsteer, /perplexity", least=0.9,
    ),
    Bar(
        "captures", "the same, against reading the texts for one token",
        "logsteer, /captures / logsteer, /generate of one token", least=0.9,
    ),
    Bar(
        "captures", "the same, against a loop of transformers at its best batch",
        "logsteer, /captures / transformers, at its best batch", least=1.0,
    ),
    Bar(
        "captures", "the same, against vLLM's own `extract_hidden_states`",
        "logsteer, /captures / vLLM, extract_hidden_states", least=1.0,
    ),
    *(
        Bar(
            "load_generator", f"`vllm bench serve`, {what}, against the stock server",
            f"logsteer / stock vLLM server, {name}", least=0.97,
        )
        for what, name in (
            ("requests a second", "requests_per_s"),
            ("time to the first token", "ms_to_first_token"),
            ("time between tokens", "ms_between_tokens"),
        )
    ),
    Bar(
        "teacher", "64 most probable tokens at each of eight samples of a prompt, by "
        "`Client.teacher`, against the stock server's `prompt_logprobs`",
        "logsteer, Client.teacher / stock vLLM server, prompt_logprobs", least=3,
    ),
    Bar(
        "teacher", "the same by `prompt_logprobs` of both",
        "logsteer, prompt_logprobs / stock vLLM server, prompt_logprobs", least=3,
    ),
    Bar(
        "teacher", "CPU seconds of the HTTP process, a thousand tokens by `prompt_logprobs`",
        "logsteer, prompt_logprobs, HTTP process, CPU seconds a thousand tokens", most=0.1,
        part="figures",
    ),
    Bar(
        "choices", "32 contexts, 4 targets each, over HTTP, against the stock server",
        "logsteer / stock vLLM server", least=8,
    ),
    Bar(
        "full_text", "full text, against prefill plus a bare product with the head",
        "all rows scored / limit: prefill + bare product", least=0.95,
    ),
    Bar(
        "overhead", "the service against its own engine in-process",
        "logsteer over HTTP / its engine in-process", least=0.95,
    ),
    Bar(
        "replicas", "two replicas on a core each against one on one core, texts over HTTP",
        "two replicas, a core each / one replica on one core", least=1.85,
    ),
    Bar(
        "steered_decoding", "steered decoding against unsteered",
        "steered / unsteered, 64 slots", least=0.97,
    ),
    Bar(
        "steered_decoding", "unsteered decoding, steering compiled in, against stock vLLM",
        "unsteered, 64 slots / stock vLLM", least=0.97,
    ),
    Bar(
        "hooks", "one sequence, five hooks compiled in and idle, against `resid_post` alone",
        "one sequence, unsteered, all hooks / unsteered, resid_post alone", least=0.97,
    ),
    *(
        Bar(
            "host_time", f"ms that a device waits in a step, {count} sequences, V2 runner",
            f"v2, {count} unsteered", most=most, part="figures",
        )
        for count, most in ((1, 0.3), (32, 0.5), (256, 2))
    ),
    Bar(
        "diagnostics", "generation with `log_q` and `rb_entropy` against without, vLLM",
        "vllm, log_q and rb_entropy / without diagnostics", least=0.92,
    ),
    Bar(
        "diagnostics", "generation with all columns against without, vLLM",
        "vllm, all columns / without diagnostics", least=0.85,
    ),
    *(
        Bar(
            "steering_tlens", f"150 steered tokens against repeng, batch {batch}: {model}",
            f"{model}, batch {batch}, the engine / {REPENG}", least=0.8,
        )
        for model in TLENS_MODELS
        for batch in (1, 8, 32)
    ),
    Bar(
        "patching", "patches of five layers at each token, against a loop over `run_with_hooks`",
        "/patch on vLLM over HTTP / loop over run_with_hooks, TransformerLens, one thread",
        least=10,
    ),
    Bar(
        "patching", "the same, largest difference in nats",
        "largest difference, nats", most=1e-4, part="figures",
    ),
    *(
        Bar(
            "exactness", f"mean error of a token, by transformers' with a float64 softmax: {way}",
            f"{way} / transformers", most=1.05,
        )
        for way in ("vllm", "transformer_lens")
    ),
    Bar(
        "start", "a start that finds its caches filled, seconds to the first answer",
        "s to the first answer", most=6, part="figures",
    ),
    Bar(
        "memory", "2,048 rows over a vocabulary of 128,256, MiB added",
        "MiB added at most", most=256, part="figures",
    ),
    *(
        Bar(
            "score_file", f"`logsteer score-file` against a loop that reads no answer: {way}",
            f"{way}, score-file / loop that reads no answer", least=0.95,
        )
        for way in ("fake, logprob", "fake, perplexity", "vllm, logprob", "vllm, perplexity")
    ),
)  # fmt: skip


def find_figure(bar: Bar, results: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Return smallest, median and largest of a bar's figure; None where it was not measured."""
    found = results.get(bar.row, {}).get(bar.part, {}).get(bar.name)
    return found and tuple(found)


def write_table(results: Mapping[str, Any], rows: set[str] | None = None) -> str:
    """Return a table of Markdown: each bar of these rows (None: all), its figure, whether it is
    met.
    """
    lines = []
    for bar in BARS:
        if rows is not None and bar.row not in rows:
            continue
        cells = ["", "", bar.limit, "not measured"]
        if (figure := find_figure(bar, results)) is not None:
            low, median, high = figure
            met = "yes" if bar.is_met(figure) else "**no**"
            cells = [f"{median:g}", f"{low:g} to {high:g}", bar.limit, met]
        lines.append((f"`{bar.row}`", bar.what, *cells))
    return tabulate(("row", "what", "median", "spread", "bar", "met"), lines)


def tabulate(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown; numbers have three digits, nothing stands for None."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(write_cell, cells))} |" for cells in lines)


def write_cell(value: object) -> str:
    """Return a cell's text."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


COLUMNS = ["way", "measure", "median", "smallest", "largest"]
"""What `list_figures` gives."""


def list_figures(result: Mapping[str, Any]) -> list[list[Any]]:
    """Return a row for each figure of a result; one that is alone is taken for the median."""
    rows = []
    parts = {name: result[name] for name in ("ratios", "figures") if name in result}
    for way, values in (result.get("ways", {}) | parts).items():
        for measure, value in values.items():
            low, median, high = value if isinstance(value, list) else (None, value, None)
            rows.append([way, measure.replace("_", " "), median, low, high])
    return rows


def write_result(name: str, result: Mapping[str, Any]) -> str:
    """Return a row's figures in Markdown."""
    parts = [f"`{result['command']}`", result["machine"]]
    parts += [str(result[key]) for key in ("model", "dtype", "device") if key in result]
    parts += [f"{result['runs']} runs of each"] if "runs" in result else []
    about = ", ".join([*parts, f"{result['seconds_taken']} s in all"])
    notes = [f"{note}." for note in result.get("notes", [])]
    return "\n\n".join([f"## `{name}`", about, tabulate(COLUMNS, list_figures(result)), *notes])


def write_page(results: Mapping[str, Any]) -> str:
    """Return the page of all results in Markdown."""
    about = (
        "Written by `bench/run.py`; a figure is a median, with the smallest and the largest run."
    )
    rows = [write_result(name, result) for name, result in results.items()]
    return "\n\n".join(["# Results", about, write_table(results, set(results)), *rows]) + "\n"
