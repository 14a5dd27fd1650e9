"""Machines that the simulated engine can pass for: constants fitted to measurements of a real vLLM. Runs nothing.

`h200-8b`: one NVIDIA H200, vLLM 0.26, the shape of Qwen3-8B in bf16, CUDA graphs; 1,000 requests of 128 tokens in and
128 out. Measured there, and what the constants give:

                         64 in flight    256 in flight   1,000 at once, 512 slots
    seconds in all       15.3  15.7      8.95  8.79      7.90  7.65
    first token, mean s  0.193 0.199     0.434 0.392     2.74  2.80
    whole job, mean s    0.953 0.983     2.19  2.21      6.02  5.97

Reading the KV cache is not fitted but computed: 147,456 bytes a token at 4.3 TB/s. First tokens of prompts that are
mostly cached come too early (0.055 s instead of 0.103 s at 32 in flight): what the front-end spends on a request is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.batch import StepTime
from service.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Profile:
    time: StepTime
    kv_tokens: int  # that fit into the KV cache


PROFILES = {
    "h200-8b": Profile(
        StepTime(base=0.0045, per_seq=20e-6, per_prefill_token=24e-6, per_kv_token=34e-9), kv_tokens=829_056
    )
}


def chosen(settings: EngineSettings) -> Profile:
    """The named profile, or what the settings say one by one."""
    if settings.sim_profile != "custom":
        return PROFILES[settings.sim_profile]
    time = StepTime(
        settings.sim_step_base_s,
        settings.sim_step_per_seq_s,
        settings.sim_step_per_prefill_token_s,
        settings.sim_step_per_kv_token_s,
    )
    return Profile(time, settings.sim_kv_tokens)
