"""OpenAI's shape: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/tokenizer_info`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.errors import APIError
from logsteer.schemas.openai import (
    ChatCompletionAnswer,
    ChatCompletionRequest,
    CompletionAnswer,
    CompletionRequest,
    TokenizerInfo,
)
from logsteer_server.contract.jobs import GenerateOutput, ScoreOutput
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ResidentsDep,
    SettingsDep,
    StoresDep,
    answer,
    check_count,
    new_id,
    run_within,
    stream_events,
)
from logsteer_server.http.encoding import DONE, encode_data
from logsteer_server.interventions.changes import Changes
from logsteer_server.models.resident import Resident, WorkClock
from logsteer_server.tasks.completions import (
    Prompt,
    plan_chat,
    plan_completions,
    read_echo,
    read_generated,
    read_next,
    render_chat_logprobs,
)
from logsteer_server.text.tokenizer import TextCodec

router = APIRouter(route_class=LimitedRoute, tags=["openai"])

RenderChoice = Callable[[int, GenerateOutput, bool], dict[str, Any]]
"""A choice of an index and a (piece of an) output; True for the first piece."""


@router.get("/v1/models")
async def list_models(residents: ResidentsDep) -> dict[str, Any]:
    """The models that answer now."""
    ready = [resident for resident in residents.by_id.values() if resident.is_ready]
    cards = [
        {
            "id": resident.id,
            "object": "model",
            "created": 0,
            "owned_by": "logsteer",
            "max_model_len": resident.require()[1].context_length,
        }
        for resident in ready
    ]
    return {"object": "list", "data": cards}


@router.get("/tokenizer_info")
async def tokenizer_info(residents: ResidentsDep, model: str | None = None) -> TokenizerInfo:
    """Special tokens and chat template of a model."""
    codec, info = residents.find(model).require()
    return TokenizerInfo(model_max_length=info.context_length, **codec.describe())


@router.post("/v1/completions", responses={200: {"model": CompletionAnswer}})
async def completions(
    body: CompletionRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Continuations of prompts; `echo` with `logprobs` scores the prompts as well."""
    resident = residents.find(body.model)
    codec, info = resident.require()
    changes = await asyncio.to_thread(Changes.resolve, body, stores, info)
    prompts = await asyncio.to_thread(plan_completions, body, codec, info)
    prompts = _change_prompts(prompts, changes)
    check_count("prompt", len(prompts) * body.n, settings.max_items)
    head = _start("cmpl", "text_completion", resident)
    if body.stream and not body.echo:

        def render(index: int, output: GenerateOutput, _is_first: bool) -> dict[str, Any]:
            logprobs = None
            if body.logprobs is not None:
                logprobs = read_generated(output).render(codec, 0)
            return {
                "index": index,
                "text": output.text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
            }

        return stream_events(_stream(resident, prompts, head, render, changes))
    work = _complete(resident, codec, body, prompts, head, changes)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _complete(
    resident: Resident,
    codec: TextCodec,
    body: CompletionRequest,
    prompts: list[Prompt],
    head: dict[str, Any],
    changes: Changes,
) -> dict[str, Any]:
    echoes = await _score_echoes(resident, prompts)
    samples = await _generate(resident, prompts)
    top = body.logprobs or 0
    choices: list[dict[str, Any]] = []
    generated = 0
    for index, prompt in enumerate(prompts):
        echo = echoes.get(index)
        outputs: list[GenerateOutput | None] = list(samples.get(index, [None]))
        if prompt.reads_next and echo is not None:
            outputs = [read_next(echo, codec, top)]
        for output in outputs:
            generated += 0 if output is None else len(output.token_ids)
            columns = None
            if body.logprobs is not None:
                columns = None if output is None else read_generated(output)
                if body.echo:
                    own = read_echo(prompt, echo, top)
                    columns = own if columns is None else own + columns
            text = (prompt.text if body.echo else "") + (output.text if output else "")
            choices.append(
                {
                    "index": len(choices),
                    "text": text,
                    "logprobs": columns.render(codec, 0) if columns else None,
                    "finish_reason": output.finish_reason if output else "length",
                }
            )
    ends: list[ScoreOutput | GenerateOutput] = [*echoes.values()]
    ends += [output for outputs in samples.values() for output in outputs]
    used = _report(changes, ends)
    return {**head, "choices": choices, "usage": _usage(prompts, generated), **used}


def _change_prompts(prompts: list[Prompt], changes: Changes) -> list[Prompt]:
    """The prompts on the changed model. Errors: as `Changes.check_reach`."""
    changes.check_reach([job for prompt in prompts for job in prompt.all_jobs])
    return [
        replace(
            prompt,
            echo_job=changes.change(prompt.echo_job) if prompt.echo_job else None,
            jobs=[changes.change(job) for job in prompt.jobs],
        )
        for prompt in prompts
    ]


def _report(changes: Changes, ends: Sequence[ScoreOutput | GenerateOutput]) -> dict[str, Any]:
    """The fields of `UsedChanges` that have a value: clients of this interface know none."""
    return {name: used for name, used in changes.report(ends).items() if used is not None}


async def _score_echoes(resident: Resident, prompts: list[Prompt]) -> dict[int, ScoreOutput]:
    """The scores of echoed prompts, by the prompt's index."""
    wanted = [(i, prompt.echo_job) for i, prompt in enumerate(prompts) if prompt.echo_job]
    jobs = [job for _, job in wanted]
    if not jobs:
        return {}
    scored = resident.score(jobs, WorkClock())
    return {wanted[index][0]: output async for index, output in scored}


async def _generate(resident: Resident, prompts: list[Prompt]) -> dict[int, list[GenerateOutput]]:
    """The whole samples of each prompt, by the prompt's index."""
    owners = [i for i, prompt in enumerate(prompts) for _ in prompt.jobs]
    if not owners:
        return {}
    jobs = [job for prompt in prompts for job in prompt.jobs]
    found = {index: output async for index, output in resident.generate(jobs, WorkClock())}
    samples: dict[int, list[GenerateOutput]] = {}
    for index, owner in enumerate(owners):
        samples.setdefault(owner, []).append(found[index])
    return samples


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletionAnswer}})
async def chat_completions(
    body: ChatCompletionRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """The assistant's next turn in a conversation."""
    resident = residents.find(body.model)
    codec, info = resident.require()
    changes = await asyncio.to_thread(Changes.resolve, body, stores, info)
    plain = await asyncio.to_thread(plan_chat, body, codec, info)
    (prompt,) = _change_prompts([plain], changes)
    head = _start(
        "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", resident
    )

    def render(index: int, output: GenerateOutput, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        logprobs = None
        if body.logprobs:
            logprobs = render_chat_logprobs(read_generated(output), codec)
        return {
            "index": index,
            "delta" if body.stream else "message": role | {"content": output.text},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    if body.stream:
        return stream_events(_stream(resident, [prompt], head, render, changes))
    work = _generate(resident, [prompt])
    samples = (await run_within(request, settings.request_timeout_s, work))[0]
    choices = [render(index, output, True) for index, output in enumerate(samples)]
    usage = _usage([prompt], sum(len(output.token_ids) for output in samples))
    used = _report(changes, samples)
    return answer(request, {**head, "choices": choices, "usage": usage, **used})


def _start(kind: str, name: str, resident: Resident) -> dict[str, Any]:
    return {"id": new_id(kind), "object": name, "created": int(time.time()), "model": resident.id}


def _usage(prompts: list[Prompt], generated: int) -> dict[str, int]:
    read = sum(len(prompt.ids) for prompt in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
    }


async def _stream(
    resident: Resident,
    prompts: list[Prompt],
    head: dict[str, Any],
    render: RenderChoice,
    changes: Changes,
) -> AsyncIterator[bytes]:
    jobs = [job for prompt in prompts for job in prompt.jobs]
    started: set[int] = set()
    try:
        async for index, output in resident.generate(jobs, WorkClock()):
            choice = render(index, output, index not in started)
            started.add(index)
            used = _report(changes, [output]) if output.is_last else {}
            yield encode_data({**head, "choices": [choice], **used})
    except APIError as error:
        yield encode_data(describe_error(error))
    yield DONE


def describe_error(error: APIError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {
            "message": error.detail,
            "type": error.code,
            "param": error.param,
            "code": error.code,
        }
    }
