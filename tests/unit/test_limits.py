"""A tenant's hard bounds: each is held, with its code, and with the limit and the value in the message."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.bodies import check_body
from schemas.errors import ErrorCode, Refusal
from schemas.names import CHAT, COMPLETIONS
from schemas.tenants import Tenant, TenantLimits
from service.engine.protocol import Prepared
from service.intake.bounds import Bounds
from service.intake.verdict import Refused
from service.job import Job
from tests.unit.jobs import job
from tests.unit.test_intake import Door
from tests.unit.test_intake import job as record_of

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "description": "x" * 100}


def limited(**limits: Any) -> Tenant:
    return Tenant(id="acme", limits=TenantLimits(**limits))


@pytest.mark.parametrize(
    "limits, body, told",
    [
        ({"n": 2}, {"n": 3}, ("body.n", "3", "2")),
        ({"output_tokens": 10}, {"max_tokens": 11}, ("body.max_tokens", "11", "10")),
        ({"output_tokens": 10}, {"max_completion_tokens": 11}, ("11", "10")),
        (
            {"schema_bytes": 50},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ("response_format.json_schema.schema", "134", "50"),
        ),
        ({"schema_bytes": 50}, {"structured_outputs": {"json": SCHEMA}}, ("structured_outputs.json", "134", "50")),
        (
            {"schema_bytes": 50},
            {"structured_outputs": {"grammar": "x" * 51}},
            ("structured_outputs.grammar", "51", "50"),
        ),
        (
            {"schema_bytes": 50},
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": SCHEMA}}]},
            ("tools[0]", "134", "50"),
        ),
    ],
)
def test_a_body_over_a_bound_is_told_which_how_much_and_what_is_allowed(
    limits: dict[str, int], body: dict[str, Any], told: tuple[str, ...]
) -> None:
    with pytest.raises(Refusal) as refused:
        check_body(CHAT, {"model": "m", "messages": MESSAGES, **body}, limited(**limits))
    assert refused.value.code == ErrorCode.QUOTA_EXCEEDED
    assert all(word in refused.value.message for word in told), refused.value.message


@pytest.mark.parametrize(
    "limits, body", [({"n": 2}, {"n": 2}), ({"output_tokens": 10}, {"max_tokens": 10}), ({"schema_bytes": 64}, {})]
)
def test_what_keeps_to_a_bound_passes(limits: dict[str, int], body: dict[str, Any]) -> None:
    assert check_body(CHAT, {"model": "m", "messages": MESSAGES, **body}, limited(**limits))


def test_a_job_that_names_no_output_length_gets_the_tenants_bound() -> None:
    assert check_body(CHAT, {"model": "m", "messages": MESSAGES}, limited(output_tokens=10))["max_tokens"] == 10
    assert check_body(COMPLETIONS, {"model": "m", "prompt": "x"}, limited(output_tokens=10))["max_tokens"] == 10
    assert "max_tokens" not in check_body(COMPLETIONS, {"model": "m", "prompt": "x"}, limited(output_tokens=100))


class Engine:
    async def prepare(self, job: Job) -> Prepared:
        return Prepared(prompt_tokens=11, max_tokens=5, n=1)


@pytest.mark.parametrize("most", [None, 11, 12])
async def test_a_prompt_within_the_bound_is_prepared(most: int | None) -> None:
    assert (await Bounds(Engine(), {"acme": limited(prompt_tokens=most)}).prepare(job())).prompt_tokens == 11
    assert (await Bounds(Engine(), {}).prepare(job())).prompt_tokens == 11, "a tenant that left while its job waited"


async def test_a_prompt_over_the_bound_is_refused_when_its_tokens_are_known() -> None:
    with pytest.raises(Refusal) as refused:
        await Bounds(Engine(), {"acme": limited(prompt_tokens=10)}).prepare(job())
    assert refused.value.code == ErrorCode.QUOTA_EXCEEDED
    assert "11" in refused.value.message and "10" in refused.value.message


def test_a_disabled_tenant_and_a_model_it_may_not_use_are_not_authorized() -> None:
    disabled = Door().judge(record_of(tenant="initech"))
    assert isinstance(disabled, Refused) and disabled.refusal.code == ErrorCode.NOT_AUTHORIZED
    assert "disabled" in disabled.refusal.message
    foreign = Door().judge(record_of(tenant="globex"))
    assert isinstance(foreign, Refused) and foreign.refusal.code == ErrorCode.NOT_AUTHORIZED
    assert "(other)" in foreign.refusal.message, "which ones it may use"
