"""HEADRACE_ variables that no setting reads: a misspelt one is told, since it would be ignored in silence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from pydantic import BaseModel

from service.settings import Settings

PREFIX = "HEADRACE_"
# Read by the command line, the local stack and the tests, not by a worker.
OTHERS = frozenset({"HEADRACE_CACHE", "HEADRACE_SIGN_KEY", "HEADRACE_SIGN_KID", "HEADRACE_STACK"})
TESTS = "HEADRACE_TEST_"


def known() -> Iterator[str]:
    """Every variable that sets something; groups as a whole (JSON) among them."""
    for name, field in Settings.model_fields.items():
        yield f"{PREFIX}{name.upper()}"
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield from (f"{PREFIX}{name.upper()}__{part.upper()}" for part in group.model_fields)


def strays(variables: Iterable[str]) -> list[str]:
    """One line for each variable that is read by nobody, with the name that may have been meant."""
    names = set(known())
    lines = []
    for variable in sorted(variables):
        name = variable.upper()  # settings are read whatever their case
        if not name.startswith(PREFIX) or name in names | OTHERS or name.startswith(TESTS):
            continue
        near = get_close_matches(name, sorted(names), n=1, cutoff=0.75)
        lines.append(f"{variable} is no setting and is ignored" + (f"; did you mean {near[0]}?" if near else ""))
    return lines
