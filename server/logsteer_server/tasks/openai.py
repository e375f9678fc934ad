"""`/v1/completions` and `/v1/chat/completions`: generation and echoes in OpenAI's shape."""

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from logsteer.schemas.openai import ChatCompletionRequest, CompletionRequest, SamplingRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GenerateOutput, Output, ScoreOutput
from logsteer_server.interventions.interventions import AppliedReport, Interventions, Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.completions import (
    CompletionPrompt,
    plan_chat,
    plan_completions,
    read_echo,
    read_generated,
    read_next,
    render_chat_logprobs,
)
from logsteer_server.tasks.run import Batch, Collector, Event, Facts, Task, check_count, off_loop
from logsteer_server.text.tokenizer import TextCodec


class OpenAITask(Task):
    """Continues prompts; what completions and chat completions share.

    The jobs of a prompt lie together: the one that scores its echo, where there is one, and those
    of its completions.
    """

    shape: str
    """The `object` of an answer."""

    def __init__(self, body: SamplingRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(models.find(body.model), streams=body.is_streamed)
        self._sampling = body
        self._stores = stores
        self._created = int(time.time())
        self._prompts: list[CompletionPrompt] = []
        self._started: set[int] = set()
        self._found: list[Any] = []

    async def plan(self, _settings: Settings) -> AsyncGenerator[Batch, None]:
        """Score echoes and generate completions in one batch."""
        codec, info = self.model.require()
        self._prompts = await off_loop(self._plan, codec, info)
        jobs = self.interventions.apply([job for each in self._prompts for job in each.jobs])
        if self.streams:
            yield Batch(jobs, self._show)
            return
        collector = Collector(jobs)
        yield Batch(jobs, collector.take, cache=True)
        self._found = collector.outputs

    def _plan(self, codec: TextCodec, info: EngineInfo) -> list[CompletionPrompt]:
        self.interventions = Interventions.resolve(self._sampling, self._stores, info)
        return self._plan_prompts(codec, info)

    @abstractmethod
    def _plan_prompts(self, codec: TextCodec, info: EngineInfo) -> list[CompletionPrompt]:
        """Return the prompts with their plain jobs."""

    @abstractmethod
    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        """Return a choice of (a piece of) a completion."""

    def _show(self, index: int, output: Output) -> Event:
        """Return a piece as a chunk; the last one of a choice says what was applied to it."""
        assert isinstance(output, GenerateOutput)
        choice = self._render(index, output)
        self._started.add(index)
        applied = {}
        if output.is_last:
            report = AppliedReport(self.interventions)
            report.add(output)
            applied = _drop_nulls(report.write())
        return Event("chunk", {**self._head, "choices": [choice], **applied})

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.shape,
            "created": self._created,
            "model": self.model.id,
        }

    def write(self, facts: Facts) -> dict[str, Any]:
        """Write the answer in OpenAI's shape: a prompt's tokens count once, whatever `n` is."""
        read = sum(len(prompt.ids) for prompt in self._prompts)
        document = self.report()
        generated = document.pop("num_generated")
        usage = {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
        }
        return {**self._head, **document, "usage": usage, **_drop_nulls(facts.applied)}


def _drop_nulls(applied: dict[str, Any]) -> dict[str, Any]:
    """Leave out interventions without a value: clients of this interface know none."""
    return {name: value for name, value in applied.items() if value is not None}


class CompletionTask(OpenAITask):
    """Continuations of prompts; `echo` with `logprobs` scores the prompts as well."""

    kind = "cmpl"
    shape = "text_completion"

    def __init__(self, body: CompletionRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._body = body

    def check_limits(self, settings: Settings) -> None:
        """Bound prompts times completions. Errors: APIError `payload_too_large`."""
        prompt = self._body.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        count = (1 if is_one else len(prompt)) * self._body.n
        check_count("prompt", count, settings.max_items)

    def _plan_prompts(self, codec: TextCodec, info: EngineInfo) -> list[CompletionPrompt]:
        return plan_completions(self._body, codec, info)

    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        codec, _ = self.model.require()
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = read_generated(output).render(codec)
        return {
            "index": index,
            "text": output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def report(self) -> dict[str, Any]:
        """Return the choices, the completions of each prompt in turn."""
        choices: list[dict[str, Any]] = []
        generated = first = 0
        for prompt in self._prompts:
            own = self._found[first : first + len(prompt.jobs)]
            first += len(prompt.jobs)
            for output in self._complete(prompt, own):
                generated += 0 if output is None else len(output.token_ids)
                echo = own[0] if prompt.echo_job else None
                choices.append({"index": len(choices), **self._choose(prompt, echo, output)})
        return {"choices": choices, "num_generated": generated}

    def _complete(
        self, prompt: CompletionPrompt, own: list[Any]
    ) -> list[GenerateOutput] | list[None]:
        """Return a prompt's completions; one None where nothing was to be generated."""
        codec, info = self.model.require()
        if prompt.reads_next:
            eos_ids = () if self._body.ignore_eos else info.eos_ids
            return [read_next(own[0], codec, self._body.logprobs or 0, eos_ids)]
        return own[1 if prompt.echo_job else 0 :] or [None]

    def _choose(
        self, prompt: CompletionPrompt, echo: ScoreOutput | None, output: GenerateOutput | None
    ) -> dict[str, Any]:
        body = self._body
        codec, _ = self.model.require()
        columns = None
        if body.logprobs is not None:
            columns = None if output is None else read_generated(output)
            if body.echo:
                own = read_echo(prompt, echo, body.logprobs)
                columns = own if columns is None else own + columns
        return {
            "text": (prompt.text if body.echo else "") + (output.text if output else ""),
            "logprobs": columns.render(codec) if columns else None,
            "finish_reason": output.finish_reason if output else "length",
        }


class ChatCompletionTask(OpenAITask):
    """The assistant's next turn in a conversation."""

    kind = "chatcmpl"

    def __init__(self, body: ChatCompletionRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._body = body
        self.shape = "chat.completion.chunk" if body.stream else "chat.completion"

    def check_limits(self, settings: Settings) -> None:
        """Bound the completions. Errors: APIError `payload_too_large`."""
        check_count("n", self._body.n, settings.max_items)

    def _plan_prompts(self, codec: TextCodec, info: EngineInfo) -> list[CompletionPrompt]:
        return [plan_chat(self._body, codec, info)]

    def _render(self, index: int, output: GenerateOutput) -> dict[str, Any]:
        codec, _ = self.model.require()
        logprobs = None
        if self._body.logprobs:
            logprobs = render_chat_logprobs(read_generated(output), codec)
        role = {} if index in self._started else {"role": "assistant"}
        return {
            "index": index,
            "delta" if self._body.stream else "message": role | {"content": output.text},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def report(self) -> dict[str, Any]:
        """Return the choices."""
        choices = [self._render(index, output) for index, output in enumerate(self._found)]
        generated = sum(len(output.token_ids) for output in self._found)
        return {"choices": choices, "num_generated": generated}
