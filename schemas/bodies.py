"""The request bodies: which fields each endpoint takes, what they may hold, and the one check for all of them.

The engine itself accepts unknown fields in silence and has private ones that bypass fairness or reach other machines,
so the allow-lists here are what protects it. Pure: no I/O, nothing of the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from schemas.constraints import MAX_CHOICES, check_regex, check_schema, check_size
from schemas.errors import ErrorCode, InvalidRequest, Refusal
from schemas.fields import INT32_MAX, INT64_MAX, INT64_MIN, Asked
from schemas.messages import URL_PARTS, Message
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS
from schemas.problems import problem, unknown_field
from schemas.tenants import Tenant

# No model has such an output; a number beyond it is a mistake, whatever the tenant may.
MAX_OUTPUT_TOKENS = 10_000_000
MAX_N = 128

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
OutputTokens = Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class JsonSchemaFormat(Asked):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Asked):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_fits(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs json_schema exactly if type is json_schema")
        return self


class StructuredOutputs(Asked):
    """One constraint on the output, and how its whitespace is treated."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: Literal[True] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object]
        if sum(value is not None for value in given) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar and json_object")
        return self


class FunctionSpec(Asked):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Asked):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Asked):
    name: FunctionName


class ToolChoice(Asked):
    type: Literal["function"]
    function: ChosenFunction


class _Sampled(Asked):
    """What both generating endpoints take."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    max_tokens: OutputTokens | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    structured_outputs: StructuredOutputs | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _constraints_agree(self) -> Self:
        constrained = self.response_format is not None and self.response_format.type != "text"
        if constrained and self.structured_outputs is not None:
            raise ValueError("takes response_format or structured_outputs, not both")
        return self


class ChatBody(_Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="where the tenant may")
    logprobs: bool | None = None
    max_completion_tokens: OutputTokens | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("needs logprobs: true for top_logprobs")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice in ("auto", "required") and not names:
            raise ValueError("needs tools for this tool_choice")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError("names a function in tool_choice that is not among its tools")
        return self


class CompletionBody(_Sampled):
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)] = Field(
        description="text, or the token ids of one prompt"
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class EmbeddingBody(Asked):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    )
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


BODIES: Mapping[str, type[Asked]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody, EMBEDDINGS: EmbeddingBody}

# OpenAI's fields that change nothing here: accepted, and left out of what the engine gets.
_IGNORED_EVERYWHERE = frozenset({"stream", "stream_options", "user"})
IGNORED: Mapping[str, frozenset[str]] = {
    CHAT: _IGNORED_EVERYWHERE
    | {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
    | {"store"},
    COMPLETIONS: _IGNORED_EVERYWHERE,
    EMBEDDINGS: frozenset({"user"}),
}

# Known fields of other houses that are refused, and what to do instead.
ADVICE: Mapping[str, str] = {
    "add_generation_prompt": "the service renders the chat as the model's template says",
    "add_special_tokens": "send the prompt as token ids if you need other special tokens",
    "audio": "this service returns text; leave it out",
    "best_of": "send n and choose from the choices yourself",
    "cache_salt": "the service derives it from the tenant; leave it out",
    "chat_template": "the model's own template is used; pass chat_template_kwargs if the tenant may",
    "documents": "put the documents into a message",
    "echo": "put the prompt before the text yourself",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use response_format or structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "kv_transfer_params": "it is the service's own; leave it out",
    "length_penalty": "beam search is not offered; sample with temperature, or send n",
    "modalities": "this service returns text; leave it out",
    "priority": "publish to the jobs topic of the tier you need",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "log probabilities are given for output tokens only; use logprobs",
    "request_id": "the job's id is used; leave it out",
    "suffix": "fill-in-the-middle is not offered; write the prompt in the model's own format",
    "use_beam_search": "beam search is not offered; sample with temperature, or send n",
    "verbosity": "ask for it in a message",
    "vllm_xargs": "it is the engine's own; leave it out",
    "web_search_options": "this service does not browse; leave it out",
}
# Values of refused fields that ask for nothing, as null does: clients send them as defaults.
_NOTHING: Mapping[str, Any] = {"echo": False, "modalities": ["text"], "use_beam_search": False}


def fields_of(endpoint: str) -> frozenset[str]:
    """The names an endpoint's body may have."""
    return _FIELDS[endpoint]


_FIELDS = {endpoint: frozenset(model.model_fields) | IGNORED[endpoint] for endpoint, model in BODIES.items()}
_NESTED_NAMES = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "type", "text", "image_url", "url", "detail", "function"}
    | {"description", "parameters", "strict", "json_schema", "schema", "json", "regex", "choice", "grammar"}
    | {"arguments"}
)


def check_body(endpoint: str, body: object, tenant: Tenant) -> dict[str, Any]:
    """The body as the engine may have it: known fields only, nulls and ignored fields left out.

    Raises InvalidRequest, or Refusal with `quota_exceeded` (a limit of the tenant) or `not_authorized`.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object")
    known = _FIELDS[endpoint]
    dropped: frozenset[str] | set[str] = IGNORED[endpoint]
    unknown = body.keys() - known
    if unknown:
        dropped = dropped | _settle_unknown(endpoint, body, sorted(unknown), known)
    clean = {key: value for key, value in body.items() if value is not None and key not in dropped}
    try:
        BODIES[endpoint].__pydantic_validator__.validate_python(clean)
    except ValidationError as error:
        raise InvalidRequest(_explain(endpoint, clean, error, known)) from None
    if endpoint != EMBEDDINGS:
        _check_output(endpoint, clean, tenant)
        if endpoint == CHAT:
            _check_chat(clean, tenant)
    return clean


def _settle_unknown(endpoint: str, body: dict[str, Any], unknown: list[Any], known: frozenset[str]) -> set[str]:
    """The refused fields that ask for nothing; raises InvalidRequest for the first that asks for something."""
    nothing = set()
    for key in unknown:
        value = body[key]
        if key in ADVICE and (value is None or (type(value) is not int and value == _NOTHING.get(key))):
            nothing.add(key)
        elif key in ADVICE:
            raise InvalidRequest(f"body.{key} is refused: {ADVICE[key]}")
        else:
            raise InvalidRequest(f"{unknown_field('body.', key, known)} ({endpoint})")
    return nothing


def _explain(endpoint: str, clean: dict[str, Any], error: ValidationError, known: frozenset[str]) -> str:
    prompt = clean.get("prompt")
    if endpoint == COMPLETIONS and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return "body.prompt must be one prompt (text, or the token ids of one); publish one job per prompt"
    return problem(error, "body", known | _NESTED_NAMES)


def _check_output(endpoint: str, clean: dict[str, Any], tenant: Tenant) -> None:
    limits = tenant.limits
    n = clean.get("n", 1)
    if n > limits.n:
        raise Refusal(
            ErrorCode.QUOTA_EXCEEDED, f"body.n is {n}, the limit of this tenant is {limits.n}; send more jobs instead"
        )
    asked = clean.get("max_completion_tokens", clean.get("max_tokens"))
    if clean.get("min_tokens", 0) > (asked or MAX_OUTPUT_TOKENS):
        raise InvalidRequest("body.min_tokens must not be greater than body.max_tokens")
    if limits.output_tokens is not None:
        if asked is not None and asked > limits.output_tokens:
            raise Refusal(
                ErrorCode.QUOTA_EXCEEDED,
                f"body.max_tokens is {asked}, the limit of this tenant is {limits.output_tokens}; ask for fewer",
            )
        if asked is None and (endpoint == CHAT or limits.output_tokens < 16):  # plain completions default to 16
            clean["max_tokens"] = limits.output_tokens
    form = clean.get("response_format")
    if form is not None and form["type"] == "json_schema":
        check_schema(form["json_schema"]["schema"], "body.response_format.json_schema.schema", limits.schema_bytes)
    outputs = clean.get("structured_outputs")
    if outputs is not None:
        if outputs.get("json") is not None:
            check_schema(outputs["json"], "body.structured_outputs.json", limits.schema_bytes)
        for name in ("grammar", "choice"):
            if outputs.get(name) is not None:
                check_size(outputs[name], f"body.structured_outputs.{name}", limits.schema_bytes)
        for name in ("regex", "whitespace_pattern"):
            if outputs.get(name) is not None:
                check_regex(outputs[name], f"body.structured_outputs.{name}")


def _check_chat(clean: dict[str, Any], tenant: Tenant) -> None:
    for place, tool in enumerate(clean.get("tools", ())):
        parameters = tool["function"].get("parameters")
        if parameters is not None:
            check_schema(parameters, f"body.tools[{place}].function.parameters", tenant.limits.schema_bytes)
    kwargs = clean.get("chat_template_kwargs")
    if kwargs is not None:
        if not tenant.chat_template_kwargs:
            raise Refusal(
                ErrorCode.NOT_AUTHORIZED,
                "body.chat_template_kwargs is not allowed for this tenant; leave it out, or ask the operator",
            )
        check_schema(kwargs, "body.chat_template_kwargs", tenant.limits.schema_bytes)
    messages = clean["messages"]
    for place, message in enumerate(messages):
        content = message.get("content")
        if type(content) is list:
            for number, part in enumerate(content):
                if part["type"] in URL_PARTS:
                    _check_url(part[part["type"]]["url"], f"body.messages[{place}].content[{number}]", tenant)
    clean["messages"] = [_without_nulls(message) for message in messages]


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    if None not in message.values() and "annotations" not in message:
        return message
    return {key: value for key, value in message.items() if value is not None and key != "annotations"}


def _check_url(url: str, path: str, tenant: Tenant) -> None:
    """Only inline data, and https on a host that the tenant may reach: the engine would fetch anything else (SSRF)."""
    if url.startswith("data:"):
        return
    try:
        parts = urlsplit(url)
        allowed = (
            parts.scheme == "https"
            and parts.hostname in tenant.media_domains
            and parts.port in (None, 443)
            and parts.username is None
            and "\\" not in url
        )
    except ValueError:
        allowed = False
    if not allowed:
        raise InvalidRequest(
            f"{path} is media by URL, which is refused; send it inline as a data: URL, or ask the operator for its host"
        )
