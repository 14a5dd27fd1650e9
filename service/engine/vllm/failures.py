"""Why the engine did not start, in one line that says what to change. A table of what vLLM and its children say.

Most causes exist only in the log of a child process (`arguments.log_config`). Imports no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LOG_TAIL = 64 * 1024  # characters of the children's log that are looked at
CAUSE_MAX = 240  # characters of a cause that the table does not know

CONTEXT = "HEADRACE_ENGINE__MAX_MODEL_LEN"
MODEL = "HEADRACE_ENGINE__MODEL"
KV_CPU = "HEADRACE_ENGINE__KV_CACHE_GIB"
KV_GPU = "HEADRACE_ENGINE__GPU_MEMORY_UTILIZATION"
PARALLEL = "HEADRACE_ENGINE__TENSOR_PARALLEL_SIZE"
DTYPE = "HEADRACE_ENGINE__DTYPE"
BATCH = "HEADRACE_ENGINE__MAX_NUM_BATCHED_TOKENS"
SLOTS = "HEADRACE_ENGINE__MAX_NUM_SEQS"


@dataclass(frozen=True, slots=True)
class Failure:
    """`said` is a pattern in vLLM's words; `advice` is ours, with the pattern's named groups filled in."""

    name: str
    said: re.Pattern[str]
    advice: str


def _failure(name: str, said: str, advice: str) -> Failure:
    return Failure(name, re.compile(said, re.IGNORECASE), advice)


# The first match wins: special causes stand before general ones.
FAILURES = (
    _failure(
        "model is no folder",
        r"model folder (?P<path>.*) does not exist",
        f"the model folder {{path}} does not exist: set {MODEL} to a folder in Hugging Face layout (config.json, "
        "tokenizer.json, *.safetensors)",
    ),
    _failure(
        "no configuration",
        r"Invalid repository ID or local directory|Can't load the configuration of|Repo id must be in the form",
        f"the model folder holds no config.json: set {MODEL} to a folder in Hugging Face layout",
    ),
    _failure(
        "broken configuration",
        r"config file at .* is not a valid JSON|JSONDecodeError",
        "the model's config.json or tokenizer files are not valid JSON: copy the model again",
    ),
    _failure(
        "unknown architecture",
        r"model type `(?P<kind>[^`]+)` but Transformers does not recognize|"
        r"architectures \[?(?P<arch>[^\]]+)\]? are not supported",
        "this vLLM does not know the model's architecture ({kind}{arch}): serve another model or a newer vLLM",
    ),
    _failure(
        "model brings its own code",
        r"trust_remote_code=True",
        "the model needs code from its own folder, which is never run: convert it to a supported architecture",
    ),
    _failure(
        "no tokenizer",
        r"Couldn't instantiate the backend tokenizer|Can't load tokenizer|tokenizer.*(?:not found|does not exist)",
        "the model folder holds no usable tokenizer: add tokenizer.json and tokenizer_config.json",
    ),
    _failure(
        "no weights",
        r"Cannot find any model weights",
        "the model folder holds no weights: add the *.safetensors files",
    ),
    _failure(
        "broken weights",
        r"unpack requires a buffer|SafetensorError|Error while deserializing header|MetadataIncompleteBuffer|"
        r"size of tensor .* must match|shape mismatch|KeyError: 'model\.",
        "the model's weights are damaged or belong to another config.json: copy the model again",
    ),
    _failure(
        "chat template",
        r"TemplateSyntaxError|Error when compiling Jinja template|UndefinedError",
        "the model's chat template is not valid Jinja: mend chat_template.jinja (or chat_template in "
        "tokenizer_config.json) in the model folder",
    ),
    _failure(
        "parser does not fit",
        r"cannot be used with the tokenizer",
        "the model's tokenizer lacks what the tool or reasoning parser needs: choose the parsers of this model with "
        "HEADRACE_ENGINE__TOOL_PARSER and HEADRACE_ENGINE__REASONING_PARSER, or set them to null",
    ),
    _failure(
        "unknown tool parser",
        r"(?:tool_parser:|Tool parser )'(?P<parser>[^']*)'",
        "vLLM has no tool parser {parser!r}: set HEADRACE_ENGINE__TOOL_PARSER to one of its names, e.g. hermes",
    ),
    _failure(
        "unknown reasoning parser",
        r"(?:reasoning_parser_name=|Reasoning parser )'(?P<parser>[^']*)'",
        "vLLM has no reasoning parser {parser!r}: set HEADRACE_ENGINE__REASONING_PARSER to one of its names, "
        "e.g. qwen3",
    ),
    _failure(
        "context over the model's",
        r"max_model_len \((?P<wanted>\d+)\) is greater than the derived max_model_len "
        r"\(max_position_embeddings=(?P<most>\d+)",
        f"the model's context is {{most}} tokens: set {CONTEXT} to at most that, not {{wanted}}",
    ),
    _failure(
        "context over the KV cache",
        r"max seq len \((?P<wanted>\d+)\).*estimated maximum model length is (?P<most>\d+)",
        f"the KV cache is too small for one request of {{wanted}} tokens: set {CONTEXT} to at most {{most}}, or give "
        f"it more memory with {KV_CPU} (CPU) or {KV_GPU} (GPU)",
    ),
    _failure(
        "context far over the KV cache",
        r"max seq len \((?P<wanted>\d+)\)",
        f"the KV cache is too small for one request of {{wanted}} tokens: lower {CONTEXT}, or give it more memory with "
        f"{KV_CPU} (CPU) or {KV_GPU} (GPU)",
    ),
    _failure(
        "no memory for the KV cache",
        r"No available memory for the cache blocks",
        f"no memory is left for the KV cache after the weights: raise {KV_CPU} (CPU) or {KV_GPU} (GPU), or serve a "
        "smaller model",
    ),
    _failure(
        "host memory",
        r"Available memory on node \d+ \((?P<free>[\d.]+)/[\d.]+ GiB\).*?less than "
        r"(?:requested memory for kv|desired CPU memory utilization) \((?:[\d.]+, )?(?P<wanted>[\d.]+) GiB\)",
        f"{{wanted}} GiB of memory are asked for the KV cache and {{free}} GiB are free: lower {KV_CPU}, or end what "
        "else uses the memory",
    ),
    _failure(
        "GPU memory taken",
        r"Free memory on device (?:\S+ )?\((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\).*?"
        r"\((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)",
        f"{{free}} of {{all}} GiB of GPU memory are free and {{wanted}} GiB are asked for: end what else uses the GPU, "
        f"or lower {KV_GPU} (now {{share}})",
    ),
    _failure(
        "out of GPU memory",
        r"CUDA out of memory|HIP out of memory|torch\.OutOfMemoryError|CUDA error: out of memory|"
        r"CUBLAS_STATUS_ALLOC_FAILED",
        f"the GPU's memory does not hold the model: lower {KV_GPU}, {SLOTS} or {BATCH}, spread the model with "
        f"{PARALLEL}, or end what else uses the GPU",
    ),
    _failure(
        "out of memory",
        r"Cannot allocate memory|MemoryError|can't allocate memory|proc\(s\): \{[^}]*: -9[,}]",
        f"the host's memory does not hold the model (a process of the engine was killed or could not allocate): lower "
        f"{KV_CPU}, or take a larger machine",
    ),
    _failure(
        "shared memory",
        r"No space left on device|proc\(s\): \{[^}]*: -7[,}]|/dev/shm|Bus error",
        "shared memory is too small for the engine's processes: give /dev/shm at least 1 GiB (containers: "
        "--shm-size=1g, Kubernetes: an emptyDir with medium Memory), and free disk space in the temporary folder",
    ),
    _failure(
        "heads and tensor parallel",
        r"(?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<size>\d+)\)",
        f"{PARALLEL}={{size}} does not divide the model's {{heads}} attention heads: set it to a divisor of {{heads}}",
    ),
    _failure(
        "too few devices",
        r"World size \((?P<size>\d+)\) is larger than the number of|"
        r"Not enough allowed NUMA nodes to bind threads of (?P<ranks>\d+)|invalid device ordinal",
        f"the machine has fewer devices than {PARALLEL} asks for ({{size}}{{ranks}}): lower it",
    ),
    _failure(
        "no device",
        r"No CUDA GPUs are available|Found no NVIDIA driver|Failed to infer device type|no CUDA-capable device|"
        r"Device string must not be empty|CUDA driver version is insufficient|CUDA initialization",
        "no usable GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or install the CPU build (extra `cpu`)",
    ),
    _failure(
        "dtype",
        r"dtype\.literal|Input should be 'auto', 'half'|Unknown dtype|Bfloat16 is only supported on|"
        r"(?:bfloat16|float16|torch\.\w+) is not supported (?:for|on|by)|dtype .* is not supported",
        f"the data type is not supported by this model or device: set {DTYPE} to auto, bfloat16, float16 or float32",
    ),
    _failure(
        "quantisation",
        r"quantization method .* (?:is )?not supported|Unknown quantization method|Minimum capability: \d+",
        "the model's quantisation is not supported on this device: take another build of the model",
    ),
    _failure(
        "batch smaller than slots",
        r"max_num_batched_tokens \((?P<tokens>\d+)\) must be greater than or equal to max_num_seqs \((?P<slots>\d+)\)",
        f"{BATCH}={{tokens}} is below {SLOTS}={{slots}}: raise the first or lower the second",
    ),
    _failure(
        "main guard",
        r"before the\s+current process has finished its bootstrapping phase",
        'the program that starts the engine lacks `if __name__ == "__main__":`; start it with `headrace worker`',
    ),
    _failure(
        "too slow",
        r"Timed out waiting for engine core|TimeoutError",
        "the engine did not come up in time: weights on a slow disk, or too few cores; VLLM_ENGINE_READY_TIMEOUT_S "
        "gives it longer (seconds, now 600)",
    ),
    _failure(
        "interconnect",
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|DistBackendError",
        f"the GPUs cannot talk to each other (NCCL): run with NCCL_DEBUG=INFO to see why, or set {PARALLEL}=1",
    ),
    _failure(
        "version",
        r"is not supported: none of .* exists|undefined symbol|cannot open shared object file|No module named 'vllm",
        "vLLM is missing or of a version that does not fit: install the locked environment (`make`)",
    ),
)

# What only says that there is a cause elsewhere.
_EMPTY = re.compile(
    r"initialization failed|see (?:the )?(?:root cause|stack trace)|died unexpectedly|failed to start", re.I
)
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")


def explain(error: BaseException, log: str = "") -> str:
    """One line: what is wrong and what to change. `log` holds what vLLM's processes logged during this start."""
    lines = [*_causes(error), *_spoken(log)]
    text = "\n".join(lines)
    for failure in FAILURES:
        if match := failure.said.search(text):
            found = {name: value or "" for name, value in match.groupdict().items()}
            return failure.advice.format(**found)
    cause = next((line for line in reversed(lines) if _ERROR_LINE.match(line) and not _EMPTY.search(line)), lines[0])
    cause = " ".join(cause.split())[:CAUSE_MAX]
    return f"the engine did not start: {cause} (the log above has the whole of it)"


def _causes(error: BaseException | None) -> Iterator[str]:
    """The error and what caused it, one line each, without pydantic's dumps of its input."""
    while error is not None:
        said = " ".join(str(error).split())
        yield f"{type(error).__name__}: {said.split(' [type=')[0]}"
        error = error.__cause__ or error.__context__


def _spoken(log: str) -> Iterator[str]:
    """The errors of a log, without the frames of their tracebacks: quoted source would match the table's patterns."""
    for line in log.splitlines():
        if line and not line.startswith((" ", "\t")) and " WARNING " not in line[:40]:
            yield line
