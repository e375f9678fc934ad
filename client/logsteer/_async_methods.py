"""The methods of `AsyncClient` that ask one endpoint each.

Written by `make client` from the table of endpoints and the schemas: change those.
"""

# mypy: disable-error-code="no-any-return"
# What an endpoint is answered with is of the type that the table of endpoints has for it.

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from typing import Any

from logsteer._async_caller import AsyncCaller, AsyncStoreMethods
from logsteer._calls import NOT_GIVEN, NotGiven
from logsteer._endpoints import GenerateEvent, PerplexityEvent, SelftestEvent, SteerEvent
from logsteer._pairs import LogProbs
from logsteer._upload import AsyncSource
from logsteer.extras.activations import Activations
from logsteer.extras.datasets import PROMPT
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.sampling import Reward, Samples
from logsteer.extras.teacher import TeacherScores
from logsteer.schemas import (
    ActivationItem,
    ActivationRead,
    AdapterCard,
    AdapterList,
    AllPositions,
    Attribution,
    BosPolicy,
    Boundary,
    CaptureCard,
    CaptureIndex,
    CaptureList,
    CaptureOptions,
    CaptureReduce,
    CaptureSource,
    Column,
    ComparedColumn,
    ContentFormat,
    DetokenizeAnswer,
    DivergenceAnswer,
    GenerateAnswer,
    GradientAnswer,
    GradientVariable,
    Health,
    ItemScore,
    LensAnswer,
    ListedDtype,
    LogprobAnswer,
    LogprobItem,
    Message,
    ModelCard,
    ModelList,
    OnError,
    OverflowPolicy,
    OverrideCard,
    OverrideList,
    PairLike,
    ParameterOverride,
    PatchAnswer,
    PatchDirection,
    PatchMetric,
    PatchPair,
    PerplexityAnswer,
    Precision,
    ProbeRequest,
    Protocol,
    Readiness,
    ReferenceModel,
    ReloadAnswer,
    SaeCard,
    SaeList,
    SamplingPolicy,
    SelftestAnswer,
    SlicePositions,
    SpacePolicy,
    SpecialTokens,
    Startup,
    SteerAnswer,
    SteeringLike,
    SweepAnswer,
    TokenizeAnswer,
    Tool,
    TrainAnswer,
    TrainMethod,
    TrainRead,
    VariantCard,
    VariantList,
    VectorCard,
    VectorFormat,
    VectorList,
)


class AsyncClientMethods(AsyncCaller):
    """Methods of the client itself."""

    async def models(self) -> ModelList:
        """Return every configured model and its state."""
        return await self._ask("models")

    async def model(self, model_id: str) -> ModelCard:
        """Return the card of one model; NotFoundError for an unknown id.

        Args:
            model_id: Id of the model.
        """
        return await self._ask("model", model_id=model_id)

    async def selftest(
        self,
        model_id: str,
        *,
        texts: Sequence[str] | NotGiven = NOT_GIVEN,
        token_ids: Sequence[Sequence[int]] | NotGiven = NOT_GIVEN,
        against: str | NotGiven | None = NOT_GIVEN,
    ) -> SelftestAnswer:
        """Measure on a model what the service promises; return a verdict for each promise.

        A check that fails raises nothing: see the answer's `verdict`.

        Args:
            model_id: Id of the model.
            texts: Texts to test with, in place of the built-in ones.
            token_ids: Texts as token ids.
            against: Id of a second resident model with the same tokenizer, such as the same
                checkpoint on the other engine: both score the same tokens.
        """
        return await self._ask(
            "selftest", model_id=model_id, texts=texts, token_ids=token_ids, against=against
        )

    def selftest_events(
        self,
        model_id: str,
        *,
        texts: Sequence[str] | NotGiven = NOT_GIVEN,
        token_ids: Sequence[Sequence[int]] | NotGiven = NOT_GIVEN,
        against: str | NotGiven | None = NOT_GIVEN,
    ) -> AsyncGenerator[SelftestEvent, None]:
        """Yield the events of `selftest`: a start, each check as it ends, then the whole answer.

        A check that fails raises nothing: see the answer's `verdict`. The request is sent when the
        first event is requested. Close the generator to stop early.

        Args:
            model_id: Id of the model.
            texts: Texts to test with, in place of the built-in ones.
            token_ids: Texts as token ids.
            against: Id of a second resident model with the same tokenizer, such as the same
                checkpoint on the other engine: both score the same tokens.
        """
        return self._listen(
            "selftest", model_id=model_id, texts=texts, token_ids=token_ids, against=against
        )

    async def load_model(self, model_id: str, *, wait_s: float | NotGiven = NOT_GIVEN) -> ModelCard:
        """Start a model that was unloaded, drained or has failed; return its card.

        Without `wait_s` the answer comes at once, and says how far it has come.

        Args:
            model_id: Id of the model.
            wait_s: Wait at most this many seconds for the change, which continues after.
                Default 0.0.
        """
        return await self._ask("load_model", model_id=model_id, wait_s=wait_s)

    async def unload_model(
        self, model_id: str, *, wait_s: float | NotGiven = NOT_GIVEN
    ) -> ModelCard:
        """Finish a model's running requests, then end its engine; return its card.

        Without `wait_s` the answer comes at once, and says how far it has come.

        Args:
            model_id: Id of the model.
            wait_s: Wait at most this many seconds for the change, which continues after.
                Default 0.0.
        """
        return await self._ask("unload_model", model_id=model_id, wait_s=wait_s)

    async def drain_model(
        self, model_id: str, *, wait_s: float | NotGiven = NOT_GIVEN
    ) -> ModelCard:
        """Finish a model's running requests and refuse new ones; return its card.

        Without `wait_s` the answer comes at once, and says how far it has come.

        Args:
            model_id: Id of the model.
            wait_s: Wait at most this many seconds for the change, which continues after.
                Default 0.0.
        """
        return await self._ask("drain_model", model_id=model_id, wait_s=wait_s)

    async def reload(self, *, wait_s: float | NotGiven = NOT_GIVEN) -> ReloadAnswer:
        """Have the server read its configuration again: add, remove and replace models.

        Without `wait_s` the answer comes at once, and says how far it has come.

        Args:
            wait_s: Wait at most this many seconds for the change, which continues after.
                Default 0.0.
        """
        return await self._ask("reload", wait_s=wait_s)

    async def health(self) -> Health:
        """Return whether the server's process is healthy, and its version.

        Status 503 is an answer, too, and raises nothing.
        """
        return await self._ask("health")

    async def startup(self) -> Startup:
        """Return whether every required model has answered once.

        Status 503 is an answer, too, and raises nothing.
        """
        return await self._ask("startup")

    async def ready(self) -> Readiness:
        """Return whether every required model answers, and the state of each.

        Status 503 is an answer, too, and raises nothing.
        """
        return await self._ask("ready")

    async def logprob(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
        space: SpacePolicy | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        per_token: bool | NotGiven = NOT_GIVEN,
        step_tokens: int | NotGiven | None = NOT_GIVEN,
        vocabulary: bool | NotGiven = NOT_GIVEN,
    ) -> LogprobAnswer:
        """Score each item's targets after its context, exactly.

        An item has `context` and `targets` (text), `context_ids` and `target_ids`, or `messages`
        and `targets`; as a mapping or as a `LogprobItem`.

        Args:
            items: Contexts and the targets scored after each.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            top: Most probable tokens listed per row, under the policy. Default 0.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns read from each scored row. Default ['logprob', 'rank'].
            policy: What the policy columns refer to, and the listed tokens.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
            space: `both` scores text targets with and without one leading space; `best` does,
                too, and gives the more probable of the two. Default as_given.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
            per_token: False leaves out the arrays, keeps the sums. Default True.
            step_tokens: Tokens of a sequence that a step of the engine may read: longer ones
                are read in several steps, more slowly, with the same scores up to rounding.
                None: as many as the engine has room for.
            vocabulary: Also give the log-probability of every token of the vocabulary at each
                scored one, best as a file: `Accept: application/vnd.safetensors`. Default
                False.
        """
        return await self._ask(
            "logprob",
            items=items,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            on_error=on_error,
            top=top,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            boundary=boundary,
            space=space,
            dtype=dtype,
            per_token=per_token,
            step_tokens=step_tokens,
            vocabulary=vocabulary,
        )

    async def diagnostics(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
        space: SpacePolicy | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        per_token: bool | NotGiven = NOT_GIVEN,
        step_tokens: int | NotGiven | None = NOT_GIVEN,
        vocabulary: bool | NotGiven = NOT_GIVEN,
        window: int | NotGiven = NOT_GIVEN,
    ) -> LogprobAnswer:
        """Score targets as a sampling policy saw them: every column of each token, and aggregates.

        Items are those of `logprob`.

        Args:
            items: Contexts and the targets scored after each.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            top: Most probable tokens listed per row, under the policy. Default 0.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns read from each scored row; all of them unless given.
            policy: What the policy columns refer to, and the listed tokens.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
            space: `both` scores text targets with and without one leading space; `best` does,
                too, and gives the more probable of the two. Default as_given.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
            per_token: False leaves out the arrays, keeps the sums. Default True.
            step_tokens: Tokens of a sequence that a step of the engine may read: longer ones
                are read in several steps, more slowly, with the same scores up to rounding.
                None: as many as the engine has room for.
            vocabulary: Also give the log-probability of every token of the vocabulary at each
                scored one, best as a file: `Accept: application/vnd.safetensors`. Default
                False.
            window: Number of tokens in the means `early` and `late`. Default 16.
        """
        return await self._ask(
            "diagnostics",
            items=items,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            on_error=on_error,
            top=top,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            boundary=boundary,
            space=space,
            dtype=dtype,
            per_token=per_token,
            step_tokens=step_tokens,
            vocabulary=vocabulary,
            window=window,
        )

    async def divergence(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        reference: ReferenceModel | Mapping[str, Any],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[ComparedColumn] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
        space: SpacePolicy | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        per_token: bool | NotGiven = NOT_GIVEN,
        step_tokens: int | NotGiven | None = NOT_GIVEN,
        vocabulary: bool | NotGiven = NOT_GIVEN,
        beta: float | NotGiven = NOT_GIVEN,
    ) -> DivergenceAnswer:
        """Compare two models' next-token distributions at every token of targets.

        Items are those of `logprob`.

        Args:
            items: Contexts and the targets scored after each.
            reference: Q: another model, or this one changed.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            top: Most probable tokens listed per row, under the policy. Default 0.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns read from each scored row. With P the request's model and Q the
                reference, over the whole vocabulary, at the policy's temperature: `forward_kl`
                is KL(P || Q), `reverse_kl` KL(Q || P), `jsd` the Jensen-Shannon divergence;
                `top1_agrees` is 1 where both have the same most probable token. Default
                ['logprob', 'forward_kl', 'reverse_kl', 'jsd'].
            policy: What the policy columns refer to, and the listed tokens.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
            space: `both` scores text targets with and without one leading space; `best` does,
                too, and gives the more probable of the two. Default as_given.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
            per_token: False leaves out the arrays, keeps the sums. Default True.
            step_tokens: Tokens of a sequence that a step of the engine may read: longer ones
                are read in several steps, more slowly, with the same scores up to rounding.
                None: as many as the engine has room for.
            vocabulary: Also give the log-probability of every token of the vocabulary at each
                scored one, best as a file: `Accept: application/vnd.safetensors`. Default
                False.
            beta: Of `jsd`: beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q.
                Default 0.5.
        """
        return await self._ask(
            "divergence",
            items=items,
            reference=reference,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            on_error=on_error,
            top=top,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            boundary=boundary,
            space=space,
            dtype=dtype,
            per_token=per_token,
            step_tokens=step_tokens,
            vocabulary=vocabulary,
            beta=beta,
        )

    async def perplexity(
        self,
        texts: str | Sequence[str | Sequence[int]] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        protocol: Protocol | NotGiven = NOT_GIVEN,
        context_length: int | NotGiven | None = NOT_GIVEN,
        stride: int | NotGiven | None = NOT_GIVEN,
        rows: int | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        windows: bool | NotGiven = NOT_GIVEN,
        tokens: bool | NotGiven = NOT_GIVEN,
        reference: str | NotGiven | None = NOT_GIVEN,
    ) -> PerplexityAnswer:
        """Score texts: the log-likelihood and perplexity of each, and of all together.

        Args:
            texts: Texts to score; or token ids, taken as they are, in the same windows.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns listed with `tokens`. Default ['logprob'].
            policy: What the policy columns refer to, and the listed tokens.
            protocol: The window protocol. Default sliding.
            context_length: Tokens in a window; None: the model's own context length.
            stride: Tokens by which a window of sliding or exl3 moves; None: half of
                context_length, and for exl3 all of it.
            rows: Windows of exl3, at most; None: 100, as in ExLlamaV3's script.
            messages: One conversation or a list of them, through the model's chat template.
            windows: List the score of every window. Default False.
            tokens: List the columns of every scored token. Default False.
            reference: A second resident model with the same vocabulary to compare with, as it
                is: unsteered, with its own parameters.
        """
        return await self._ask(
            "perplexity",
            texts=texts,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            on_error=on_error,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            protocol=protocol,
            context_length=context_length,
            stride=stride,
            rows=rows,
            messages=messages,
            windows=windows,
            tokens=tokens,
            reference=reference,
        )

    def perplexity_events(
        self,
        texts: str | Sequence[str | Sequence[int]] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        protocol: Protocol | NotGiven = NOT_GIVEN,
        context_length: int | NotGiven | None = NOT_GIVEN,
        stride: int | NotGiven | None = NOT_GIVEN,
        rows: int | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        windows: bool | NotGiven = NOT_GIVEN,
        tokens: bool | NotGiven = NOT_GIVEN,
        reference: str | NotGiven | None = NOT_GIVEN,
    ) -> AsyncGenerator[PerplexityEvent, None]:
        """Yield the events of scoring texts: a start, each finished window, then the whole answer.

        The request is sent when the first event is requested. Close the generator to stop early.

        Args:
            texts: Texts to score; or token ids, taken as they are, in the same windows.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns listed with `tokens`. Default ['logprob'].
            policy: What the policy columns refer to, and the listed tokens.
            protocol: The window protocol. Default sliding.
            context_length: Tokens in a window; None: the model's own context length.
            stride: Tokens by which a window of sliding or exl3 moves; None: half of
                context_length, and for exl3 all of it.
            rows: Windows of exl3, at most; None: 100, as in ExLlamaV3's script.
            messages: One conversation or a list of them, through the model's chat template.
            windows: List the score of every window. Default False.
            tokens: List the columns of every scored token. Default False.
            reference: A second resident model with the same vocabulary to compare with, as it
                is: unsteered, with its own parameters.
        """
        return self._listen(
            "perplexity",
            texts=texts,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            on_error=on_error,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            protocol=protocol,
            context_length=context_length,
            stride=stride,
            rows=rows,
            messages=messages,
            windows=windows,
            tokens=tokens,
            reference=reference,
        )

    def perplexity_stream(
        self,
        source: AsyncSource,
        *,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        protocol: Protocol | NotGiven = NOT_GIVEN,
        context_length: int | NotGiven | None = NOT_GIVEN,
        stride: int | NotGiven | None = NOT_GIVEN,
        rows: int | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
    ) -> AsyncGenerator[PerplexityEvent, None]:
        """Score one text of any length while sending it; yield its events.

        The source is tried again after a failure only if it can be read from its beginning again.
        Over HTTP/1.1 httpx reads the answer after it has sent the text: events arrive from then on.
        The request is sent when the first event is requested. Close the generator to stop early.

        Args:
            source: A path, an open file, or an iterable of bytes or text.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            protocol: The window protocol. Default sliding.
            context_length: Tokens in a window; None: the model's own context length.
            stride: Tokens by which a window of sliding or exl3 moves; None: half of
                context_length, and for exl3 all of it.
            rows: Windows of exl3, at most; None: 100, as in ExLlamaV3's script.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
        """
        return self._listen(
            "perplexity_stream",
            source=source,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            protocol=protocol,
            context_length=context_length,
            stride=stride,
            rows=rows,
            steering=steering,
            override=override,
            adapter=adapter,
        )

    async def generate(
        self,
        prompts: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        temperature: float | NotGiven = NOT_GIVEN,
        top_p: float | NotGiven = NOT_GIVEN,
        top_k: int | NotGiven = NOT_GIVEN,
        min_p: float | NotGiven = NOT_GIVEN,
        repetition_penalty: float | NotGiven = NOT_GIVEN,
        presence_penalty: float | NotGiven = NOT_GIVEN,
        frequency_penalty: float | NotGiven = NOT_GIVEN,
        logit_bias: Mapping[str, float] | NotGiven = NOT_GIVEN,
        allowed_token_ids: Sequence[int] | NotGiven | None = NOT_GIVEN,
        bad_words: Sequence[str] | NotGiven = NOT_GIVEN,
        min_tokens: int | NotGiven = NOT_GIVEN,
        stop_token_ids: Sequence[int] | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        prompt_ids: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        max_tokens: int | NotGiven = NOT_GIVEN,
        n: int | NotGiven = NOT_GIVEN,
        seed: int | NotGiven | None = NOT_GIVEN,
        stop: Sequence[str] | NotGiven = NOT_GIVEN,
        include_stop: bool | NotGiven = NOT_GIVEN,
        ignore_eos: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven | None = NOT_GIVEN,
        diagnostics: bool | NotGiven = NOT_GIVEN,
        window: int | NotGiven = NOT_GIVEN,
    ) -> GenerateAnswer:
        """Continue prompts; with `diagnostics`, return what the policy saw at every step.

        With `prompt_ids` or `messages` among the options, `prompts` is None.

        Args:
            prompts: Texts to continue.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            temperature: 0, or anything below 0.00001: greedy. Default 1.0.
            top_p: Draw from the most probable tokens whose probabilities sum to this. Default
                1.0.
            top_k: 0: every token. Default 0.
            min_p: Never draw a token less probable than this share of the most probable one.
                Default 0.0.
            repetition_penalty: Divides positive logits of tokens in the prompt or the
                continuation, and multiplies negative ones. Default 1.0.
            presence_penalty: Taken off logits of tokens in the continuation. Default 0.0.
            frequency_penalty: Taken off for each time that a token is in the continuation.
                Default 0.0.
            logit_bias: Added to logits, by token id.
            allowed_token_ids: The only tokens that may come.
            bad_words: Texts whose tokens may not come.
            min_tokens: The end of sequence may not come before so many tokens have. Default 0.
            stop_token_ids: Tokens that end a continuation, beside the end of sequence.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            prompt_ids: Prompts as token ids, in place of `prompts`.
            messages: One conversation or a list of them, through the model's chat template.
            max_tokens: Maximum number of tokens in each completion. Default 64.
            n: Completions of each prompt. Default 1.
            seed: Seed of the first completion; each further completion, of this prompt and the
                next ones, takes the next number, so all draws are independent. None: the server
                draws one. In float32 a seed gives the same tokens in any batch and on every
                engine; in half precision a near tie may fall otherwise, unless provenance says
                batch_invariant.
            stop: Texts that end a completion.
            include_stop: Keep the stop string that ended a completion in its text. Default
                False.
            ignore_eos: Continue after the end of sequence. Default False.
            columns: Columns of each generated token, read from the logits that it was drawn
                from, under the policy that drew it. None: none.
            diagnostics: Add aggregates of the columns, and all columns unless named. Those of a
                stream come with its result. Default False.
            window: Number of tokens in the means `early` and `late`. Default 16.
        """
        return await self._ask(
            "generate",
            prompts=prompts,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            precision=precision,
            on_error=on_error,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            prompt_ids=prompt_ids,
            messages=messages,
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            stop=stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            columns=columns,
            diagnostics=diagnostics,
            window=window,
        )

    def generate_events(
        self,
        prompts: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        temperature: float | NotGiven = NOT_GIVEN,
        top_p: float | NotGiven = NOT_GIVEN,
        top_k: int | NotGiven = NOT_GIVEN,
        min_p: float | NotGiven = NOT_GIVEN,
        repetition_penalty: float | NotGiven = NOT_GIVEN,
        presence_penalty: float | NotGiven = NOT_GIVEN,
        frequency_penalty: float | NotGiven = NOT_GIVEN,
        logit_bias: Mapping[str, float] | NotGiven = NOT_GIVEN,
        allowed_token_ids: Sequence[int] | NotGiven | None = NOT_GIVEN,
        bad_words: Sequence[str] | NotGiven = NOT_GIVEN,
        min_tokens: int | NotGiven = NOT_GIVEN,
        stop_token_ids: Sequence[int] | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        prompt_ids: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        max_tokens: int | NotGiven = NOT_GIVEN,
        n: int | NotGiven = NOT_GIVEN,
        seed: int | NotGiven | None = NOT_GIVEN,
        stop: Sequence[str] | NotGiven = NOT_GIVEN,
        include_stop: bool | NotGiven = NOT_GIVEN,
        ignore_eos: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven | None = NOT_GIVEN,
        diagnostics: bool | NotGiven = NOT_GIVEN,
        window: int | NotGiven = NOT_GIVEN,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the events of `generate`: a start, pieces as they are generated, then the whole
        answer.

        With `prompt_ids` or `messages` among the options, `prompts` is None. The request is sent
        when the first event is requested. Close the generator to stop early.

        Args:
            prompts: Texts to continue.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            temperature: 0, or anything below 0.00001: greedy. Default 1.0.
            top_p: Draw from the most probable tokens whose probabilities sum to this. Default
                1.0.
            top_k: 0: every token. Default 0.
            min_p: Never draw a token less probable than this share of the most probable one.
                Default 0.0.
            repetition_penalty: Divides positive logits of tokens in the prompt or the
                continuation, and multiplies negative ones. Default 1.0.
            presence_penalty: Taken off logits of tokens in the continuation. Default 0.0.
            frequency_penalty: Taken off for each time that a token is in the continuation.
                Default 0.0.
            logit_bias: Added to logits, by token id.
            allowed_token_ids: The only tokens that may come.
            bad_words: Texts whose tokens may not come.
            min_tokens: The end of sequence may not come before so many tokens have. Default 0.
            stop_token_ids: Tokens that end a continuation, beside the end of sequence.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            prompt_ids: Prompts as token ids, in place of `prompts`.
            messages: One conversation or a list of them, through the model's chat template.
            max_tokens: Maximum number of tokens in each completion. Default 64.
            n: Completions of each prompt. Default 1.
            seed: Seed of the first completion; each further completion, of this prompt and the
                next ones, takes the next number, so all draws are independent. None: the server
                draws one. In float32 a seed gives the same tokens in any batch and on every
                engine; in half precision a near tie may fall otherwise, unless provenance says
                batch_invariant.
            stop: Texts that end a completion.
            include_stop: Keep the stop string that ended a completion in its text. Default
                False.
            ignore_eos: Continue after the end of sequence. Default False.
            columns: Columns of each generated token, read from the logits that it was drawn
                from, under the policy that drew it. None: none.
            diagnostics: Add aggregates of the columns, and all columns unless named. Those of a
                stream come with its result. Default False.
            window: Number of tokens in the means `early` and `late`. Default 16.
        """
        return self._listen(
            "generate",
            prompts=prompts,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            precision=precision,
            on_error=on_error,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            prompt_ids=prompt_ids,
            messages=messages,
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            stop=stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            columns=columns,
            diagnostics=diagnostics,
            window=window,
        )

    async def steer(
        self,
        prompts: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        temperature: float | NotGiven = NOT_GIVEN,
        top_p: float | NotGiven = NOT_GIVEN,
        top_k: int | NotGiven = NOT_GIVEN,
        min_p: float | NotGiven = NOT_GIVEN,
        repetition_penalty: float | NotGiven = NOT_GIVEN,
        presence_penalty: float | NotGiven = NOT_GIVEN,
        frequency_penalty: float | NotGiven = NOT_GIVEN,
        logit_bias: Mapping[str, float] | NotGiven = NOT_GIVEN,
        allowed_token_ids: Sequence[int] | NotGiven | None = NOT_GIVEN,
        bad_words: Sequence[str] | NotGiven = NOT_GIVEN,
        min_tokens: int | NotGiven = NOT_GIVEN,
        stop_token_ids: Sequence[int] | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        prompt_ids: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        max_tokens: int | NotGiven = NOT_GIVEN,
        n: int | NotGiven = NOT_GIVEN,
        seed: int | NotGiven | None = NOT_GIVEN,
        stop: Sequence[str] | NotGiven = NOT_GIVEN,
        include_stop: bool | NotGiven = NOT_GIVEN,
        ignore_eos: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven | None = NOT_GIVEN,
        baseline: bool | NotGiven = NOT_GIVEN,
    ) -> SteerAnswer:
        """Continue prompts under steering; return them with the receipt of what was done.

        With `prompt_ids` or `messages` among the options, `prompts` is None.

        Args:
            prompts: Texts to continue.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            temperature: 0, or anything below 0.00001: greedy. Default 1.0.
            top_p: Draw from the most probable tokens whose probabilities sum to this. Default
                1.0.
            top_k: 0: every token. Default 0.
            min_p: Never draw a token less probable than this share of the most probable one.
                Default 0.0.
            repetition_penalty: Divides positive logits of tokens in the prompt or the
                continuation, and multiplies negative ones. Default 1.0.
            presence_penalty: Taken off logits of tokens in the continuation. Default 0.0.
            frequency_penalty: Taken off for each time that a token is in the continuation.
                Default 0.0.
            logit_bias: Added to logits, by token id.
            allowed_token_ids: The only tokens that may come.
            bad_words: Texts whose tokens may not come.
            min_tokens: The end of sequence may not come before so many tokens have. Default 0.
            stop_token_ids: Tokens that end a continuation, beside the end of sequence.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            prompt_ids: Prompts as token ids, in place of `prompts`.
            messages: One conversation or a list of them, through the model's chat template.
            max_tokens: Maximum number of tokens in each completion. Default 64.
            n: Completions of each prompt. Default 1.
            seed: Seed of the first completion; each further completion, of this prompt and the
                next ones, takes the next number, so all draws are independent. None: the server
                draws one. In float32 a seed gives the same tokens in any batch and on every
                engine; in half precision a near tie may fall otherwise, unless provenance says
                batch_invariant.
            stop: Texts that end a completion.
            include_stop: Keep the stop string that ended a completion in its text. Default
                False.
            ignore_eos: Continue after the end of sequence. Default False.
            columns: Columns of each generated token, read from the logits that it was drawn
                from, under the policy that drew it. None: none.
            baseline: Also continue without steering, with the same seeds. Default False.
        """
        return await self._ask(
            "steer",
            prompts=prompts,
            steering=steering,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            capture=capture,
            probes=probes,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            precision=precision,
            on_error=on_error,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            prompt_ids=prompt_ids,
            messages=messages,
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            stop=stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            columns=columns,
            baseline=baseline,
        )

    def steer_events(
        self,
        prompts: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        temperature: float | NotGiven = NOT_GIVEN,
        top_p: float | NotGiven = NOT_GIVEN,
        top_k: int | NotGiven = NOT_GIVEN,
        min_p: float | NotGiven = NOT_GIVEN,
        repetition_penalty: float | NotGiven = NOT_GIVEN,
        presence_penalty: float | NotGiven = NOT_GIVEN,
        frequency_penalty: float | NotGiven = NOT_GIVEN,
        logit_bias: Mapping[str, float] | NotGiven = NOT_GIVEN,
        allowed_token_ids: Sequence[int] | NotGiven | None = NOT_GIVEN,
        bad_words: Sequence[str] | NotGiven = NOT_GIVEN,
        min_tokens: int | NotGiven = NOT_GIVEN,
        stop_token_ids: Sequence[int] | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        prompt_ids: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
        max_tokens: int | NotGiven = NOT_GIVEN,
        n: int | NotGiven = NOT_GIVEN,
        seed: int | NotGiven | None = NOT_GIVEN,
        stop: Sequence[str] | NotGiven = NOT_GIVEN,
        include_stop: bool | NotGiven = NOT_GIVEN,
        ignore_eos: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven | None = NOT_GIVEN,
        baseline: bool | NotGiven = NOT_GIVEN,
    ) -> AsyncGenerator[SteerEvent, None]:
        """Yield the events of `steer`: a start, pieces as they are generated, then the whole
        answer.

        With `prompt_ids` or `messages` among the options, `prompts` is None. The request is sent
        when the first event is requested. Close the generator to stop early.

        Args:
            prompts: Texts to continue.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            temperature: 0, or anything below 0.00001: greedy. Default 1.0.
            top_p: Draw from the most probable tokens whose probabilities sum to this. Default
                1.0.
            top_k: 0: every token. Default 0.
            min_p: Never draw a token less probable than this share of the most probable one.
                Default 0.0.
            repetition_penalty: Divides positive logits of tokens in the prompt or the
                continuation, and multiplies negative ones. Default 1.0.
            presence_penalty: Taken off logits of tokens in the continuation. Default 0.0.
            frequency_penalty: Taken off for each time that a token is in the continuation.
                Default 0.0.
            logit_bias: Added to logits, by token id.
            allowed_token_ids: The only tokens that may come.
            bad_words: Texts whose tokens may not come.
            min_tokens: The end of sequence may not come before so many tokens have. Default 0.
            stop_token_ids: Tokens that end a continuation, beside the end of sequence.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            prompt_ids: Prompts as token ids, in place of `prompts`.
            messages: One conversation or a list of them, through the model's chat template.
            max_tokens: Maximum number of tokens in each completion. Default 64.
            n: Completions of each prompt. Default 1.
            seed: Seed of the first completion; each further completion, of this prompt and the
                next ones, takes the next number, so all draws are independent. None: the server
                draws one. In float32 a seed gives the same tokens in any batch and on every
                engine; in half precision a near tie may fall otherwise, unless provenance says
                batch_invariant.
            stop: Texts that end a completion.
            include_stop: Keep the stop string that ended a completion in its text. Default
                False.
            ignore_eos: Continue after the end of sequence. Default False.
            columns: Columns of each generated token, read from the logits that it was drawn
                from, under the policy that drew it. None: none.
            baseline: Also continue without steering, with the same seeds. Default False.
        """
        return self._listen(
            "steer",
            prompts=prompts,
            steering=steering,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            capture=capture,
            probes=probes,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            precision=precision,
            on_error=on_error,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            prompt_ids=prompt_ids,
            messages=messages,
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            stop=stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            columns=columns,
            baseline=baseline,
        )

    async def sweep(
        self,
        steering: SteeringLike,
        scales: Sequence[float],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        items: Sequence[LogprobItem | Mapping[str, Any]] | NotGiven = NOT_GIVEN,
        texts: Sequence[str] | NotGiven = NOT_GIVEN,
        layers: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
    ) -> SweepAnswer:
        """Score targets and texts at each scale of a steering object.

        Args:
            steering: Steer the model. Tokens before the first scored one are the prompt.
            scales: Factors of the vectors' own scales; 0 is unsteered.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            items: Contexts and the targets scored after each.
            texts: Texts to score.
            layers: Sets of layers, each in place of the vectors' own; None: the vectors' own.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
        """
        return await self._ask(
            "sweep",
            steering=steering,
            scales=scales,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            items=items,
            texts=texts,
            layers=layers,
            boundary=boundary,
        )

    async def patch(
        self,
        pairs: Sequence[PatchPair | Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        hook: str | NotGiven = NOT_GIVEN,
        layers: Sequence[Sequence[int]] | NotGiven | None = NOT_GIVEN,
        positions: Sequence[int] | NotGiven | None = NOT_GIVEN,
        metric: PatchMetric | NotGiven = NOT_GIVEN,
        direction: PatchDirection | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
    ) -> PatchAnswer:
        """Score items with activations patched in from others, one place at a time.

        Args:
            pairs: Items that are run, clean and corrupted.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            hook: Which activation of the layer; resid_post is the residual stream that leaves
                block L. Default resid_post.
            layers: Sets of layers, each patched together; None: each layer alone.
            positions: Tokens of the context that is patched into, one at a time; None: each.
            metric: `logprob` of the first target; `difference`: of the first two; `kl`:
                KL(clean || patched) of the token after the context, in nats. Default logprob.
            direction: `denoise` puts clean activations into the corrupted run, `noise`
                corrupted ones into the clean run. Default denoise.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
        """
        return await self._ask(
            "patch",
            pairs=pairs,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            hook=hook,
            layers=layers,
            positions=positions,
            metric=metric,
            direction=direction,
            boundary=boundary,
        )

    async def lens(
        self,
        items: Sequence[str | LogprobItem | Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        layers: Sequence[int] | NotGiven | None = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
    ) -> LensAnswer:
        """Score targets from the residual stream of each layer (logit lens).

        Items are those of `logprob`; a string is a text that is scored whole.

        Args:
            items: Contexts and the targets scored after each. A string is a text that is scored
                whole, as the target after an empty context: without BOS, from its second token.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            top: Most probable tokens listed per row, under the policy. Default 0.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns read from each scored row. Default ['logprob', 'rank'].
            policy: What the policy columns refer to, and the listed tokens.
            layers: Layers whose resid_post is read; None: all.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
        """
        return await self._ask(
            "lens",
            items=items,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            on_error=on_error,
            top=top,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            layers=layers,
            boundary=boundary,
        )

    async def gradient(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        wrt: GradientVariable | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        on_error: OnError | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        attribution: Attribution | NotGiven | None = NOT_GIVEN,
        steps: int | NotGiven = NOT_GIVEN,
        baseline: int | NotGiven | None = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
    ) -> GradientAnswer:
        """Differentiate every target's log-probability, or attribute it to input tokens.

        `wrt` has `layers`, and `hook` and `positions` as in steering: a gradient with respect to
        each token's activation. Or `override`, a stored direction v: the derivative along it. With
        `attribution`, `wrt` is None. Items are those of `logprob`.

        Args:
            items: Contexts and the targets scored after each.
            wrt: What to differentiate with respect to.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            on_error: `fail`: the first bad item refuses the request, and `param` names it.
                `report`: it has its `problem` in place of its result, the others have their
                results. Default fail.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            attribution: In place of wrt: what each input token, of embedding e, contributes.
                `gradient_x_input`: the gradient times e. `integrated`: the gradient's mean
                along the straight line from the baseline e' to e, times e - e' (integrated
                gradients, Sundararajan et al. 2017).
            steps: Gauss-Legendre points on that line; only for `integrated`. Default 100.
            baseline: Only for `integrated`: e' is the embedding of this token; None: zeros,
                near which models with RMSNorm are not smooth: see `convergence_delta`. Default
                0.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
        """
        return await self._ask(
            "gradient",
            items=items,
            wrt=wrt,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            on_error=on_error,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            attribution=attribution,
            steps=steps,
            baseline=baseline,
            boundary=boundary,
        )

    async def tokenize(
        self,
        texts: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        messages: Sequence[Message | Mapping[str, Any]]
        | Sequence[Sequence[Message | Mapping[str, Any]]]
        | NotGiven
        | None = NOT_GIVEN,
    ) -> TokenizeAnswer:
        """Cut each text into tokens, and return them with their places in it.

        Args:
            texts: Texts to cut into tokens.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            messages: One conversation or a list of them, through the model's chat template.
        """
        return await self._ask(
            "tokenize",
            texts=texts,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            messages=messages,
        )

    async def detokenize(
        self, token_ids: Sequence[Sequence[int]], *, model: str | NotGiven | None = NOT_GIVEN
    ) -> DetokenizeAnswer:
        """Write each sequence of token ids as text.

        Args:
            token_ids: Sequences of token ids.
            model: Id of a resident model; may be left out where there is only one.
        """
        return await self._ask("detokenize", token_ids=token_ids, model=model)

    async def score(
        self,
        context: str,
        targets: str | Sequence[str],
        *,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven = NOT_GIVEN,
        policy: SamplingPolicy | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
        space: SpacePolicy | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        per_token: bool | NotGiven = NOT_GIVEN,
        step_tokens: int | NotGiven | None = NOT_GIVEN,
        vocabulary: bool | NotGiven = NOT_GIVEN,
    ) -> ItemScore:
        """Score targets after one context: `logprob` for a single item.

        Args:
            context: The text before the targets.
            targets: Texts to score; one string is one target.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            top: Most probable tokens listed per row, under the policy. Default 0.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            columns: Columns read from each scored row. Default ['logprob', 'rank'].
            policy: What the policy columns refer to, and the listed tokens.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
            space: `both` scores text targets with and without one leading space; `best` does,
                too, and gives the more probable of the two. Default as_given.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
            per_token: False leaves out the arrays, keeps the sums. Default True.
            step_tokens: Tokens of a sequence that a step of the engine may read: longer ones
                are read in several steps, more slowly, with the same scores up to rounding.
                None: as many as the engine has room for.
            vocabulary: Also give the log-probability of every token of the vocabulary at each
                scored one, best as a file: `Accept: application/vnd.safetensors`. Default
                False.
        """
        return await self._score(
            context,
            targets,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            top=top,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            columns=columns,
            policy=policy,
            boundary=boundary,
            space=space,
            dtype=dtype,
            per_token=per_token,
            step_tokens=step_tokens,
            vocabulary=vocabulary,
        )

    async def get_log_prob(
        self,
        prompts: str | Sequence[str],
        targets: str | Sequence[str],
        *,
        space: SpacePolicy = "best",
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        detokenize: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        boundary: Boundary | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        step_tokens: int | NotGiven | None = NOT_GIVEN,
        vocabulary: bool | NotGiven = NOT_GIVEN,
    ) -> LogProbs:
        """Return one record per prompt and target, prompt by prompt, in the order given.

        A record is a dictionary with attributes: prompt, target, sequence (the text that was
        scored), log_prob, prob, num_tokens, perplexity (exp of minus the summed log_prob),
        token_perplexity, boundary and log_prob_any_space. With space `both` a target has two: with
        one leading space, then without. One request scores them all; each prompt is computed once.

        Args:
            prompts: Contexts; one string is one prompt.
            targets: Texts to score; one string is one target.
            space: `best`: each target with or without one leading space, whichever is more
                probable; `both`: each of the two; or `as_given`.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            detokenize: False leaves out the texts of tokens and their offsets. Default True.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            boundary: `joint` encodes context + target together and cuts at the context's
                length; `separate` encodes each alone. Ids are taken as they are. Under `joint`,
                white space that ends a text context goes to the target; a conversation keeps
                what its template ends in. Default joint.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
            step_tokens: Tokens of a sequence that a step of the engine may read: longer ones
                are read in several steps, more slowly, with the same scores up to rounding.
                None: as many as the engine has room for.
            vocabulary: Also give the log-probability of every token of the vocabulary at each
                scored one, best as a file: `Accept: application/vnd.safetensors`. Default
                False.
        """
        return await self._get_log_prob(
            prompts,
            targets,
            space,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            tail=tail,
            detokenize=detokenize,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            boundary=boundary,
            dtype=dtype,
            step_tokens=step_tokens,
            vocabulary=vocabulary,
        )

    async def sample(
        self,
        source: PromptSource,
        *,
        field: str = PROMPT,
        count: int | None = None,
        with_replacement: bool = False,
        max_prompts_pool: int | None = None,
        reward: Reward | None = None,
        batch_size: int = 32,
        concurrency: int = 4,
        max_failures: int = 8,
        progress: bool = True,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        probes: Sequence[ProbeRequest | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        temperature: float | NotGiven = NOT_GIVEN,
        top_p: float | NotGiven = NOT_GIVEN,
        top_k: int | NotGiven = NOT_GIVEN,
        min_p: float | NotGiven = NOT_GIVEN,
        repetition_penalty: float | NotGiven = NOT_GIVEN,
        presence_penalty: float | NotGiven = NOT_GIVEN,
        frequency_penalty: float | NotGiven = NOT_GIVEN,
        logit_bias: Mapping[str, float] | NotGiven = NOT_GIVEN,
        allowed_token_ids: Sequence[int] | NotGiven | None = NOT_GIVEN,
        bad_words: Sequence[str] | NotGiven = NOT_GIVEN,
        min_tokens: int | NotGiven = NOT_GIVEN,
        stop_token_ids: Sequence[int] | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        max_tokens: int | NotGiven = NOT_GIVEN,
        n: int | NotGiven = NOT_GIVEN,
        seed: int | NotGiven | None = NOT_GIVEN,
        stop: Sequence[str] | NotGiven = NOT_GIVEN,
        include_stop: bool | NotGiven = NOT_GIVEN,
        ignore_eos: bool | NotGiven = NOT_GIVEN,
        columns: Sequence[Column] | NotGiven | None = NOT_GIVEN,
        diagnostics: bool | NotGiven = NOT_GIVEN,
        window: int | NotGiven = NOT_GIVEN,
    ) -> Samples:
        """Continue prompts drawn from a source, and give each continuation its reward.

        Each of a prompt's `n` continuations has its own seed, which follows from `seed` (default 0)
        and does not depend on the batch. A failed request loses its own prompts; a refused one is
        halved, until only the refused prompt is lost. A warning and the result's `failures` name
        them. Raises the first error if no sample was drawn. `logsteer.score_file` draws the same
        continuations of a file's prompts, and resumes where it was interrupted.

        Args:
            source: A list of prompts or of rows, a path of JSON lines or Parquet, or
                `KIND:NAME` of `logsteer.extras.datasets`.
            field: The field that holds a row's prompt.
            count: Prompts to draw; None: all in order.
            with_replacement: Whether a prompt may be drawn again.
            max_prompts_pool: Rows of the source that are drawn from, its first ones; None: all.
            reward: Called with a row of the source, its prompt and the text of a continuation;
                returns a number, or what is awaited for it. `reward_error` of a sample says
                sample's `reward_error`.
            batch_size: Prompts of one request.
            concurrency: Requests under way at once.
            max_failures: Failed requests in a row after which no further one is sent.
            progress: Whether a terminal shows a bar.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            probes: Directions to read at every token that is scored or generated. Results with
                readings are never taken from the result cache.
            temperature: 0, or anything below 0.00001: greedy. Default 1.0.
            top_p: Draw from the most probable tokens whose probabilities sum to this. Default
                1.0.
            top_k: 0: every token. Default 0.
            min_p: Never draw a token less probable than this share of the most probable one.
                Default 0.0.
            repetition_penalty: Divides positive logits of tokens in the prompt or the
                continuation, and multiplies negative ones. Default 1.0.
            presence_penalty: Taken off logits of tokens in the continuation. Default 0.0.
            frequency_penalty: Taken off for each time that a token is in the continuation.
                Default 0.0.
            logit_bias: Added to logits, by token id.
            allowed_token_ids: The only tokens that may come.
            bad_words: Texts whose tokens may not come.
            min_tokens: The end of sequence may not come before so many tokens have. Default 0.
            stop_token_ids: Tokens that end a continuation, beside the end of sequence.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            max_tokens: Maximum number of tokens in each completion. Default 64.
            n: Completions of each prompt. Default 1.
            seed: Seed of the first completion; each further completion, of this prompt and the
                next ones, takes the next number, so all draws are independent. None: the server
                draws one. In float32 a seed gives the same tokens in any batch and on every
                engine; in half precision a near tie may fall otherwise, unless provenance says
                batch_invariant.
            stop: Texts that end a completion.
            include_stop: Keep the stop string that ended a completion in its text. Default
                False.
            ignore_eos: Continue after the end of sequence. Default False.
            columns: Columns of each generated token, read from the logits that it was drawn
                from, under the policy that drew it. None: none.
            diagnostics: Add aggregates of the columns, and all columns unless named. Those of a
                stream come with its result. Default False.
            window: Number of tokens in the means `early` and `late`. Default 16.
        """
        return await self._sample(
            source,
            field,
            count,
            with_replacement,
            max_prompts_pool,
            reward,
            batch_size,
            concurrency,
            max_failures,
            progress,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            probes=probes,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            precision=precision,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            cache=cache,
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            stop=stop,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            columns=columns,
            diagnostics=diagnostics,
            window=window,
        )

    async def teacher(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top: int = 64,
        alternatives: Sequence[Any] | None = None,
        temperature: float = 1.0,
        *,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        capture: CaptureOptions | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        tail: bool | NotGiven = NOT_GIVEN,
        precision: Precision | NotGiven = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        cache: bool | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
    ) -> TeacherScores:
        """Return a teacher's log-probabilities of completions as numpy arrays, for distillation.

        One request of ids, answered by arrays alone. Every sequence has the same number K of
        alternatives.

        Args:
            sequences: Token ids of prompts with completions.
            prompt_lengths: Tokens of each one's prompt, unscored.
            top: Most probable tokens listed at each token.
            alternatives: For each sequence the tokens [T, K] whose log-probabilities are read.
            temperature: All are of softmax(logits / temperature).
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            capture: Activations to give with each result, which is then never taken from the
                result cache; prompt tokens that are captured never come from the prefix cache.
            tail: Also give the mass of all tokens that are not listed, added up in float64.
                Default False.
            precision: Precision in which softmax and columns are computed from the model's
                logits, and tokens are drawn. MessagePack answers carry float32 in any case.
                Default float32.
            model: Id of a resident model; may be left out where there is only one.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            cache: Whether cached results of equal work may answer this request, and its results
                be cached. They are the same numbers, bit for bit. Default True.
            dtype: Of the listed log-probabilities in MessagePack and safetensors. Default
                float32.
        """
        return await self._teacher(
            sequences,
            prompt_lengths,
            top,
            alternatives,
            temperature,
            override=override,
            adapter=adapter,
            steering=steering,
            capture=capture,
            tail=tail,
            precision=precision,
            model=model,
            special_tokens=special_tokens,
            cache=cache,
            dtype=dtype,
        )

    async def activations(
        self,
        items: str | Sequence[str | ActivationItem | Mapping[str, Any]],
        layers: Sequence[int] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        hook: str | NotGiven = NOT_GIVEN,
        positions: AllPositions | SlicePositions | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        read: ActivationRead | NotGiven = NOT_GIVEN,
        sae: str | NotGiven | None = NOT_GIVEN,
        top: int | NotGiven = NOT_GIVEN,
    ) -> Activations:
        """Return the activations of texts as numpy arrays: of each token, the last, or their mean.

        With `sae`, the strongest features of each token. A path is a text like any other here;
        `capture` reads files.

        Args:
            items: Texts, one string being one text; or objects with `token_ids` or `messages`.
            layers: Layers to read, 0-based; None with `sae`.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model; the whole sequence is the prompt.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            hook: Which activation of the layer; resid_post is the residual stream that leaves
                block L. Default resid_post.
            positions: Which of the tokens that the model reads: all, or slices. Default all.
            read: Each of those tokens' activation, the last one's, or their mean, which leaves
                out BOS where positions is all, and attention sinks. Default each.
            sae: A stored sparse autoencoder, in place of layers and hook: return the strongest
                features of each token.
            top: Maximum number of features for each token; only with sae. Default 10.
        """
        return await self._activations(
            items,
            layers,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            hook=hook,
            positions=positions,
            read=read,
            sae=sae,
            top=top,
        )

    async def capture(
        self,
        source: PromptSource,
        name: str,
        layers: Sequence[int],
        directory: str | PathLike[str] | None = None,
        *,
        field: str = "text",
        progress: bool = True,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        hook: str | NotGiven = NOT_GIVEN,
        positions: AllPositions | SlicePositions | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        read: ActivationRead | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        max_length: int | NotGiven | None = NOT_GIVEN,
        shard_rows: int | NotGiven = NOT_GIVEN,
        shards: bool | NotGiven | None = NOT_GIVEN,
        reduce: CaptureReduce | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> CaptureIndex:
        """Capture the activations of a source's rows on the server, wait for it, return its index.

        The server reads on if the caller is gone, and resumes after a restart: the same call again
        waits for the same job, and downloads what is missing. `ActivationShards.of_directory` of
        `logsteer.extras.activations` reads the directory.

        Args:
            source: A list of texts or of rows, a path of JSON lines or Parquet, `KIND:NAME` of
                `logsteer.extras.datasets`, or `store://PATH` of the server.
            name: What the data set of activations is called.
            layers: Layers to read, 0-based.
            directory: Where the shards and their index are downloaded to; None: they stay on
                the server.
            field: The field that holds a row's text or conversation.
            progress: Whether a terminal shows a bar.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model; the whole sequence is the prompt.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            hook: Which activation of the layer; resid_post is the residual stream that leaves
                block L. Default resid_post.
            positions: Which of the tokens that the model reads: all, or slices. Default all.
            read: Each of those tokens' activation, the last one's, or their mean, as in
                /activations: a document then has one row. Default each.
            dtype: Of the activations in the shards. Default float32.
            max_length: Read the first tokens of each document, at most so many; None: a
                document longer than the model's context is a problem, unless `on_overflow` says
                otherwise.
            shard_rows: Rows from which on a shard is written, at the end of a document; or at
                64 MiB of float32. Default 32768.
            shards: Whether activations are written; None: unless `reduce` is given.
            reduce: Statistics that are computed meanwhile.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._capture(
            source,
            name,
            layers,
            directory,
            field,
            progress,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            hook=hook,
            positions=positions,
            read=read,
            dtype=dtype,
            max_length=max_length,
            shard_rows=shard_rows,
            shards=shards,
            reduce=reduce,
            overwrite=overwrite,
        )

    async def activation_loader(
        self,
        name: str,
        batch_size: int,
        shuffle_buffer: int = 0,
        layer: int | None = None,
        directory: str | PathLike[str] | None = None,
        *,
        seed: int = 0,
        repeat: bool = False,
    ) -> Any:
        """Return a torch `IterableDataset` of batches [batch, width] of captured activations.

        `iter` of it is what SAELens' SAETrainer takes as `data_provider` and dictionary_learning's
        trainSAE as `data`. It takes torch.

        Args:
            name: What the data set of activations is called.
            batch_size: Rows of a batch.
            shuffle_buffer: Rows that are mixed at a time; 0: all in order.
            layer: Whose activations; None: the only one.
            directory: Where shards are kept that were downloaded; None: they are read from the
                server each time.
            seed: Of the order.
            repeat: Whether it begins again at the end.
        """
        return await self._activation_loader(
            name, batch_size, shuffle_buffer, layer, directory, seed, repeat
        )


class AsyncVectorMethods(AsyncStoreMethods[VectorList, VectorCard]):
    """Methods of `AsyncClient.vectors`."""

    _name = "vectors"

    async def list(self, *, model: str | NotGiven | None = NOT_GIVEN) -> VectorList:
        """Return the card of every name; with a model, of each vector that fits it.

        Args:
            model: Id of a resident model; may be left out where there is only one.
        """
        return await self._ask("vectors.list", model=model)

    async def put(
        self,
        name: str,
        source: AsyncSource | bytes,
        format: VectorFormat | NotGiven | None = NOT_GIVEN,
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> VectorCard:
        """Upload the steering vector, store it under a name, and return its card.

        Args:
            name: What the steering vector is called from now on.
            source: A path, an open binary file, or the file's bytes: safetensors, or a GGUF
                control vector.
            format: Of the file; left out: what it looks like.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "vectors.put", name=name, source=source, format=format, overwrite=overwrite
        )

    async def train(
        self,
        name: str,
        pairs: Sequence[PairLike],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        method: TrainMethod | NotGiven = NOT_GIVEN,
        whiten: bool | str | NotGiven = NOT_GIVEN,
        read: TrainRead | NotGiven = NOT_GIVEN,
        layers: Sequence[int] | NotGiven | None = NOT_GIVEN,
        hook: str | NotGiven = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        max_harm: float | NotGiven = NOT_GIVEN,
        harm_texts: Sequence[str] | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> TrainAnswer:
        """Train a vector on pairs of texts, `positive` and `negative`, and store it.

        Args:
            name: What the vector is called from now on.
            pairs: Texts that differ in what the vector should represent.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            model: Id of a resident model; may be left out where there is only one.
            method: The mean of the differences of each pair, their first principal component,
                the normal of a logistic regression, or Fisher's linear discriminant. Default
                mean_difference.
            whiten: Whether pca and logistic, too, discount what varies among texts of one side:
                whiten activations by that covariance. A capture's name: by the covariance of
                its activations (`reduce`), also for lda. Default False.
            read: Activation after a text's last token, or their mean over tokens without BOS
                and attention sinks (tokens whose norm at that layer is more than 3 times the
                median of the text's); `answer`: after the last token that the assistant says in
                a conversation's last turn, before what the template closes the turn with, as
                contrastive activation addition reads it. Default last.
            layers: None: every layer.
            hook: Which activation of the layer; resid_post is the residual stream that leaves
                block L. Default resid_post.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            max_harm: How much the recommended scale may raise perplexity: 0.1 is a tenth.
                Default 0.1.
            harm_texts: Further texts whose perplexity is not to grow by more, the first 64
                tokens of each. Default [].
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "vectors.train",
            name=name,
            pairs=pairs,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            model=model,
            method=method,
            whiten=whiten,
            read=read,
            layers=layers,
            hook=hook,
            bos=bos,
            max_harm=max_harm,
            harm_texts=harm_texts,
            special_tokens=special_tokens,
            overwrite=overwrite,
        )

    async def download(self, name: str, format: ContentFormat | NotGiven = NOT_GIVEN) -> bytes:
        """Return the vector as a file.

        Args:
            name: What the vector is called.
            format: Of the file. The SHA-256 of the safetensors file is the vector's own.
                Default safetensors.
        """
        file = await self._ask("vectors.download", name=name, format=format)
        return file.data


class AsyncOverrides(AsyncStoreMethods[OverrideList, OverrideCard]):
    """Methods of `AsyncClient.overrides`."""

    _name = "overrides"

    async def put(
        self,
        name: str,
        source: AsyncSource | bytes,
        model: str | NotGiven | None = NOT_GIVEN,
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> OverrideCard:
        """Upload the direction of the parameters, store it under a name, and return its card.

        Args:
            name: What the direction of the parameters is called from now on.
            source: A path, an open binary file, or the file's bytes: safetensors, a tensor for
                each parameter that moves, under its name in transformers' `state_dict`.
            model: Id of a resident model; may be left out where there is only one.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "overrides.put", name=name, source=source, model=model, overwrite=overwrite
        )


class AsyncAdapters(AsyncStoreMethods[AdapterList, AdapterCard]):
    """Methods of `AsyncClient.adapters`."""

    _name = "adapters"

    async def put(
        self,
        name: str,
        directory: str | PathLike[str],
        model: str | NotGiven | None = NOT_GIVEN,
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> AdapterCard:
        """Upload the LoRA adapter, store it under a name, and return its card.

        Args:
            name: What the LoRA adapter is called from now on.
            directory: What PEFT's `save_pretrained` writes: adapter_config.json and
                adapter_model.safetensors, which are read while they are sent.
            model: Id of a resident model; may be left out where there is only one.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "adapters.put", name=name, directory=directory, model=model, overwrite=overwrite
        )


class AsyncSaes(AsyncStoreMethods[SaeList, SaeCard]):
    """Methods of `AsyncClient.saes`."""

    _name = "saes"

    async def put(
        self,
        name: str,
        directory: str | PathLike[str],
        layer: int | NotGiven | None = NOT_GIVEN,
        activation_scale: float | NotGiven | None = NOT_GIVEN,
        *,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> SaeCard:
        """Upload the sparse autoencoder, store it under a name, and return its card.

        Args:
            name: What the sparse autoencoder is called from now on.
            directory: What SAELens saves: cfg.json and sae_weights.safetensors, which are read
                while they are sent; and labels.json, feature -> text, where it is there.
            layer: The block whose activation is read, where the hook in the configuration names
                none, or another.
            activation_scale: SAELens' norm_scaling_factor, where normalize_activations is
                expected_average_only_in; 1 where it was folded in.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "saes.put",
            name=name,
            directory=directory,
            layer=layer,
            activation_scale=activation_scale,
            overwrite=overwrite,
        )


class AsyncCaptures(AsyncStoreMethods[CaptureList, CaptureCard]):
    """Methods of `AsyncClient.captures`."""

    _name = "captures"

    async def put(
        self, name: str, source: AsyncSource | bytes, *, overwrite: bool | NotGiven = NOT_GIVEN
    ) -> CaptureSource:
        """Upload a data set, for `start` to capture its activations.

        Args:
            name: What the data set of activations is called from now on.
            source: A path, an open binary file, or the file's bytes: JSON lines, each a text,
                or an object with `text`, `token_ids` or `messages`.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask("captures.put", name=name, source=source, overwrite=overwrite)

    async def start(
        self,
        name: str,
        layers: Sequence[int],
        *,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        continue_final_message: bool | NotGiven = NOT_GIVEN,
        add_generation_prompt: bool | NotGiven | None = NOT_GIVEN,
        tools: Sequence[Tool | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        bos: BosPolicy | NotGiven = NOT_GIVEN,
        special_tokens: SpecialTokens | NotGiven = NOT_GIVEN,
        on_overflow: OverflowPolicy | NotGiven = NOT_GIVEN,
        items: Sequence[str | ActivationItem | Mapping[str, Any]] | NotGiven | None = NOT_GIVEN,
        source: str | NotGiven | None = NOT_GIVEN,
        hook: str | NotGiven = NOT_GIVEN,
        positions: AllPositions | SlicePositions | Mapping[str, Any] | NotGiven = NOT_GIVEN,
        read: ActivationRead | NotGiven = NOT_GIVEN,
        dtype: ListedDtype | NotGiven = NOT_GIVEN,
        max_length: int | NotGiven | None = NOT_GIVEN,
        shard_rows: int | NotGiven = NOT_GIVEN,
        shards: bool | NotGiven | None = NOT_GIVEN,
        reduce: CaptureReduce | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> CaptureCard:
        """Start to capture the activations of a data set; return how far it has come.

        `Client.capture` uploads the data set and waits, too.

        Args:
            name: What the data set of activations is called.
            layers: Layers to read, 0-based.
            chat_template_kwargs: Variables of the template, such as `{"enable_thinking":
                false}`; one that the model's template does not read is refused.
            continue_final_message: Leave the last turn open: what is generated or scored
                continues it. Default False.
            add_generation_prompt: Whether to append the head of the assistant's next turn.
                None: yes, except after an assistant's turn where whole conversations are read
                (/perplexity, /activations, pairs).
            tools: Functions that the template describes.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model; the whole sequence is the prompt.
            model: Id of a resident model; may be left out where there is only one.
            bos: Beginning-of-sequence token: as the tokenizer does, always, or never. It is
                never added twice. Default auto.
            special_tokens: Control text in the request's strings, such as `<|im_end|>`:
                `parse`: control tokens, as the tokenizer reads it; `text`: plain text. What a
                chat template writes is control tokens in either case. Default parse.
            on_overflow: What happens to a sequence longer than the model's context: an error,
                or its leftmost context tokens are dropped and counted in `truncated_tokens`.
                Default error.
            items: Texts; or objects with `token_ids`, taken as they are, or `messages`. None:
                the rows of `source`, or of an upload.
            source: `store://PATH`: the object `datasets/PATH` of the server's store, which
                every key may read: JSON lines, or Parquet whose name says so. It is copied
                once.
            hook: Which activation of the layer; resid_post is the residual stream that leaves
                block L. Default resid_post.
            positions: Which of the tokens that the model reads: all, or slices. Default all.
            read: Each of those tokens' activation, the last one's, or their mean, as in
                /activations: a document then has one row. Default each.
            dtype: Of the activations in the shards. Default float32.
            max_length: Read the first tokens of each document, at most so many; None: a
                document longer than the model's context is a problem, unless `on_overflow` says
                otherwise.
            shard_rows: Rows from which on a shard is written, at the end of a document; or at
                64 MiB of float32. Default 32768.
            shards: Whether activations are written; None: unless `reduce` is given.
            reduce: Statistics that are computed meanwhile.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "captures.start",
            name=name,
            layers=layers,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            override=override,
            adapter=adapter,
            steering=steering,
            model=model,
            bos=bos,
            special_tokens=special_tokens,
            on_overflow=on_overflow,
            items=items,
            source=source,
            hook=hook,
            positions=positions,
            read=read,
            dtype=dtype,
            max_length=max_length,
            shard_rows=shard_rows,
            shards=shards,
            reduce=reduce,
            overwrite=overwrite,
        )

    async def index(self, name: str) -> CaptureIndex:
        """Return all that is known of a data set of activations, its shards among it.

        Args:
            name: What the data set of activations is called.
        """
        return await self._ask("captures.index", name=name)

    async def pause(self, name: str) -> CaptureCard:
        """Stop a job until it is resumed.

        Args:
            name: What the data set of activations is called.
        """
        return await self._ask("captures.pause", name=name)

    async def resume(self, name: str) -> CaptureCard:
        """Resume a job after its last whole shard.

        Args:
            name: What the data set of activations is called.
        """
        return await self._ask("captures.resume", name=name)

    async def shard(self, name: str, number: str) -> bytes:
        """Return a shard as a safetensors file.

        Args:
            name: What the data set of activations is called.
            number: Of the shard, from 0.
        """
        file = await self._ask("captures.shard", name=name, number=number)
        return file.data

    async def statistics(self, name: str) -> bytes:
        """Return means and covariances as a safetensors file.

        Args:
            name: What the data set of activations is called.
        """
        file = await self._ask("captures.statistics", name=name)
        return file.data


class AsyncVariants(AsyncStoreMethods[VariantList, VariantCard]):
    """Methods of `AsyncClient.variants`."""

    _name = "variants"

    async def put(
        self,
        name: str,
        *,
        override: ParameterOverride | Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        adapter: str | NotGiven | None = NOT_GIVEN,
        steering: SteeringLike | NotGiven | None = NOT_GIVEN,
        model: str | NotGiven | None = NOT_GIVEN,
        chat_template_kwargs: Mapping[str, Any] | NotGiven | None = NOT_GIVEN,
        description: str | NotGiven | None = NOT_GIVEN,
        overwrite: bool | NotGiven = NOT_GIVEN,
    ) -> VariantCard:
        """Store a steered model under a name, which is then a model in every endpoint.

        Args:
            name: What it is called as a model from now on.
            override: A stored direction v by name, and eta: the parameters are theta + eta v.
            adapter: Name of a stored LoRA adapter that is added to the parameters.
            steering: Steer the model. Tokens before the first scored one are the prompt.
            model: Id of a resident model; may be left out where there is only one.
            chat_template_kwargs: Variables of the chat template, below those of a request.
            description: What it is, for people who choose a model.
            overwrite: Whether to replace what another request has stored under this name, which
                is otherwise refused: `exists`. The same request again gets the same answer.
                Default False.
        """
        return await self._ask(
            "variants.put",
            name=name,
            override=override,
            adapter=adapter,
            steering=steering,
            model=model,
            chat_template_kwargs=chat_template_kwargs,
            description=description,
            overwrite=overwrite,
        )
