"""Checks tokens in a thread of its own, in batches, so that the event loop stays free.

One check takes about 0.14 ms, most of it outside of the interpreter's lock; on the loop it would cost as much as all
else that is done with a small job. Answers come in the order of the questions. Knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

# Questions a batch: under 10 ms, so that whoever comes next does not wait for long.
BATCH = 64


class Verifier(Generic[Q, A]):
    """`check` must not raise: if it does all the same, the whole batch's questions raise that."""

    def __init__(self, check: Callable[[Q], A]) -> None:
        self._check = check
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._busy = False
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verify")

    async def ask(self, question: Q) -> A:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        self._waiting.append((question, answer))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._launch)  # what else comes in this turn goes along
        return await answer

    def close(self) -> None:
        """What waits is given up."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _launch(self) -> None:
        if self._closed:
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting.clear()
            return
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._all, [question for question, _ in batch])
        work.add_done_callback(lambda done: self._tell([answer for _, answer in batch], done))

    def _all(self, questions: Sequence[Q]) -> list[A]:
        return [self._check(question) for question in questions]

    def _tell(self, answers: Sequence[asyncio.Future[A]], done: asyncio.Future[list[A]]) -> None:
        if self._waiting:
            self._launch()
        else:
            self._busy = False
        error = None if done.cancelled() else done.exception()
        for number, answer in enumerate(answers):
            if answer.done():  # nobody waits for it any more
                continue
            if done.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result()[number])
