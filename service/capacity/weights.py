"""How many bytes a model's weights take once loaded: from its files' headers, else from its config. Loads none of them.

A safetensors file begins with the length of a JSON header (8 bytes, little-endian) that names every tensor's type and
shape; so a 100 GB model is measured by reading some kilobytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from service.capacity.shape import Config, Unreadable, dtype_of, size_of, text_part

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# A header of more is no header: the file is damaged, or not safetensors.
MAX_HEADER = 100 << 20

# Bits of one element as stored. Floats of 16 bits and more are converted to the engine's dtype while they are loaded.
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_PACKED = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}


@dataclass(frozen=True, slots=True)
class Weights:
    parameters: int  # stored values; those of a quantised model may be packed several in one
    floats: int  # of them such as take the engine's dtype
    packed_bytes: int  # what all others take, as stored
    source: str  # where the count is from

    def bytes(self, dtype: str) -> int:
        return self.floats * size_of(dtype) + self.packed_bytes


def read_config(folder: Path) -> dict[str, Any]:
    """Raises Unreadable."""
    try:
        config = orjson.loads((folder / CONFIG).read_bytes())
    except OSError:
        raise Unreadable(f"{folder} has no {CONFIG}: name a model's folder in Hugging Face layout") from None
    except orjson.JSONDecodeError:
        config = None
    if not isinstance(config, dict):
        raise Unreadable(f"{folder / CONFIG} is not a JSON object")
    return config


def weights_of(folder: Path, config: Config) -> Weights:
    """From the files if all are there, from the index if only that is, else estimated. Raises Unreadable."""
    index = _index(folder)
    names = sorted(set(index["weight_map"].values())) if index else sorted(p.name for p in folder.glob("*.safetensors"))
    if names and all((folder / name).is_file() for name in names):
        stored: Counter[str] = Counter()
        for name in names:
            stored.update(_elements(folder / name))
        return _weigh(stored, "the weight files")
    if index and isinstance(total := index.get("metadata", {}).get("total_size"), int | float):
        values = int(total) // size_of(dtype_of(config))
        if config.get("quantization_config"):
            return Weights(values, 0, int(total), INDEX)
        return Weights(values, values, 0, INDEX)
    values = parameters(config)
    return Weights(values, values, 0, f"estimated from {CONFIG}: there are no weight files")


def _index(folder: Path) -> dict[str, Any] | None:
    try:
        index = orjson.loads((folder / INDEX).read_bytes())
        return index if isinstance(index["weight_map"], dict) else None
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _elements(file: Path) -> Counter[str]:
    """Elements by type, from the file's header. Raises Unreadable."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError
            header: Mapping[str, Any] = orjson.loads(opened.read(length))
            found: Counter[str] = Counter()
            for name, tensor in header.items():
                if name != "__metadata__":
                    found[tensor["dtype"]] += math.prod(tensor["shape"])
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable(f"{file} is damaged, or not a safetensors file") from None


def _weigh(stored: Mapping[str, int], source: str) -> Weights:
    floats = sum(count for kind, count in stored.items() if kind in _FLOATS)
    packed = sum(count * _PACKED.get(kind, 8) // 8 for kind, count in stored.items() if kind not in _FLOATS)
    return Weights(sum(stored.values()), floats, packed, source)


def parameters(config: Config) -> int:
    """Parameters of a decoder with gated feed-forward layers, dense or with experts. Raises Unreadable.

    Exact for the Llama, Qwen, Mistral and DeepSeek families, but for a few thousand of gates' biases.
    """
    text = text_part(config)
    try:
        hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
        vocabulary, inner = text["vocab_size"], text.get("intermediate_size", 4 * text["hidden_size"])
    except KeyError as missing:
        raise Unreadable(f"{CONFIG} has no {missing.args[0]}, and there are no weight files") from None
    embeddings = vocabulary * hidden * (1 if _tied(config, text) else 2)
    per_layer = _attention(text, hidden, heads) + 2 * hidden  # two norms
    experts = text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0
    dense = 3 * hidden * inner
    if not experts:
        return int(embeddings + layers * (per_layer + dense) + hidden)
    width = text.get("moe_intermediate_size") or inner
    shared = (text.get("n_shared_experts") or 0) * width + (text.get("shared_expert_intermediate_size") or 0)
    sparse = 3 * hidden * (experts * width + shared) + hidden * experts
    first = min(layers, text.get("first_k_dense_replace") or 0)
    return int(embeddings + layers * per_layer + first * dense + (layers - first) * sparse + hidden)


def _tied(config: Config, text: Config) -> bool:
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    # transformers ties them where the file says nothing; the Gemma family relies on that, all others say so.
    return bool(tied) if tied is not None else str(text.get("model_type", "")).startswith("gemma")


def _attention(text: Config, hidden: int, heads: int) -> int:
    if rank := text.get("kv_lora_rank"):
        nope, rope, values = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        query = heads * (nope + rope)
        asked = text.get("q_lora_rank")
        queries = hidden * asked + asked + asked * query if asked else hidden * query
        keys = hidden * (rank + rope) + rank + rank * heads * (nope + values)
        return int(queries + keys + heads * values * hidden)
    head = text.get("head_dim") or hidden // heads
    own = text.get("num_key_value_heads") or heads
    kind = str(text.get("model_type", ""))
    biased = text.get("attention_bias") or kind.startswith("qwen2")
    biases = (heads + 2 * own) * head if biased else 0
    norms = 2 * head if kind.startswith("qwen3") else 0
    return int(hidden * head * (2 * heads + 2 * own) + biases + norms)
