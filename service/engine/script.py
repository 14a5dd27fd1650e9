"""What a simulated job will say, and where it fails: read from its body. Pure; runs nothing.

Honoured of a body: `model`, `messages`/`prompt`, `max_tokens`, `max_completion_tokens`, `n`, `seed`; of constraints
JSON (a small instance of the schema) and `choice` (the first). A choice ends with `length` at the asked number of
tokens, or with `stop` after 128 when none was asked, or when what it is bound to is said. A prompt has one token per
four characters, and so has an output that is bound.

Fault hooks, for tests, anywhere in the prompt; `:K` is the number of output tokens before it happens (default 1):
`[[sim:fault:K]]` EngineFault for this job · `[[sim:lost:K]]` the engine dies · `[[sim:hang:K]]` the engine stops
stepping and says nothing.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from schemas.names import CHAT, COMPLETIONS
from service.engine import prefixes
from service.engine.bounds import MAX_N
from service.engine.instance import instance
from service.engine.protocol import Prepared

CHARS_PER_TOKEN = 4
DEFAULT_TOKENS = 128  # output of a job that asks for no number

# fmt: off
WORDS = (
    " the", " river", " runs", " below", " old", " mill", " and", " turns", " a", " wheel", " slow", " water", " over",
    " stone", " gate", " lifts", " at", " dawn", " race", " carries", " leaves", " toward", " weir", " while",
    " miller", " counts", " sacks", " of", " grain", " by", " lamp", " رود", " آب", " 🌊", " café", " señal",
)
# fmt: on

_HOOK = re.compile(r"\[\[sim:(fault|lost|hang)(?::(\d+))?\]\]")


@dataclass(slots=True)
class Script:
    """The part of a simulated request that does not change while it runs."""

    origin: int  # where in WORDS the text starts
    capped: bool  # max_tokens was given: ends with `length`
    fault: str | None
    fault_after: int  # output tokens
    blocks: tuple[int, ...] = ()  # names of the prompt's KV blocks
    bound: tuple[str, ...] = ()  # the tokens of an output that a constraint leaves no choice

    def text(self, index: int, start: int, end: int) -> str:
        """Of choice `index`, tokens `start` up to and without `end`."""
        if self.bound:
            return "".join(self.bound[start:end])
        at, count = self.origin + index * 7, len(WORDS)
        if end - start == 1:
            return WORDS[(at + start) % count]
        return "".join([WORDS[(at + i) % count] for i in range(start, end)])


def read(
    endpoint: str, body: dict[str, Any], names: tuple[str, ...], context: int, max_chars: int, salt: str
) -> Prepared:
    """`names`: what the engine answers to; `context`: its tokens; `salt`: of the prefix cache. Raises Refusal."""
    if body.get("model", names[0]) not in names:
        raise ModelNotFound(f"this pool serves {names[0]!r}; use that name, or publish to another pool")
    text = _prompt_text(endpoint, body)
    if len(text) > max_chars:
        raise ContextLengthExceeded(f"the prompt has {len(text)} characters, the limit is {max_chars}; shorten it")
    tokens = max(1, len(text) // CHARS_PER_TOKEN)
    if tokens >= context:
        raise ContextLengthExceeded(f"the prompt has {tokens} tokens, the model's context is {context}; shorten it")
    n = _positive(body, "n") or 1
    if n > MAX_N:
        raise InvalidRequest(f"n must be at most {MAX_N}, got {n}")
    asked = _positive(body, "max_completion_tokens") or _positive(body, "max_tokens")
    bound = _bound(body)
    whole = len(bound) or DEFAULT_TOKENS
    budget = min(asked or whole, len(bound) or context, context - tokens)
    hook = _HOOK.search(text)
    after = max(1, int(hook.group(2) or 1)) if hook else 0
    script = Script(
        origin=zlib.crc32(text.encode("utf-8", "surrogatepass")) + int(body.get("seed") or 0),
        capped=budget < whole or (asked is not None and not bound),
        fault=hook.group(1) if hook and after <= budget else None,
        fault_after=after,
        blocks=prefixes.blocks(text, tokens, salt),
        bound=bound,
    )
    return Prepared(prompt_tokens=tokens, max_tokens=budget, n=n, request=script)


def _prompt_text(endpoint: str, body: dict[str, Any]) -> str:
    if endpoint == COMPLETIONS:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
            return "x" * (CHARS_PER_TOKEN * len(prompt))
        raise InvalidRequest("prompt: give one text or one list of token ids")
    if endpoint != CHAT:
        raise ModelNotFound(f"no model of this pool serves {endpoint}; use a pool that does")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: give at least one message")
    parts: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text":
                    raise InvalidRequest("messages: this model takes text only")
                parts.append(str(part.get("text", "")))
    return "\n".join(parts)


def _bound(body: dict[str, Any]) -> tuple[str, ...]:
    """The tokens of the output, if a constraint says what it is."""
    form, outputs = body.get("response_format") or {}, body.get("structured_outputs") or {}
    schema = (form.get("json_schema") or {}).get("schema", outputs.get("json"))
    if schema is not None:
        try:
            text = orjson.dumps(instance(schema)).decode()
        except (TypeError, AttributeError, LookupError):
            raise InvalidRequest("the JSON schema of this constraint is not valid") from None
    elif form.get("type") == "json_object" or outputs.get("json_object"):
        text = "{}"
    else:
        text = (outputs.get("choice") or [""])[0]
    return tuple(text[at : at + CHARS_PER_TOKEN] for at in range(0, len(text), CHARS_PER_TOKEN))


def _positive(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name}: give a whole number of at least 1")
    return value
