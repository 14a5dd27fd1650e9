"""The prefix cache of the simulated engine: which blocks of prompts lie in the KV cache, in use or not. Pure.

As with vLLM, a block is known by everything before it and by the salt: equal prompts under different salts share
nothing. A block counts as there from the moment that its sequence is scheduled. What nobody uses stays until the room
is needed, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK = 16  # tokens per KV block


def blocks(text: str, tokens: int, salt: str) -> tuple[int, ...]:
    """Names of the full blocks of a prompt of `tokens` tokens."""
    full = tokens // BLOCK
    if not full:
        return ()
    width = max(1, len(text) * BLOCK // tokens)
    names, parent = [], hash(salt)
    for number in range(full):
        parent = hash((parent, text[number * width : (number + 1) * width]))
        names.append(parent)
    return tuple(names)


class Prefixes:
    def __init__(self, kv_tokens: int) -> None:
        self._most = kv_tokens // BLOCK
        self._users: dict[int, int] = {}  # block → sequences that run with it
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.queries = 0  # prompt tokens looked up
        self.found = 0  # of them in the cache

    @property
    def used(self) -> int:
        """KV tokens of the blocks that running sequences share or could share."""
        return len(self._users) * BLOCK

    def hits(self, names: tuple[int, ...], prompt: int) -> int:
        """Leading blocks that are there. The last token of a prompt is always computed."""
        most = (prompt - 1) // BLOCK
        for number, name in enumerate(names[:most]):
            if name not in self._users and name not in self._unused:
                return number
        return min(most, len(names))

    def count(self, prompt: int, found: int) -> None:
        self.queries += prompt
        self.found += found

    def take(self, names: tuple[int, ...]) -> None:
        for name in names:
            self._unused.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1

    def give(self, names: tuple[int, ...]) -> None:
        for name in names:
            left = self._users[name] - 1
            if left:
                self._users[name] = left
            else:
                del self._users[name]
                self._unused[name] = None

    def evict(self, own: int) -> None:
        """Forgets unused blocks that no room is left for beside `own` tokens that are not shared."""
        most = self._most - len(self._users) - own // BLOCK
        while self._unused and len(self._unused) > most:
            self._unused.popitem(last=False)
