"""A scenario: who publishes which jobs and when, from a YAML file; and the plan of jobs that follows from it. Pure.

The same file, seed and run name always give the same jobs in the same order, so that two services (or a service and
the bare engine) can be given exactly the same work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.fields import TENANT_PATTERN
from schemas.names import CHAT, SCHEMA_VERSION

FOLDER = Path(__file__).parent / "scenarios"

TEXT = (
    "river water mill wheel stone bridge bank flood source delta stream current weir gate channel turbine lake rain "
    "spring valley mountain forest meadow field boat harbour anchor rope sail wind cloud storm summer winter morning"
)
WORDS = TEXT.split()

Count = Annotated[int, Field(ge=1)]


class ScenarioError(ValueError):
    """The scenario file is wrong; the message is one line naming the field."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Span(Model):
    """A whole number drawn evenly from `min` to `max`, both included. A plain number in the file means both."""

    min: Annotated[int, Field(ge=0)]
    max: Annotated[int, Field(ge=0)]

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"min": value, "max": value} if isinstance(value, int) else value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.min, self.max)


class Closed(Model):
    """Closed loop: always so many jobs on their way, the next one published when one has ended."""

    kind: Literal["closed"]
    in_flight: Count


class Poisson(Model):
    """Open loop: jobs arrive at random, `per_s` a second on average, whatever becomes of the earlier ones."""

    kind: Literal["poisson"]
    per_s: Annotated[float, Field(gt=0)]


class Burst(Model):
    """Everything at once: a backlog."""

    kind: Literal["burst"]


class TenantLoad(Model):
    """One tenant's part. Lengths are words of the prompt (about 1.3 tokens each) and tokens of the output."""

    tenant: Annotated[str, Field(pattern=TENANT_PATTERN)]
    jobs: Count
    arrivals: Annotated[Closed | Poisson | Burst, Field(discriminator="kind")]
    tier: Literal["interactive", "standard", "bulk"] = "standard"
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/completions"
    prompt_words: Span = Span(min=80, max=120)
    shared_words: Annotated[int, Field(ge=0)] = 0  # at the beginning, the same for all jobs of the tenant
    output_tokens: Span = Span(min=128, max=128)
    exact_output: bool = True  # ignore_eos: outputs have exactly the tokens drawn
    stream_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    body: dict[str, Any] = Field(default_factory=dict)  # further fields of every request body


class Scenario(Model):
    name: str
    model: str | None = None  # left out: what the generator is told
    seed: int = 7
    limit_s: Annotated[float, Field(gt=0)] = 300.0  # from the start; what has not ended by then counts as lost
    tenants: Annotated[list[TenantLoad], Field(min_length=1)]

    @property
    def jobs(self) -> int:
        return sum(load.jobs for load in self.tenants)

    @classmethod
    def load(cls, source: str | Path) -> Scenario:
        """From a file, or one of the scenarios that come with the project by its name. Raises ScenarioError."""
        path = Path(source)
        if path.suffix == "" and not path.exists():
            path = FOLDER / f"{source}.yaml"
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.yaml")))
            raise ScenarioError(f"there is no scenario {source}; there are {known}, or give a file") from None
        except yaml.YAMLError as error:
            raise ScenarioError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ScenarioError(
                f"{path.name}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
            ) from None


@dataclass(frozen=True, slots=True)
class Planned:
    """One job of a plan. `at_s`: seconds after the start; None = as soon as its tenant's closed loop allows."""

    id: str
    load: int  # index of its tenant's part
    at_s: float | None
    prompt: str
    body: dict[str, Any]
    stream: bool


def plan(scenario: Scenario, run: str, model: str) -> list[list[Planned]]:
    """The jobs of each tenant's part, in the order they are published. Prompts do not depend on `run`, ids do."""
    return [list(_part(scenario, number, run, scenario.model or model)) for number in range(len(scenario.tenants))]


def _part(scenario: Scenario, number: int, run: str, model: str) -> Iterator[Planned]:
    load = scenario.tenants[number]
    chance = random.Random(f"{scenario.seed}/{number}")
    shared = " ".join(chance.choices(WORDS, k=load.shared_words))
    at_s = 0.0
    for n in range(load.jobs):
        when: float | None = None
        match load.arrivals:
            case Poisson(per_s=per_s):
                at_s += chance.expovariate(per_s)
                when = at_s
            case Burst():
                when = 0.0
        words = " ".join(chance.choices(WORDS, k=max(1, load.prompt_words.draw(chance))))
        prompt = f"{shared} {n} {words}" if shared else f"{n} {words}"
        tokens = load.output_tokens.draw(chance)
        body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
        if load.exact_output:
            body |= {"ignore_eos": True, "min_tokens": tokens}
        if load.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body |= load.body
        yield Planned(f"{run}-{number}-{n}", number, when, prompt, body, chance.random() < load.stream_share)


def record(scenario: Scenario, job: Planned, reply_topic: str) -> bytes:
    """The job's record value as the contract has it."""
    load = scenario.tenants[job.load]
    return orjson.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "id": job.id,
            "tenant": load.tenant,
            "endpoint": load.endpoint,
            "body": job.body,
            "reply": {"topic": reply_topic, "stream": job.stream},
        }
    )
