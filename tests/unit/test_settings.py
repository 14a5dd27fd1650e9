"""Settings out of range are refused at the start: one line each, with the variable's name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from service.cli import build
from service.settings import Misconfigured, Settings

# Where 0 means something: any free port, at once, none, all of it.
MAY_BE_ZERO = {
    "HEADRACE_HTTP_PORT",
    "HEADRACE_DRAIN_S",
    "HEADRACE_DELIVERY__LINGER_MS",
    "HEADRACE_DUPLICATES__WINDOW_S",
    "HEADRACE_DUPLICATES__WINDOW_JOBS",
    "HEADRACE_ENGINE__RESERVE",
    "HEADRACE_ENGINE__SIM_START_S",
    "HEADRACE_ENGINE__SIM_STEP_BASE_S",
    "HEADRACE_ENGINE__SIM_STEP_PER_SEQ_S",
    "HEADRACE_ENGINE__SIM_STEP_PER_PREFILL_TOKEN_S",
    "HEADRACE_ENGINE__SIM_STEP_PER_KV_TOKEN_S",
    "HEADRACE_SCHEDULER__PROMPT_COST",
    "HEADRACE_TELEMETRY__SAMPLE",
    "HEADRACE_TELEMETRY__SLOW_S",
}


def numeric(model: type[BaseModel], prefix: str = "HEADRACE_") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numeric(kind, f"{prefix}{name.upper()}__")
        elif {int, float} & {kind, *get_args(kind)} or any(int in get_args(arg) for arg in get_args(kind)):
            yield f"{prefix}{name.upper()}", field


NUMERIC = dict(numeric(Settings))


def told(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Misconfigured) as found:
        Settings.read()
    return str(found.value)


def test_the_walk_finds_all_of_them() -> None:
    assert len(NUMERIC) > 45
    assert {"HEADRACE_DRAIN_S", "HEADRACE_ENGINE__MAX_MODEL_LEN", "HEADRACE_KAFKA__SESSION_TIMEOUT_MS"} <= set(NUMERIC)
    assert set(NUMERIC) >= MAY_BE_ZERO


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-inf", "1e30", "x"])
@pytest.mark.parametrize("variable", NUMERIC)
def test_no_numeric_setting_takes_what_is_no_number_of_its_kind(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = told(variable, value, monkeypatch)
    assert "\n" not in line
    assert line.startswith(f"{variable}: must be ")
    assert "correct it, or leave it out" in line


@pytest.mark.parametrize("variable", sorted(set(NUMERIC) - MAY_BE_ZERO))
def test_nothing_that_is_needed_can_be_zero(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(variable, "0", monkeypatch).startswith(f"{variable}: must be ")


@pytest.mark.parametrize("variable", sorted(MAY_BE_ZERO))
def test_zero_is_taken_where_it_means_something(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0")
    Settings.read()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("HEADRACE_LOG_LEVEL", "foo", "must be 'DEBUG', 'INFO'"),
        ("HEADRACE_LOG_FORMAT", "xml", "must be 'logfmt'"),
        ("HEADRACE_HTTP_PORT", "65536", "65535"),
        ("HEADRACE_POOL", "a/b", "must"),
        ("HEADRACE_POOL", "", "must"),
        ("HEADRACE_WORKER", "", "must"),
        ("HEADRACE_TELEMETRY__TENANT_LABELS", '["acme"', "must be a list"),
        ("HEADRACE_TELEMETRY", "acme", "must be a JSON object"),
        ("HEADRACE_TELEMETRY__OTLP_ENDPOINT", "garbage", "must be empty or a URL"),
        ("HEADRACE_TELEMETRY__SAMPLE", "2", "must be less"),
        ("HEADRACE_KAFKA__BOOTSTRAP", "127.0.0.1:99999", "must be host:port"),
        ("HEADRACE_KAFKA__BOOTSTRAP", "a:9092,,b:9092", "must be host:port"),
        ("HEADRACE_KAFKA__HEARTBEAT_INTERVAL_MS", "20000", "half of session_timeout_ms"),
        ("HEADRACE_STORE__ENDPOINT", "http://x:1/", "must be host:port"),
        ("HEADRACE_LEDGER__COMMIT_INTERVAL_S", "100", "must be at most 3.5"),
    ],
)
def test_what_a_worker_cannot_run_with_is_one_line(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = told(variable, value, monkeypatch)
    group = variable.rpartition("__")[0] or variable
    assert line.startswith(group) and says in line and "\n" not in line


def test_secrets_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA", '{"password": 77123}')
    assert "77123" not in told("HEADRACE_LOG_LEVEL", "s3cr3t", monkeypatch)


@pytest.mark.parametrize("value", ['["acme", "globex"]', "acme,globex", " acme , globex,"])
def test_a_list_is_json_or_names_with_commas(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TELEMETRY__TENANT_LABELS", value)
    assert Settings.read().telemetry.tenant_labels == ("acme", "globex")


@pytest.mark.parametrize("address", ["s3.example.com", "kafka:9092", "[::1]:9092", "127.0.0.1:1"])
def test_addresses_of_all_kinds_are_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STORE__ENDPOINT", address)
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP", f"{address},{address}")
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    assert Settings.read().store.endpoint == address


def test_the_defaults_are_finite_and_hold_their_own_bounds() -> None:
    assert all(field.default is None or math.isfinite(field.default) for field in NUMERIC.values())
    Settings.model_validate(Settings().model_dump())


def test_the_command_says_it_in_one_line_and_exits_as_for_other_wrong_usage() -> None:
    found = CliRunner().invoke(
        build(), ["worker"], env={"HEADRACE_LOG_LEVEL": "foo", "HEADRACE_KAFKA__BOOTSTRAP": "127.0.0.1:9"}
    )
    assert found.exit_code == 2
    assert found.stderr.startswith("headrace: HEADRACE_LOG_LEVEL: must be") and found.stderr.count("\n") == 1
