"""What fits: the formula against known models and against what engines reported."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.capacity import report
from service.capacity.memory import GIB, Machine, at_once, blocks, plan, token_bytes
from service.capacity.report import NoReport, compare
from service.capacity.shape import Attention, Unreadable, shape_of
from service.capacity.weights import Weights, parameters, read_config, weights_of
from service.engine.protocol import Capacity
from service.telemetry.metrics import Metrics, Readings
from tests.unit.telemetry_samples import settings

# As their config.json files state them; what the formula does not read is left out.
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN_25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
}


def machine(**more: Any) -> Machine:
    given: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "dtype": "bfloat16",
        "block": 16,
        "kv_bytes": 16 * GIB,
    }
    return Machine(**{**given, **more})


NO_WEIGHTS = Weights(0, 0, 0, "")


@pytest.mark.parametrize(
    ("config", "values", "bytes_a_token"),
    [
        (LLAMA_3_8B, 8_030_261_248, 131_072),
        (QWEN_25_7B, 7_615_616_512, 57_344),
        (DEEPSEEK_V2_LITE, 15_706_484_224, 31_104),
    ],
    ids=["Llama-3-8B", "Qwen2.5-7B", "DeepSeek-V2-Lite"],
)
def test_parameters_and_kv_bytes_of_known_models(config: dict[str, Any], values: int, bytes_a_token: int) -> None:
    assert parameters(config) == values
    assert token_bytes(shape_of(config), machine()) == bytes_a_token
    assert Weights(values, values, 0, "").bytes("bfloat16") == 2 * values


@pytest.mark.parametrize(
    ("model", "reported"),
    [
        (
            {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
            1_190_640,
        ),
        (
            {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
            829_056,
        ),
    ],
    ids=["0.6B shape", "8B shape"],
)
def test_the_formula_is_what_an_engine_on_an_h200_reported(model: dict[str, Any], reported: int) -> None:
    config = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 49152,
        "tie_word_embeddings": model["hidden_size"] == 1024,
        "max_position_embeddings": 40960,
        **model,
    }
    values = parameters(config)
    given = machine(max_model_len=2048, max_num_seqs=512, kv_bytes=None, gpu_bytes=int(140.4 * GIB), utilization=0.92)
    fits = plan(shape_of(config), Weights(values, values, 0, ""), given)
    assert fits.kv_tokens == pytest.approx(reported, rel=0.01)


def test_the_formula_is_what_an_engine_on_a_cpu_reported() -> None:
    smol = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
    fits = plan(shape_of(smol), NO_WEIGHTS, machine(max_model_len=1024, block=128, kv_bytes=GIB))
    assert (fits.kv_tokens, fits.full) == (46_592, 45.5)  # 364 blocks of 128


def test_tensor_parallel_divides_heads_but_never_a_latent() -> None:
    llama, latent = shape_of(LLAMA_3_8B), shape_of(DEEPSEEK_V2_LITE)
    assert token_bytes(llama, machine(tensor_parallel=4)) == 131_072 // 4
    assert token_bytes(llama, machine(tensor_parallel=16)) == 131_072 // 8  # each head is kept twice
    assert token_bytes(latent, machine(tensor_parallel=4)) == 31_104
    weights = Weights(8_000_000_000, 8_000_000_000, 0, "")
    given = machine(kv_bytes=None, gpu_bytes=24 * GIB, tensor_parallel=2)
    assert plan(llama, weights, given).weights == 8_000_000_000


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    shape = shape_of(GEMMA_3_4B)
    full, window = shape.attention
    assert (full.layers, window.layers, window.window) == (5, 29, 1024)
    assert shape.notes == ("the parts that see or hear need working memory beside this",)
    given = machine(max_model_len=131_072, max_num_batched_tokens=2048)
    assert blocks(full, 131_072, given) == 8192
    assert blocks(window, 131_072, given) == (1023 + 2048) // 16 + 2  # rounded up, and one for the window's beginning
    assert blocks(window, 160, given) == 10
    everything = Attention(34, 4, 512)
    assert at_once(shape, given, GIB, 131_072) > 5 * GIB / (8192 * 16 * everything.numbers() * 2)


def test_windows_are_recognised_as_each_family_writes_them() -> None:
    base = {**LLAMA_3_8B, "num_hidden_layers": 4, "sliding_window": 4096}
    mistral = shape_of({**base, "model_type": "mistral"}).attention
    assert [(group.layers, group.window) for group in mistral] == [(4, 4096)]
    off = shape_of({**base, "use_sliding_window": False}).attention
    assert [(group.layers, group.window) for group in off] == [(4, None)]
    listed = shape_of({**base, "layer_types": ["sliding_attention", "full_attention"] * 2}).attention
    assert [(group.layers, group.window) for group in listed] == [(2, None), (2, 4096)]
    mixed = shape_of({**base, "layer_types": ["linear_attention"] * 3 + ["full_attention"]})
    assert [(group.layers, group.window) for group in mixed.attention] == [(1, None)]
    assert "3 of 4 layers keep a state of fixed size" in mixed.notes[0]


def test_what_does_not_fit_is_said_with_what_would() -> None:
    fits = plan(shape_of(LLAMA_3_8B), NO_WEIGHTS, machine(kv_bytes=GIB // 2))
    assert not fits.fits and int(fits.full * fits.context) == 4096
    none = plan(shape_of(LLAMA_3_8B), Weights(1, 10**12, 0, ""), machine(kv_bytes=None, gpu_bytes=GIB))
    assert (none.kv_bytes, none.kv_tokens, none.fits) == (0, 0, False)


# -- the files


def _safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header = {name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]} for name, (kind, shape) in tensors.items()}
    raw = orjson.dumps({"__metadata__": {"format": "pt"}, **header})
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_weights_are_counted_from_the_headers_of_their_files(tmp_path: Path) -> None:
    _safetensors(tmp_path / "a.safetensors", {"x": ("F32", [10, 20]), "y": ("BF16", [5])})
    _safetensors(tmp_path / "b.safetensors", {"z": ("I8", [7]), "s": ("F8_E4M3", [3]), "n": ("BF16", [])})
    found = weights_of(tmp_path, LLAMA_3_8B)
    assert (found.parameters, found.floats, found.packed_bytes) == (216, 206, 10)
    assert found.bytes("bfloat16") == 422 and found.bytes("float32") == 834


def test_an_index_names_the_files_that_count_and_serves_without_them(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_bytes(orjson.dumps(index))
    found = weights_of(tmp_path, LLAMA_3_8B)
    assert (found.parameters, found.source) == (8_030_261_248, "model.safetensors.index.json")
    packed = weights_of(tmp_path, {**LLAMA_3_8B, "quantization_config": {}, "torch_dtype": "float16"})
    assert packed.floats == 8_030_261_248  # an empty entry quantises nothing
    quantised = weights_of(tmp_path, {**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}})
    assert quantised.bytes("bfloat16") == 16_060_522_496
    for name in ("a", "b", "consolidated"):
        _safetensors(tmp_path / f"{name}.safetensors", {name: ("BF16", [4])})
    assert weights_of(tmp_path, LLAMA_3_8B).parameters == 8  # the third file is not in the index


def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Unreadable, match="not a JSON object"):
        read_config(tmp_path)
    with pytest.raises(Unreadable, match="no num_hidden_layers"):
        shape_of({"hidden_size": 8})
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(Unreadable, match="damaged"):
        weights_of(tmp_path, LLAMA_3_8B)


# -- the engine's report

TOLD = Capacity(1024, 64, 46_592, 128, "smollm2", "vllm 0.32.0 cpu")


def scrape(readings: Readings) -> str:
    return Metrics(settings()).render(readings).decode()


def test_the_report_is_read_from_the_workers_metrics() -> None:
    told = report.read(scrape(Readings(capacity=TOLD, preemptions=3)), "here")
    assert (told.kv_tokens, told.block, told.context, told.slots, told.preemptions) == (46_592, 128, 1024, 64, 3)
    assert (told.model, told.on_cpu, told.simulated, told.full) == ("smollm2", True, False, 45.5)


def test_an_engine_that_has_not_started_reports_nothing() -> None:
    with pytest.raises(NoReport, match="no engine to report"):
        report.read(scrape(Readings()), "here")
    with pytest.raises(NoReport, match=r"no worker answers at http://127\.0\.0\.1:1"):
        report.fetch("127.0.0.1:1")


def test_only_differences_over_ten_percent_count() -> None:
    told = report.read(scrape(Readings(capacity=TOLD)), "here")
    smol = {**LLAMA_3_8B, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "head_dim": 64}
    smol["num_key_value_heads"] = 3
    given = machine(max_model_len=1024, max_num_seqs=64, block=128, kv_bytes=GIB)
    same = compare(plan(shape_of(smol), NO_WEIGHTS, given), told)
    assert [one.large for one in same] == [False] * 4 and same[0].share == 0
    half = compare(
        plan(shape_of(smol), NO_WEIGHTS, machine(max_model_len=1024, max_num_seqs=64, block=128, kv_bytes=GIB // 2)),
        told,
    )
    assert [(one.what, one.large) for one in half] == [
        ("KV tokens", True),
        ("context", False),
        ("sequences", False),
        ("full contexts", True),
    ]
    assert half[0].share == pytest.approx(-0.5)
