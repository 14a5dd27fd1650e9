"""A job's body → an engine input with sampling parameters. Owns every check of a request; runs nothing on the engine.

vLLM templates and tokenises in its renderer's threads. What is left (validation, parameters) runs on the event loop
when it is small and in a thread of ours when it is not: a long body, or a grammar to be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jinja2 import TemplateError
from pydantic import ValidationError

from schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Refusal
from schemas.names import CHAT, COMPLETIONS
from service.engine.protocol import Prepared
from service.engine.vllm import compat
from service.engine.vllm.refusals import clean, refusal, unusable
from service.engine.vllm.rendered import Rendered
from service.settings import EngineSettings

T = TypeVar("T")

INLINE_CHARS = 32_768  # a body up to this is validated on the loop in well under a millisecond
STRUCTURED = ("response_format", "structured_outputs", "tools")  # what may bring a grammar to be checked
# Plain ValueErrors and TypeErrors come from rendering (an image for a text model), TemplateErrors from chat templates
# that refuse an order of roles.
CALLERS: tuple[type[Exception], ...] = (*compat.CLIENT_ERRORS, ValidationError, TemplateError, ValueError, TypeError)


class Renderer:
    def __init__(self, engine: compat.AsyncLLM, settings: EngineSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._model = engine.model_config
        self._context = int(self._model.max_model_len)
        self._online = compat.online_renderer(engine, settings.tool_parser, settings.reasoning_parser)
        self._tokenizer = engine.renderer.tokenizer
        self._vocabulary = int(self._model.get_vocab_size())
        self._multimodal = bool(self._model.is_multimodal_model)
        self._defaults = self._model.get_diff_sampling_param()
        # A text longer than this cannot fit, whatever its tokens are: refused before it keeps the renderer busy.
        widest = int(getattr(self._tokenizer, "max_chars_per_token", 0) or 0)
        self._max_chars = min(settings.max_prompt_chars, self._context * widest or settings.max_prompt_chars)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="render")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, endpoint: str, body: dict[str, Any], salt: str, interval: int) -> Prepared:
        """`salt` isolates the prefix cache; `interval` is the number of tokens per output. Raises Refusal."""
        if not salt:
            raise ValueError("an empty cache salt would share the prefix cache between tenants")
        self._check_model(endpoint, body)
        heavy = self._check_text(endpoint, body) > INLINE_CHARS
        fields = {name: value for name, value in body.items() if name != "stream_options"}
        fields |= {"model": self._settings.served_name, "cache_salt": salt, "stream": True}
        try:
            if endpoint == CHAT:
                return await self._chat(fields, interval, heavy)
            return await self._completion(fields, interval, heavy)
        except Refusal:
            raise
        except compat.NOT_FOUND as error:
            raise ModelNotFound(clean(str(error), body)) from None
        except CALLERS as error:
            raise refusal(error, body) from None

    # ------------------------------------------------------------------ endpoints

    async def _chat(self, fields: dict[str, Any], interval: int, heavy: bool) -> Prepared:
        request = await self._aside(heavy, partial(compat.ChatCompletionRequest.model_validate, fields))
        called = bool(request.tools) and request.tool_choice != "none"
        if called and self._settings.tool_parser is None:
            raise InvalidRequest("tools: this model has no tool parser; send the job without tools, or to another pool")
        answer = await self._online.render_chat(request)
        if isinstance(answer, compat.ErrorResponse):
            raise InvalidRequest(clean(_said(answer), fields))
        (engine_input,) = answer[1]
        asked = vars(request)  # reading the attribute `max_tokens` warns of its deprecation
        wanted = asked["max_tokens"] if asked["max_completion_tokens"] is None else asked["max_completion_tokens"]
        heavy = heavy or any(fields.get(name) for name in STRUCTURED)
        prepared = await self._aside(
            heavy, partial(self._finish, CHAT, fields, request, engine_input, wanted, interval)
        )
        rendered: Rendered = prepared.request
        rendered.logprobs = (request.top_logprobs or 0) if request.logprobs else None
        rendered.one_call = request.parallel_tool_calls is False
        rendered.named_call = isinstance(request.tool_choice, compat.ChatCompletionNamedToolChoiceParam)
        rendered.reasoning = self._settings.reasoning_parser is not None
        parser = self._online.parser
        if parser is not None and (called or rendered.reasoning or getattr(parser, "always_adjust_request", False)):
            kwargs = compat.template_kwargs(self._online, request)
            rendered.parser = partial(
                parser, self._tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=self._model
            )
            if rendered.reasoning:
                ended = compat.reasoning_ended(request, rendered.parser(), engine_input["prompt_token_ids"])
                rendered.extra = {
                    "reasoning_ended": ended,
                    "reasoning_parser_kwargs": {"chat_template_kwargs": kwargs},
                }
        return prepared

    async def _completion(self, fields: dict[str, Any], interval: int, heavy: bool) -> Prepared:
        request = await self._aside(heavy, partial(compat.CompletionRequest.model_validate, fields))
        answer = await self._online.render_completion(request)
        if isinstance(answer, compat.ErrorResponse):
            raise InvalidRequest(clean(_said(answer), fields))
        (engine_input,) = answer
        heavy = heavy or any(fields.get(name) for name in STRUCTURED)
        prepared = await self._aside(
            heavy, partial(self._finish, COMPLETIONS, fields, request, engine_input, request.max_tokens, interval)
        )
        rendered: Rendered = prepared.request
        rendered.logprobs = request.logprobs
        return prepared

    def _finish(
        self,
        endpoint: str,
        fields: dict[str, Any],
        request: Any,
        engine_input: Any,
        wanted: int | None,
        interval: int,
    ) -> Prepared:
        """The output budget, the sampling parameters and their checks. Calls no coroutine: it may run in a thread."""
        tokens = len(engine_input["prompt_token_ids"])
        if not tokens:
            raise InvalidRequest("the prompt is empty; give at least one token")
        room = self._context - tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {tokens} tokens and the model's context is {self._context}: "
                "nothing is left for the output; shorten the prompt"
            )
        if wanted is None:
            wanted = self._defaults.get("max_tokens")
        budget = room if wanted is None else min(wanted, room)
        params = request.to_sampling_params(budget, self._defaults)
        if compat.HAS_REQUEST_INTERVAL:
            params.stream_interval = interval
        constraint, params.structured_outputs = params.structured_outputs, None
        compat.verify(self._engine, params)
        if constraint is not None:
            params.structured_outputs = constraint
            try:
                compat.verify(self._engine, params)
            except CALLERS as error:
                raise unusable(fields, error) from None
        rendered = Rendered(endpoint, engine_input, params, request, self._decode, fields)
        return Prepared(prompt_tokens=tokens, max_tokens=int(params.max_tokens), n=int(params.n), request=rendered)

    # ------------------------------------------------------------------ checks before rendering

    def _check_model(self, endpoint: str, body: dict[str, Any]) -> None:
        served = self._settings.served_name
        if endpoint not in (CHAT, COMPLETIONS):
            raise ModelNotFound(f"no model of this pool serves {endpoint}; publish to a pool that does")
        if body.get("model", served) != served:
            raise ModelNotFound(f"this pool serves {served!r}; use that name, or publish to another pool")

    def _check_text(self, endpoint: str, body: dict[str, Any]) -> int:
        """Characters of the prompt. Raises Refusal for one that is too long, of a wrong kind, or points elsewhere."""
        chars = self._chat_chars(body.get("messages")) if endpoint == CHAT else self._prompt_chars(body.get("prompt"))
        if chars > self._max_chars:
            raise ContextLengthExceeded(
                f"the prompt has {chars} characters; more than {self._max_chars} cannot fit into the model's context "
                f"of {self._context} tokens; shorten it"
            )
        return chars

    def _prompt_chars(self, prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(prompt)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise InvalidRequest("prompt: give one text or one list of token ids; publish one job for each prompt")
        if len(prompt) > self._context:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, the model's context is {self._context}; shorten it"
            )
        if prompt and not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise InvalidRequest(f"prompt: token ids are 0 to {self._vocabulary - 1}")
        return len(prompt)

    def _chat_chars(self, messages: Any) -> int:
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages: give at least one message")
        chars = 0
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                chars += len(content)
            elif isinstance(content, list):
                chars += sum(self._part_chars(part) for part in content)
        return chars

    def _part_chars(self, part: Any) -> int:
        if isinstance(part, str):
            return len(part)
        if not isinstance(part, dict):
            raise InvalidRequest("messages: a part of a content is an object with a type")
        kind = part.get("type", "text")
        if kind in ("text", "refusal", "thinking"):
            return len(str(part.get(kind) or ""))
        if not self._multimodal:
            raise InvalidRequest("messages: this model takes text only; send text parts")
        # The engine fetches nothing: an address in a prompt would let a caller reach our network.
        media = part.get(kind)
        url = media.get("url") if isinstance(media, dict) else media
        if isinstance(url, str) and not url.startswith("data:"):
            raise InvalidRequest("messages: addresses are not fetched; put the content into a data: URL")
        return 0

    # ------------------------------------------------------------------ helpers

    async def _aside(self, heavy: bool, work: Callable[[], T]) -> T:
        if not heavy:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _decode(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))


def _said(answer: Any) -> str:
    return str(getattr(getattr(answer, "error", None), "message", answer))
