"""A bound on what one constraint may take of every step, in EngineCore, where masks of allowed tokens are made.

Owns a patch of vLLM's xgrammar backend; knows nothing of what a constraint means. Imports vLLM when it is installed.

The cost of a mask grows with the ways in which the text so far can be read: `(.{0,10}x?){0,10}` takes 7 s a token
(xgrammar 0.2.8), inside the engine's own step, so everybody waits, and after `stall_s` the engine would be rebuilt. No
rule on the text of a constraint tells such ones from harmless ones. So masks of expressions and grammars are made in
threads (xgrammar lets go of the interpreter's lock), and one that is late ends its request with vLLM's own error for a
token that the grammar does not take; the caller gets `invalid_request` (deltas.py).
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)

MASK_S = 1.0  # harmless ones take under 50 ms on a busy CPU
# A mask that was given up is made to its end all the same; with so many of them under way the next are refused at once.
THREADS = 4


def install() -> None:
    """A vLLM whose backend looks otherwise keeps its own masks, and says so."""
    try:
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
    except ImportError as problem:
        log.warning("masks of constraints have no bound in this vLLM: %s", problem)
    else:
        bind(XgrammarBackend, XgrammarGrammar)


def bind(backend: Any, grammar: Any) -> None:
    """Replaces the methods of both classes that make and use masks."""
    compile_grammar, fill_bitmask, accept_tokens = backend.compile_grammar, grammar.fill_bitmask, grammar.accept_tokens
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="mask")
    given_up: set[Future[None]] = set()

    def compile_one(self: Any, request_type: Any, grammar_spec: str, *args: Any, **kwargs: Any) -> Any:
        made = compile_grammar(self, request_type, grammar_spec, *args, **kwargs)
        # JSON is unambiguous but for its patterns; it need not pay for the threads.
        made.bounded = request_type.name not in ("JSON", "JSON_OBJECT") or '"pattern' in grammar_spec
        made.late = False
        return made

    def fill(self: Any, bitmask: Any, idx: int) -> None:
        if not self.bounded:
            fill_bitmask(self, bitmask, idx)
            return
        if not self.late and len(given_up) < THREADS:
            row = bitmask[idx : idx + 1].clone()  # of its own: one that was given up still writes
            making = pool.submit(fill_bitmask, self, row, 0)
            try:
                making.result(MASK_S)
            except TimeoutError:
                log.warning("a constraint is given up: its mask took more than %g s", MASK_S)
                if not making.cancel():
                    given_up.add(making)
                    making.add_done_callback(given_up.discard)
            else:
                bitmask[idx : idx + 1] = row
                return
        self.late = True
        bitmask[idx : idx + 1] = -1  # any token: none will be taken

    def accept(self: Any, request_id: str, tokens: list[int]) -> bool:
        return not self.late and bool(accept_tokens(self, request_id, tokens))

    backend.compile_grammar, grammar.fill_bitmask, grammar.accept_tokens = compile_one, fill, accept
