"""What of a model's config.json decides memory: layers, heads, windows. Pure; imports neither torch nor transformers.

Each group of `Attention` layers keeps the same for every token: full attention 2 × kv_heads × head_dim numbers, a
latent (MLA) one vector for all heads, a window no more than its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

# Names under which families of models state the same thing, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_NESTED = ("text_config", "llm_config", "language_config")  # of models that also see or hear

# Of every so many layers one sees everything; older files of these families do not list their layers.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "half": 16, "float": 32}


class Unreadable(ValueError):
    """The model's files do not say what is needed. One line: what is missing."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that keep the same amount per token."""

    layers: int
    heads: int  # key-value heads; 1 for a latent
    width: int  # numbers kept per head and token: 2 × head_dim, or the latent's width
    window: int | None = None  # tokens that stay visible; None = all
    latent: bool = False  # one vector for all heads: each GPU of a tensor-parallel group keeps the whole

    def numbers(self, tensor_parallel: int = 1) -> int:
        """Numbers kept per token on one GPU. With fewer heads than GPUs, heads are kept more than once."""
        heads = self.heads if self.latent else max(1, -(-self.heads // tensor_parallel))
        return self.layers * heads * self.width


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    context: int | None  # tokens, as the config states
    dtype: str
    attention: tuple[Attention, ...]
    notes: tuple[str, ...] = ()  # what the formula leaves out


def text_part(config: Config) -> Config:
    """The language model's part of a config; the dtype may stand outside it."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping) and _maybe(inner, _LAYERS) is not None:
            return {"dtype": dtype_of(config), **inner}
    return config


def dtype_of(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def size_of(dtype: str) -> int:
    """Bytes of one number. Raises Unreadable."""
    if dtype not in _BITS:
        raise Unreadable(f"dtype {dtype!r} is none of {', '.join(_BITS)}")
    return _BITS[dtype] // 8


def shape_of(config: Config) -> Shape:
    """Raises Unreadable."""
    notes = []
    text = text_part(config)
    if text is not config:
        notes.append("the parts that see or hear need working memory beside this")
    layers, heads, hidden = (_int(text, names) for names in (_LAYERS, _HEADS, _HIDDEN))
    kinds = _kinds(text, layers - int(text.get("num_kv_shared_layers") or 0))
    if constant := sum(kind not in ("full", "window") for kind in kinds):
        notes.append(f"{constant} of {layers} layers keep a state of fixed size per sequence, which is not counted")
    if "index_topk" in text:
        notes.append("the sparse-attention indexer keeps a cache of its own, which is not counted")
    if config.get("quantization_config"):
        notes.append("the weights are quantised: they count as they are stored")
    attention = _attention(text, kinds, heads, hidden)
    return Shape(
        layers=layers,
        hidden=hidden,
        intermediate=int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
        vocabulary=int(text.get("vocab_size") or 0),
        context=_maybe(text, _CONTEXT),
        dtype=dtype_of(text),
        attention=attention,
        notes=tuple(notes),
    )


def _attention(text: Config, kinds: list[str], heads: int, hidden: int) -> tuple[Attention, ...]:
    latent = text.get("kv_lora_rank")
    if latent:
        own, width = 1, int(latent) + int(text.get("qk_rope_head_dim") or 0)
    else:
        own = _kv_heads(text, heads)
        width = 2 * int(text.get("head_dim") or text.get("kv_channels") or hidden // heads)
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    groups = (
        Attention(kinds.count(kind), own, width, int(window) if kind == "window" and window else None, bool(latent))
        for kind in ("full", "window")
    )
    return tuple(group for group in groups if group.layers)


def _kv_heads(text: Config, heads: int) -> int:
    stated = text.get("num_key_value_heads") or text.get("num_kv_heads")
    if stated:
        return int(stated)
    if text.get("multi_query_attention"):
        return int(text.get("multi_query_group_num") or 1)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return heads


def _kinds(text: Config, layers: int) -> list[str]:
    """`full`, `window` or `state`, layer by layer."""
    listed = text.get("layer_types")
    if isinstance(listed, list) and listed:
        names = {"full_attention": "full", "sliding_attention": "window", "chunked_attention": "window"}
        return [names.get(str(kind), "state") for kind in listed[:layers]]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full"] * layers
    first = int(text.get("max_window_layers") or 0)  # Qwen2: the layers before it see everything
    every = text.get("sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")), 0)
    if isinstance(every, int) and every > 1:
        return ["full" if (number + 1) % every == 0 else "window" for number in range(layers)]
    return ["full" if number < first else "window" for number in range(layers)]


def _maybe(config: Config, names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def _int(config: Config, names: tuple[str, ...]) -> int:
    found = _maybe(config, names)
    if not found or found < 0:
        raise Unreadable(f"config.json has no {names[0]}: this kind of model is not known to the formula")
    return found
