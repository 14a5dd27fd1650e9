"""Every import from vLLM, and what differs between 0.26 (GPU), 0.32 (CPU) and 0.33. Nothing else imports vLLM.

`vllm.entrypoints` and `vllm.renderers` are not a stable interface: names move with minor releases. A test imports this
module. What a version lacks is an attribute that stays at its harmless value here, never a branch elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMNotFoundError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.parser import ParserManager
from vllm.platforms import current_platform
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

VERSION: str = vllm.__version__


def _found(*places: str) -> Any:
    """The first of `module:name` that exists; modules moved between versions."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"vLLM {VERSION} is not supported: none of {', '.join(places)} exists")


# 0.26 | from 0.32
ErrorResponse: Any = _found(
    "vllm.entrypoints.serve.engine.protocol:ErrorResponse", "vllm.entrypoints.openai.engine.protocol:ErrorResponse"
)
_GenerationError: Any = _found(
    "vllm.exceptions:GenerationError", "vllm.entrypoints.openai.engine.protocol:GenerationError"
)


def _exceptions(*names: str) -> tuple[type[Exception], ...]:
    module = importlib.import_module("vllm.exceptions")
    return tuple(found for name in names if (found := getattr(module, name, None)) is not None)


# The caller's fault. 0.26 has no common base: its validation errors are ValueErrors.
CLIENT_ERRORS: tuple[type[Exception], ...] = (
    VLLMValidationError,
    VLLMUnprocessableEntityError,
    *_exceptions("VLLMClientError"),
)
NOT_FOUND: type[Exception] = VLLMNotFoundError
OVERLOADED: tuple[type[Exception], ...] = _exceptions("GracefulHTTPError")  # none in 0.26: it has no bounded queue
REQUEST_FAULTS: tuple[type[Exception], ...] = (_GenerationError,)

HAS_REQUEST_INTERVAL = "stream_interval" in SamplingParams.__struct_fields__  # since 0.32


def engine_args(wanted: dict[str, Any]) -> AsyncEngineArgs:
    """Arguments that this version does not know are left out: they are nets (a queue bound), not needs."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return AsyncEngineArgs(**{name: value for name, value in wanted.items() if name in known})


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises for a name that vLLM does not have: else it would be found out only after the weights are loaded."""
    ParserManager.get_parser(
        tool_parser_name=tool_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=tool_parser is not None,
    )


def is_cpu() -> bool:
    return bool(current_platform.is_cpu())


def device() -> str:
    return str(current_platform.device_type)


def online_renderer(engine: AsyncLLM, tool_parser: str | None, reasoning_parser: str | None) -> OnlineRenderer:
    return OnlineRenderer(
        engine.model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=tool_parser is not None,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


def template_kwargs(online: OnlineRenderer, request: ChatCompletionRequest) -> dict[str, Any]:
    if (effective := getattr(online, "effective_chat_template_kwargs", None)) is not None:
        return dict(effective(request))
    return dict(request.build_chat_params(None, "auto").chat_template_kwargs)  # 0.26


def reasoning_ended(request: ChatCompletionRequest, parser: Any, prompt: list[int]) -> bool | None:
    """Whether structured output binds from the first token on."""
    if (resolve := getattr(request, "resolve_reasoning_ended", None)) is not None:
        ended: bool | None = resolve(parser, prompt)
        return ended
    if getattr(request, "_grammar_from_tool_parser", False):  # 0.26
        return True
    return bool(parser.is_reasoning_end(prompt))


def verify(engine: AsyncLLM, params: SamplingParams) -> None:
    """The checks that `generate` makes on the event loop, before and elsewhere. Raises CLIENT_ERRORS, ValueError."""
    config = engine.vllm_config
    params.verify(
        engine.model_config, config.speculative_config, config.structured_outputs_config, engine.renderer.tokenizer
    )


def kv_tokens(engine: AsyncLLM) -> int:
    cache = engine.vllm_config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None)
    return int(tokens or (cache.num_gpu_blocks or 0) * cache.block_size)


def kill_children() -> None:
    """Ends and reaps EngineCore processes: those of an engine that is still starting, which `shutdown` cannot reach.

    Nothing else of the worker uses multiprocessing; a Worker dies with its EngineCore (service/engine/orphans.py).
    """
    for process in multiprocessing.active_children():  # reaps those that have ended
        if process.name.startswith("EngineCore"):
            process.kill()
            process.join(timeout=5.0)


__all__ = [
    "CLIENT_ERRORS",
    "HAS_REQUEST_INTERVAL",
    "NOT_FOUND",
    "OVERLOADED",
    "REQUEST_FAULTS",
    "VERSION",
    "AsyncEngineArgs",
    "AsyncLLM",
    "ChatCompletionNamedToolChoiceParam",
    "ChatCompletionRequest",
    "CompletionRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "ErrorResponse",
    "OnlineRenderer",
    "SamplingParams",
    "StatLoggerBase",
    "check_parsers",
    "device",
    "engine_args",
    "is_cpu",
    "kill_children",
    "kv_tokens",
    "online_renderer",
    "reasoning_ended",
    "template_kwargs",
    "verify",
]
