"""Failed starts and refused requests, in the words of vLLM → one line of ours. Most samples are from real runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from schemas.errors import ContextLengthExceeded, ErrorCode, InvalidRequest
from service.engine.vllm import arguments
from service.engine.vllm.failures import CAUSE_MAX, FAILURES, explain
from service.engine.vllm.refusals import MAX_MESSAGE, clean, refusal, unusable
from service.settings import EngineSettings

CORE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
FRAME = (
    '  File "/x/vllm/v1/worker/utils.py", line 763\n    f"Free memory on device {d} ({free}/{all} GiB) No CUDA GPUs"\n'
)

# ruff: noqa: E501 - what others said stays on its line
SAMPLES: list[tuple[str, str, str]] = [
    ("model is no folder", "FileNotFoundError: model folder '/models/none' does not exist", "/models/none"),
    (
        "no configuration",
        "1 validation error for ModelConfig   Value error, Invalid repository ID or local directory specified: '/m'.",
        "config.json",
    ),
    ("broken configuration", "It looks like the config file at '/m/config.json' is not a valid JSON file.", "JSON"),
    (
        "unknown architecture",
        "The checkpoint you are trying to load has model type `foo` but Transformers does not recognize this architecture.",
        "(foo)",
    ),
    (
        "unknown architecture",
        "Value error, Model architectures ['FooForCausalLM'] are not supported for now. Supported: dict_keys([])",
        "FooForCausalLM",
    ),
    (
        "model brings its own code",
        "Failed to load the model config. If the model is a custom model not yet available in the HuggingFace "
        "transformers library, consider setting `trust_remote_code=True` in LLM",
        "never run",
    ),
    ("no tokenizer", "ValueError: Couldn't instantiate the backend tokenizer from one of:", "tokenizer.json"),
    ("no weights", "RuntimeError: Cannot find any model weights with `/m`", "safetensors"),
    ("broken weights", "error: unpack requires a buffer of 8 bytes", "damaged"),
    (
        "broken weights",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "damaged",
    ),
    ("chat template", "jinja2.exceptions.TemplateSyntaxError: unexpected '}'", "chat_template.jinja"),
    (
        "parser does not fit",
        "TypeError: --tool-call-parser x cannot be used with the tokenizer of 'm': no token",
        "TOOL_PARSER",
    ),
    (
        "unknown tool parser",
        "Error: --enable-auto-tool-choice requires tool_parser:'nope' which has not been registered",
        "'nope'",
    ),
    ("unknown reasoning parser", "TypeError: reasoning_parser_name='nope' has not been registered", "'nope'"),
    (
        "context over the model's",
        "User-specified max_model_len (100000) is greater than the derived max_model_len "
        "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json).",
        "8192 tokens",
    ),
    (
        "context over the KV cache",
        "ValueError: To serve at least one request with the model's max seq len (200000), (4.29 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated "
        "maximum model length is 46464. Try increasing `gpu_memory_utilization`",
        "at most 46464",
    ),
    (
        "context far over the KV cache",
        "ValueError: To serve at least one request with the model's max seq len (200000), (4.29 GiB KV cache is needed",
        "200000 tokens",
    ),
    (
        "no memory for the KV cache",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "KV_CACHE_GIB",
    ),
    (
        "host memory",
        "ValueError: Available memory on node 0 (7.61/10.96 GiB) on kv cache allocation is less than requested memory for "
        "kv (200.0 GiB). Decrease --kv-cache-memory-bytes",
        "200.0 GiB of memory are asked for the KV cache and 7.61 GiB are free",
    ),
    (
        "GPU memory taken",
        "ValueError: Free memory on device cuda:0 (12.3/139.7 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 125.7 GiB). Decrease GPU memory utilization",
        "12.3 of 139.7 GiB",
    ),
    (
        "out of GPU memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
        "GPU_MEMORY_UTILIZATION",
    ),
    ("out of memory", "Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}", "killed"),
    ("shared memory", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shm-size"),
    ("shared memory", "Engine core initialization failed. Failed core proc(s): {'EngineCore': -7}", "/dev/shm"),
    (
        "heads and tensor parallel",
        "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        "9 attention heads",
    ),
    (
        "too few devices",
        "ValueError: World size (4) is larger than the number of available GPUs (1) in this node.",
        "asks for (4)",
    ),
    (
        "too few devices",
        "AssertionError: Not enough allowed NUMA nodes to bind threads of 3 local CPUWorkers. Allowed NUMA nodes are [0].",
        "asks for (3)",
    ),
    ("no device", "RuntimeError: No CUDA GPUs are available", "nvidia-smi"),
    ("no device", "RuntimeError: Failed to infer device type, please set the environment variable", "extra `cpu`"),
    (
        "dtype",
        "2 validation errors for ModelConfig dtype.literal['auto','half','float16'] Input should be 'auto', 'half'",
        "HEADRACE_ENGINE__DTYPE",
    ),
    (
        "dtype",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has",
        "HEADRACE_ENGINE__DTYPE",
    ),
    (
        "quantisation",
        "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89.",
        "quantisation",
    ),
    (
        "batch smaller than slots",
        "max_num_batched_tokens (16) must be greater than or equal to max_num_seqs (64).",
        "MAX_NUM_SEQS=64",
    ),
    (
        "main guard",
        "RuntimeError: An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase.",
        "__main__",
    ),
    ("too slow", "TimeoutError: Timed out waiting for engine core processes to start.", "VLLM_ENGINE_READY_TIMEOUT_S"),
    (
        "interconnect",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:268, unhandled cuda error",
        "NCCL_DEBUG",
    ),
    ("version", "ImportError: vLLM 9.9 is not supported: none of vllm.a:B exists", "locked environment"),
]


@pytest.mark.parametrize("name, said, expected", SAMPLES)
def test_each_known_cause_is_named_from_the_childs_log(name: str, said: str, expected: str) -> None:
    line = explain(RuntimeError(CORE), f"2026-11-30 00:19:48,176 ERROR EngineCore vllm.x failed\n{FRAME}{said}\n")
    assert expected in line and "\n" not in line
    assert next(f.name for f in FAILURES if f.said.search(said)) == name


@pytest.mark.parametrize("name, said, expected", SAMPLES)
def test_and_from_an_error_in_our_own_process(name: str, said: str, expected: str) -> None:
    try:
        try:
            raise ValueError(said)
        except ValueError as cause:
            raise RuntimeError("could not") from cause
    except RuntimeError as error:
        assert expected in explain(error)


def test_every_failure_of_the_table_has_a_sample() -> None:
    assert {f.name for f in FAILURES} == {name for name, _, _ in SAMPLES}


def test_an_unknown_cause_is_the_last_error_that_says_something() -> None:
    error = f"ZeroDivisionError: by {'zero ' * 200}"
    log = f"ERROR x\nTraceback (most recent call last):\n{FRAME}{error}\nException: WorkerProc initialization failed"
    line = explain(RuntimeError(CORE), log)
    assert line.startswith("the engine did not start: ZeroDivisionError: by zero")
    assert len(line) < CAUSE_MAX + 100


def test_warnings_of_a_start_are_not_its_cause() -> None:
    log = "2026-11-30 00:19:48,176 WARNING MainProcess vllm.config consider trust_remote_code=True\nKeyError: 'x'\n"
    assert "KeyError" in explain(RuntimeError(CORE), log)


# -------------------------------------------------------------------- refused requests


class VllmError(ValueError):
    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __str__(self) -> str:
        return f"{self.args[0]} (value=the whole of your secret prompt)"


def test_a_refusal_names_the_field_and_never_the_value() -> None:
    found = refusal(VllmError("must be in (0, 1], got 7.", "top_p"), {})
    assert isinstance(found, InvalidRequest)
    assert found.message == "top_p: must be in (0, 1], got 7."


@pytest.mark.parametrize("parameter", ["input_tokens", "input_text", None])
def test_a_prompt_over_the_context_has_its_own_code(parameter: str | None) -> None:
    found = refusal(VllmError("This model's maximum context length is 10 tokens. However, your prompt", parameter), {})
    assert isinstance(found, ContextLengthExceeded)
    assert found.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_an_output_over_the_context_is_an_invalid_request() -> None:
    message = "max_tokens=1000000000 cannot be greater than max_model_len=1024. Please request fewer output tokens."
    assert type(refusal(VllmError(message, "max_tokens"), {})) is InvalidRequest


def test_pydantics_errors_are_told_by_field_without_input() -> None:
    class Body(BaseModel):
        temperature: float
        n: int

    with pytest.raises(ValidationError) as error:
        Body.model_validate({"temperature": "my secret", "n": "x"})
    message = refusal(error.value, {}).message
    assert message.startswith("temperature: ") and "n: " in message and "secret" not in message


@pytest.mark.parametrize(
    "said, kept",
    [
        ("/models/secret/SmolLM is not a multimodal model", "… is not a multimodal model"),
        ("requires --enable-auto-tool-choice and --tool-call-parser to be set", "requires and to be set"),
        ("n must be at most 128. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.", "n must be at most 128."),
        (f"bad choice '{'x' * 60}'", "bad choice '…'"),
        ("unknown role 'bot'", "unknown role 'bot'"),
        ("two\nlines", "two lines"),
        ("This model's limit is the tokenizer's own", "This model's limit is the tokenizer's own"),
    ],
)  # fmt: skip
def test_paths_quotations_and_server_flags_are_stripped(said: str, kept: str) -> None:
    assert clean(said, {}) == kept
    assert len(clean(said * 100, {})) <= MAX_MESSAGE


SECRET = "my mother's maiden name is  Ziegelmeister-Oberhuber"


@pytest.mark.parametrize(
    "said, kept",
    [
        (f"Unexpected role: {SECRET}!", "Unexpected role: …!"),
        (f"cannot read {SECRET[:40]}… as JSON", "cannot read …… as JSON"),
        ("unknown kind 'bot' in `messages`", "unknown kind '…' in `messages`"),
        (repr({"choice": [SECRET], "n": 1}), """{'choice': ["…"], 'n': 1}"""),
    ],
)
@pytest.mark.parametrize("field", ["stop", "messages"])
def test_a_refusal_never_repeats_what_the_caller_wrote(field: str, said: str, kept: str) -> None:
    body = {"model": "m", "prompt": "x " * 200_000, field: [{"role": "bot", "content": [SECRET]}]}
    assert clean(said, body) == kept


@pytest.mark.parametrize(
    "body, said, told",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "["}}}},
            "Grammar error: regex parse error:\n    [\n    ^\nerror: unclosed character class",
            "response_format: the engine cannot follow this constraint (unclosed character class); ",
        ),
        ({"structured_outputs": {"regex": "x"}}, "Invalid type: bogus", "structured_outputs: the engine cannot "),
        ({"structured_outputs": {"regex": "error: my secret"}}, "bad: error: my secret", "structured_outputs: the "),
        (
            {"response_format": {"type": "text"}, "tools": [{}]},
            "no",
            "tools: the engine cannot follow this constraint; ",
        ),
    ],
)
def test_a_constraint_that_cannot_be_used_is_told_by_its_field(body: dict[str, Any], said: str, told: str) -> None:
    found = unusable(body, ValueError(said))
    assert type(found) is InvalidRequest and found.message.startswith(told)
    assert "secret" not in found.message and "bogus" not in found.message and "\n" not in found.message


# -------------------------------------------------------------------- what vLLM is told


@pytest.mark.parametrize(
    "asked, cpu, flags, given",
    [
        ("auto", True, {"avx2"}, "float32"),
        ("auto", True, {"avx512_bf16"}, "bfloat16"),
        ("auto", True, {"amx_bf16"}, "bfloat16"),
        ("float16", True, {"avx2"}, "float16"),
        ("auto", False, set(), "auto"),
    ],
)
def test_the_data_type_on_a_cpu_follows_its_flags(asked: str, cpu: bool, flags: set[str], given: str) -> None:
    assert arguments.dtype(EngineSettings(dtype=asked), cpu, frozenset(flags)) == given


def test_what_the_design_fixes_is_told_explicitly(tmp_path: Path) -> None:
    told = arguments.arguments(EngineSettings(max_num_seqs=5, max_num_batched_tokens=512), True, frozenset())
    wanted: dict[str, Any] = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 512,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "trust_remote_code": False,
        "enable_log_requests": False,
    }
    assert wanted.items() <= told.items()
    assert arguments.arguments(EngineSettings(), False, frozenset())["enforce_eager"] is False
    forced, defaults = arguments.environment(EngineSettings(kv_cache_gib=3), tmp_path)
    assert forced["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert forced["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert defaults["HF_HUB_OFFLINE"] == "1"


def test_warnings_of_the_children_are_kept_for_explanations_and_shown_on_debug_only(tmp_path: Path) -> None:
    handlers = arguments.log_config(tmp_path / "errors.log", logging.INFO)["handlers"]
    assert (handlers["stderr"]["level"], handlers["errors"]["level"]) == ("ERROR", "WARNING")
    assert arguments.log_config(tmp_path, logging.DEBUG)["handlers"]["stderr"]["level"] == "INFO"
