"""A constraint whose masks take too long loses its request, and nobody waits for it. On classes of vLLM's shape."""

from __future__ import annotations

import threading
import time
from enum import Enum, auto
from typing import Any

import pytest

from service.engine.vllm import masks


class Kind(Enum):
    JSON = auto()
    REGEX = auto()


class Rows(list[Any]):
    """What is used of a tensor: slices of rows that share its memory when they are set, and copies."""

    def clone(self) -> Rows:
        return Rows(self)

    def __getitem__(self, at: Any) -> Any:
        return Rows(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    def __setitem__(self, at: Any, rows: Any) -> None:
        super().__setitem__(at, [rows] if isinstance(rows, int) else rows)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    class Grammar:
        """Its mask is 7, once `gate` is open."""

        def __init__(self) -> None:
            self.gate = threading.Event()
            self.made_in: list[str] = []

        def fill_bitmask(self, bitmask: Any, idx: int) -> None:
            self.made_in.append(threading.current_thread().name)
            self.gate.wait(30)
            list.__setitem__(bitmask, idx, 7)

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            return True

    class Backend:
        def compile_grammar(self, kind: Kind, spec: str, stop_token_ids: Any = None) -> Grammar:
            return Grammar()

    monkeypatch.setattr(masks, "MASK_S", 0.1)
    masks.bind(Backend, Grammar)
    return Backend(), Grammar


def test_a_late_mask_ends_its_request_and_writes_nothing_afterwards(classes: tuple[Any, Any]) -> None:
    grammar = classes[0].compile_grammar(Kind.REGEX, "(.{0,10}x?){0,10}", stop_token_ids={1})
    bitmask = Rows([0, 0, 0])
    assert grammar.accept_tokens("r", [5])
    began = time.monotonic()
    grammar.fill_bitmask(bitmask, 1)
    grammar.fill_bitmask(bitmask, 1)  # not tried again
    assert time.monotonic() - began < 5
    assert bitmask == [0, -1, 0] and not grammar.accept_tokens("r", [5])
    grammar.gate.set()
    time.sleep(0.05)
    assert bitmask == [0, -1, 0]


def test_a_mask_in_time_is_the_grammars_own(classes: tuple[Any, Any]) -> None:
    grammar = classes[0].compile_grammar(Kind.REGEX, "a+")
    grammar.gate.set()
    bitmask = Rows([0, 0, 0])
    grammar.fill_bitmask(bitmask, 2)
    assert bitmask == [0, 0, 7] and grammar.accept_tokens("r", [5])


@pytest.mark.parametrize("spec, aside", [('{"type": "object"}', False), ('{"pattern": "(a?)*"}', True)])
def test_json_pays_for_a_thread_only_if_it_has_patterns(classes: tuple[Any, Any], spec: str, aside: bool) -> None:
    grammar = classes[0].compile_grammar(Kind.JSON, spec)
    grammar.gate.set()
    grammar.fill_bitmask(Rows([0]), 0)
    assert [name.startswith("mask") for name in grammar.made_in] == [aside]


def test_with_many_late_masks_under_way_the_next_wait_for_nothing(classes: tuple[Any, Any]) -> None:
    backend, bitmask = classes[0], Rows([0])
    late = [backend.compile_grammar(Kind.REGEX, "x") for _ in range(masks.THREADS)]
    for grammar in late:
        grammar.fill_bitmask(bitmask, 0)
    after = backend.compile_grammar(Kind.REGEX, "x")
    after.gate.set()
    after.fill_bitmask(bitmask, 0)
    assert not after.accept_tokens("r", [5]) and not after.made_in
    for grammar in late:
        grammar.gate.set()
    deadline = time.monotonic() + 5
    while True:  # they end, and there is room again
        again = backend.compile_grammar(Kind.REGEX, "x")
        again.gate.set()
        again.fill_bitmask(bitmask, 0)
        if again.accept_tokens("r", [5]):
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
