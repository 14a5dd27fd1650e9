"""Reads the dead-letter topic for the commands: a survey of it, one letter, the notes beside letters. Never writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiokafka import TopicPartition

from schemas.names import DEAD_LETTERS
from service.cli.topic_log import Record, TopicLog
from service.dead_letters import Filter, Letter, Note, Spot, is_note, newest

# Clocks of brokers differ; read from so many seconds before a letter's own time.
SLACK_S = 60.0


@dataclass
class Survey:
    """What lies on the topic: the letters meant, without their content, and every note."""

    letters: list[Letter] = field(default_factory=list)
    notes: dict[Spot, Note] = field(default_factory=dict)  # the one with the highest run for each letter
    matched: int = 0
    whole: bool = True

    def take_note(self, record: Record) -> bool:
        """True: the record is a note, not a letter."""
        if not is_note(record):
            return False
        note = Note.of(record)
        if note is not None:
            known = self.notes.get(note.letter)
            if known is None or note.run > known.run:
                self.notes[note.letter] = note
        return True

    def keep_open(self, limit: int) -> None:
        """Only letters without a note stay, the newest so many of them; all of those are counted."""
        letters = [letter for letter in self.letters if letter.spot not in self.notes]
        self.matched = len(letters)
        self.letters = newest(letters, limit)


async def survey(log: TopicLog, wanted: Filter, since_s: float, limit_s: float, limit: int | None) -> Survey:
    """Reads the topic once. `limit`: the newest so many letters are kept, all are counted."""
    seen = Survey()
    async for record in log.read(await log.partitions(DEAD_LETTERS), since_s=since_s, limit_s=limit_s):
        if seen.take_note(record):
            continue
        letter = Letter.of(record)
        if not wanted.takes(letter):
            continue
        seen.matched += 1
        seen.letters.append(letter.without_content())
        if limit is not None and len(seen.letters) >= 2 * limit + 1000:
            seen.letters = newest(seen.letters, limit)
    seen.letters = newest(seen.letters, limit if limit is not None else max(1, len(seen.letters)))
    seen.whole = log.whole
    return seen


async def look_up(log: TopicLog, spot: Spot) -> Letter | None:
    """The letter at a place; None: there is nothing, or a note."""
    if spot.partition not in [place.partition for place in await log.partitions(DEAD_LETTERS)]:
        return None
    record = await log.record_at(DEAD_LETTERS, spot.partition, spot.offset)
    return Letter.of(record) if record is not None and not is_note(record) else None


async def notes_on(log: TopicLog, letters: Sequence[Letter]) -> dict[Spot, Note]:
    """The notes in these letters' partitions, read from the oldest letter's time on."""
    seen = Survey()
    oldest: dict[int, int] = {}
    for letter in letters:
        oldest[letter.spot.partition] = min(letter.at_ms, oldest.get(letter.spot.partition, letter.at_ms))
    for partition, at_ms in oldest.items():
        since_s = max(0.0, time.time() - at_ms / 1000) + SLACK_S
        async for record in log.read([TopicPartition(DEAD_LETTERS, partition)], since_s=since_s):
            seen.take_note(record)
    return seen.notes
