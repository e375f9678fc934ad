"""`/v1/completions` and `/v1/chat/completions`: generation and echoes in OpenAI's shape."""

import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from logsteer.errors import api_error
from logsteer.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    NamedChoice,
    SamplingRequest,
)
from logsteer_server.contract.jobs import (
    GenerateJob,
    GenerateOutput,
    Job,
    Output,
    ReplyForm,
    Routing,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.interventions.interventions import AppliedReport, Interventions, Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.completions import (
    CompletionPrompt,
    JsonText,
    TokenColumns,
    count_alternatives,
    plan_chat,
    plan_completions,
    read_echo,
    read_generated,
    read_next,
    render_chat_logprobs,
    share_rows,
    write_prompt_rows,
)
from logsteer_server.tasks.generation import (
    join_pieces,
    make_end,
    read_end,
)
from logsteer_server.tasks.planning import Planner
from logsteer_server.tasks.reply_form import check_reply
from logsteer_server.tasks.run import (
    Batch,
    Collector,
    Event,
    Facts,
    ShapedTask,
    check_count,
    drop_nulls,
    take_each,
)
from logsteer_server.tasks.tool_calls import find_plain, read_calls
from logsteer_server.text.prompts import find_longest_prompt, is_one_prompt
from logsteer_server.text.tokenizer import CharCounter

S = TypeVar("S", bound=SamplingRequest)


class OpenAITask(ShapedTask[S]):
    """Continues prompts; what completions and chat completions share.

    The jobs of a prompt lie together: the one that scores its echo, where there is one, and those
    of its completions.
    """

    echoes = False
    """Whether prompts are returned before their completions."""
    _prompts: list[CompletionPrompt]

    def __init__(self, body: S, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        if body.request_id:
            self.id = f"{self.kind}-{body.request_id}"
        self._num_generated = 0
        self._named: set[int] = set()
        """Completions whose prompts were given as ids."""
        self._drawn: defaultdict[int, list[int]] = defaultdict(list)
        """Pieces of each completion, if probes will read its end."""
        self._latest: GenerateOutput
        self._said: defaultdict[int, str] = defaultdict(str)
        """What was shown of each completion of a stream."""
        self._held: dict[int, GenerateOutput] = {}
        """Completions; in a stream only last pieces of replies of a given form, to be checked."""
        self._choices: dict[int, dict[str, Any]] = {}
        """The choices outside of a stream."""
        self._written: dict[int, dict[str, Any]] = {}
        """The `prompt_logprobs` of the prompt at an address, where requested."""

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch | Event, None]:
        """Score echoes and generate completions in one batch; in a stream the echoes come first."""
        planner.cover_text(self._longest)
        self._prompts, jobs = await planner.run(self._plan, planner)
        if not self.streams or self.interventions.stored:
            planner.expect_captured(self.interventions, jobs)
        samples = [job for job in jobs if isinstance(job, GenerateJob)]
        found = Collector()
        if not self.streams:
            self._expect(planner, jobs)
            yield Batch(jobs, found.take, cache=True)
        elif self.echoes:
            scored = [job for job in jobs if isinstance(job, ScoreJob)]
            room = sum(job.num_expected for job in samples)
            yield Batch(scored, found.take, cache=True, room=room)
        outputs = found.outputs
        scores = [output for output in outputs if isinstance(output, ScoreOutput)]
        if (shown := count_alternatives(self._body, self.info)) is not None:
            await planner.capacity.call_long(self._write_prompts, scores, shown)
        for event in filter(None, self._show_echoes(scores)):
            yield event
        if not self.streams:
            drawn = (output for output in outputs if isinstance(output, GenerateOutput))
            self._held = dict(enumerate(drawn))
        elif samples:
            yield Batch(samples, take_each(self._show))
        for n, output in self._held.items() if self._form else ():
            await planner.capacity.call_long(self._check_reply, n, output)
        if self.interventions.probes and not self.streams:
            ids = [output.token_ids.tolist() for output in self._held.values()]
            ends = list(map(read_end, samples, ids))
            found = Collector()
            yield Batch(ends, found.take, purpose="reference")
            for n, end in enumerate(found.outputs):
                self._held[n] = join_pieces([self._held[n], make_end(self._held[n], end)])
        for event in filter(None, itertools.starmap(self._show, self._held.items())):
            yield event
        if self.interventions.probes and self.streams and samples:
            ends = [read_end(job, self._drawn[n]) for n, job in enumerate(samples)]
            yield Batch(ends, take_each(self._show_end), purpose="reference", silent=True)
        if self._body.includes_usage:
            yield Event("chunk", {**self._head, "choices": [], "usage": self._count_usage()})

    def route(self, routing: Routing) -> Routing:
        """Return the routing of the task's jobs, and whose cached work they share."""
        if self._body.priority > 0:
            routing = replace(routing, priority="batch")
        if self._body.cache_salt:
            salted = f"{routing.cache_namespace}\0{self._body.cache_salt}"
            routing = replace(routing, cache_namespace=salted)
        return routing

    def _list_ids(self, output: GenerateOutput | None) -> dict[str, Any]:
        """Return the ids of (a piece of) a completion, if requested."""
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [] if output is None else output.token_ids.tolist()}

    def _list_prompt(self, index: int) -> dict[str, Any]:
        """Return the ids of a completion's prompt, once, if requested."""
        if not self._body.return_token_ids or index in self._named:
            return {}
        self._named.add(index)
        return {"prompt_token_ids": self._prompts[index // self._body.n].ids}

    def _write_prompts(self, scores: Sequence[ScoreOutput], shown: int) -> None:
        """Write the log-probabilities of each prompt's tokens."""
        left, rows = iter(scores), list[bytes]()
        for prompt in self._prompts:
            rows = rows[: prompt.shared]
            if prompt.echo_job:
                rows += write_prompt_rows(prompt, next(left), shown, self.codec)
            written = JsonText(b"[%b]" % b",".join([b"null", *rows]))
            self._written[id(prompt)] = {"prompt_logprobs": written}

    def _plan(self, planner: Planner) -> tuple[list[CompletionPrompt], Sequence[Job]]:
        self.interventions = Interventions.resolve(self._body, self._stores, self.info, self.codec)
        prompts = self._plan_prompts(planner)
        asked = self._body.prompt_logprobs is not None
        # Positions of steering are counted from where scored tokens begin.
        if asked and not self.echoes and self.interventions.plan is None:
            prompts = share_rows(prompts)
        jobs = self.interventions.apply([job for each in prompts for job in each.jobs])
        if self.interventions.capture:  # of what is drawn: the scores of a prompt show none
            jobs = [
                job if isinstance(job, GenerateJob) else replace(job, capture=None) for job in jobs
            ]
        return prompts, jobs

    def _expect(self, planner: Planner, jobs: Sequence[Job]) -> None:
        """Reserve memory for the answer. Errors: as `Planner.expect_rows`."""
        drawn = [job for job in jobs if isinstance(job, GenerateJob)]
        rows = sum(len(prompt.ids) for prompt in self._prompts if prompt.echo_job)
        rows += sum(job.max_tokens for job in drawn)
        listed = [job for job in jobs if isinstance(job, GenerateJob | ScoreJob)]
        top = max((job.top for job in listed), default=0)
        # An entry of `prompt_logprobs` names its fields, and is copied as it is written.
        planner.expect_rows(rows, 1, top if self._body.prompt_logprobs is None else 2 * top)
        contexts = sum(job.prompt_len for job in drawn)
        tokens = sum(job.max_tokens for job in drawn)
        planner.expect_readings(self.interventions, len(drawn), tokens, contexts)

    @property
    @abstractmethod
    def _longest(self) -> int:
        """Characters, or ids, of the longest prompt."""

    @abstractmethod
    def _plan_prompts(self, planner: Planner) -> list[CompletionPrompt]:
        """Return the prompts with their plain jobs."""

    @abstractmethod
    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        """Return a choice of (a piece of) a completion."""

    def _show_echoes(self, _scores: Sequence[ScoreOutput]) -> Iterator[Event | None]:
        """Show the prompts' texts, and other parts known without generation."""
        yield from ()

    @property
    def _form(self) -> ReplyForm | None:
        """The form that replies must have."""
        return next((job.form for each in self._prompts for job in each.samples), None)

    def _check_reply(self, index: int, output: GenerateOutput) -> None:
        """Check a reply that ended by itself, given its last piece. Errors: as `check_reply`."""
        ended = output.token_ids[-1:].tolist()
        if self._form and output.finish_reason == "stop" and ended[0] in self.info.eos_ids:
            check_reply(self._form, self._said[index] + output.text)

    def _show(self, index: int, output: Output) -> Event | None:
        """Show a piece, unless it is the last one of a reply that is yet to be checked."""
        assert isinstance(output, GenerateOutput)
        if self._form and output.is_last and index not in self._held:
            self._held[index] = output
            return None
        self._said[index] += output.text
        if self.interventions.probes:
            self._drawn[index] += output.token_ids.tolist()
            self._latest = output
        self._num_generated += len(output.token_ids)
        choice = self._render(index, output) | self._show_readings(index, output)
        return self._add(choice, output if output.is_last else None)

    def _add(self, choice: dict[str, Any], last: Output | None) -> Event | None:
        """Return (a piece of) a choice as a chunk of a stream; else add it to the answer."""
        if self.streams:
            return self._write_chunk(choice, last)
        known = self._choices.setdefault(choice["index"], choice)
        if known is not choice:  # an echo
            logprobs = known["logprobs"] and {
                name: values + choice["logprobs"][name]
                for name, values in known["logprobs"].items()
            }
            known |= choice | {"text": known["text"] + choice["text"], "logprobs": logprobs}
        return None

    def report(self) -> dict[str, Any]:
        """Return the choices, the completions of each prompt in turn."""
        return {"choices": list(self._choices.values())}

    def _show_end(self, index: int, output: Output) -> Event | None:
        """Return the readings of a completion's last token as a chunk."""
        assert isinstance(output, ScoreOutput)
        return self._show(index, make_end(self._latest, output))

    def _show_readings(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        """Return what was read and captured of (a piece of) the completion of that number."""
        shown, prompt = self.interventions, self._prompts[index // self._body.n]
        read = shown.show_readings(output.readings, len(prompt.ids))
        return read | shown.show_activations(output.activations)

    def _write_chunk(self, choice: dict[str, Any], last: Output | None) -> Event:
        """Return a choice's chunk; with its last output, also the interventions applied to it."""
        document = {**self._head, "choices": [choice]}
        if self._body.includes_usage and (options := self._body.stream_options):
            document["usage"] = self._count_usage() if options.continuous_usage_stats else None
        if last is not None:
            report = AppliedReport(self.interventions)
            report.add(last)
            document |= drop_nulls(report.write())
        return Event("chunk", document)

    def write(self, facts: Facts) -> dict[str, Any]:
        """Render the answer in OpenAI's shape; a stream has no final document."""
        return {**self._head, "choices": []} if self.streams else super().write(facts)

    def _count_usage(self, _facts: Facts | None = None) -> dict[str, Any]:
        """Return the fields of `OpenAIUsage`: a prompt's tokens count once, whatever `n` is."""
        read = sum(len(prompt.ids) for prompt in self._prompts)
        return {
            "prompt_tokens": read,
            "completion_tokens": self._num_generated,
            "total_tokens": read + self._num_generated,
        }


class CompletionTask(OpenAITask[CompletionRequest]):
    """Continuations of prompts; `echo` with `logprobs` scores the prompts as well."""

    kind = "cmpl"
    shape = "text_completion"

    def __init__(self, body: CompletionRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self.echoes = body.echo
        self._counters: defaultdict[int, CharCounter] = defaultdict(CharCounter)
        """Of the characters of each choice."""

    def check_limits(self, settings: Settings) -> None:
        """Bound prompts times completions. Errors: APIError `payload_too_large`."""
        prompt = self._body.prompt
        count = (1 if is_one_prompt(prompt) else len(prompt)) * self._body.n
        check_count("prompt", count, settings.max_items)

    @property
    def _longest(self) -> int:
        given: Any = self._body.prompt
        return find_longest_prompt([given] if is_one_prompt(given) else given)

    def _plan_prompts(self, planner: Planner) -> list[CompletionPrompt]:
        return plan_completions(self._body, self.codec, self.info, planner.cover)

    def _show_echoes(self, scores: Sequence[ScoreOutput]) -> Iterator[Event | None]:
        """Show the prompts' texts, and other parts known without generation."""
        left, index = iter(scores), 0
        for prompt in self._prompts if self._body.echo else ():
            echo = next(left) if prompt.echo_job else None
            columns = read_echo(prompt, echo, self._body.logprobs or 0)
            for _ in range(max(1, len(prompt.samples))):
                choice = self._choose(index, prompt.text, columns, None)
                if prompt.samples or prompt.reads_next:
                    yield self._add(choice, None)
                else:
                    ids = self._list_prompt(index) | self._list_ids(None)
                    yield self._add(choice | ids | {"finish_reason": "length"}, echo)
                if prompt.reads_next:
                    assert echo is not None
                    eos_ids = () if self._body.ignore_eos else self.info.eos_ids
                    output = read_next(echo, self.codec, self._body.logprobs or 0, eos_ids)
                    self._num_generated += len(output.token_ids)
                    yield self._add(self._render(index, output), echo)
                index += 1

    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        choice = self._choose(index, output.text, read_generated(output), output.finish_reason)
        return choice | self._list_prompt(index) | self._list_ids(output)

    def _choose(
        self, index: int, text: str, columns: TokenColumns | None, finish_reason: str | None
    ) -> dict[str, Any]:
        """Return (a piece of) a choice; its offsets continue from the previous piece."""
        logprobs = None
        if columns is not None and self._body.logprobs is not None:
            logprobs = columns.render(
                self.codec, self._counters[index], self._body.return_tokens_as_token_ids
            )
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def report(self) -> dict[str, Any]:
        """Return the choices, each with its prompt's log-probabilities where requested."""
        for index, choice in self._choices.items():
            choice |= self._written.get(id(self._prompts[index // self._body.n]), {})
        return super().report()


class ChatCompletionTask(OpenAITask[ChatCompletionRequest]):
    """The assistant's next turn in a conversation."""

    kind = "chatcmpl"

    def __init__(self, body: ChatCompletionRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._started: set[int] = set()
        self._num_shown: dict[int, int] = {}
        self.shape = "chat.completion.chunk" if body.stream else "chat.completion"

    def check_limits(self, settings: Settings) -> None:
        """Bound the completions. Errors: APIError `payload_too_large`, `invalid_request`."""
        if self._body.chat_template is not None and not settings.trust_request_chat_template:
            detail = (
                "chat_template: this server takes no templates of requests, which could keep it "
                "busy for ever; leave it out, or set trust_request_chat_template: true."
            )
            raise api_error("invalid_request", detail, param="chat_template")
        check_count("n", self._body.n, settings.max_items)

    @property
    def _longest(self) -> int:
        return find_longest_prompt([], [self._body.messages])

    def _plan_prompts(self, planner: Planner) -> list[CompletionPrompt]:
        prompt = plan_chat(self._body, self.codec, self.info)
        planner.cover(sum(job.num_expected for job in prompt.jobs))
        return [prompt]

    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            logprobs = render_chat_logprobs(
                read_generated(output), self.codec, self._body.return_tokens_as_token_ids
            )
        role = {} if index in self._started else {"role": "assistant"}
        said, calls = self._read_said(index, output)
        last = self._body.messages[-1]
        if self._body.echo and role and last.role == "assistant":
            said = last.content + (said or "")
        self._started.add(index)
        reason = output.finish_reason
        if calls and reason == "stop" and not isinstance(self._body.tool_choice, NamedChoice):
            reason = "tool_calls"
        return {
            "index": index,
            "delta" if self._body.stream else "message": role | {"content": said} | calls,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self._list_ids(output),
        }

    def _write_chunk(self, choice: dict[str, Any], last: Output | None) -> Event:
        """Return a choice's chunk; the first of a stream has the prompt's ids."""
        event = super()._write_chunk(choice, last)
        return Event(event.name, event.document | self._list_prompt(0))

    def _read_said(
        self, index: int, output: GenerateOutput
    ) -> tuple[str | None, dict[str, list[dict[str, Any]]]]:
        """Return the text of (a piece of) a reply, and with the last piece its calls.

        In a stream, text that may be a call is held back until that is certain.
        """
        text = self._said[index] if self._body.stream else output.text
        shown = self._num_shown.get(index, 0)
        if not output.is_last:
            plain = self._num_shown[index] = max(shown, find_plain(text, self._body))
            return text[shown:plain], {}
        said, calls = read_calls(text, self._body)
        if self._body.stream:
            calls = [{"index": place, **call} for place, call in enumerate(calls)]
            said = (said or "")[shown:]
        return said, {"tool_calls": calls} if calls else {}

    def report(self) -> dict[str, Any]:
        """Return the choices, and the prompt's ids and log-probabilities where requested."""
        written = self._written.get(id(self._prompts[0]), {})
        return super().report() | self._list_prompt(0) | written
