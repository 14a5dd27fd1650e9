"""What the delivery process promises, on a real broker, a real store and the real process."""

from __future__ import annotations

import hashlib
from pathlib import Path

from service.frames import Delta
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import Room, numbering, text_of, until


async def test_a_stream_comes_out_as_the_contract_says(stack: TestStack, tmp_path: Path) -> None:
    room = Room(stack.bootstrap, stack.store_endpoint, tmp_path)
    words = ["سلام ", "دنیا ", "👩‍👩‍👧 ", "é ", "漢", "字 "] * 20
    async with room.open() as log:
        stream = room.stream()
        job = stream.head.job_id
        await room.run(stream, words, 0.003)
        stream.send([Delta(0, "", 1, finish_reason="stop")])
        room.end(stream, tokens=len(words) + 1)
        await until(lambda: room.ended, "the end")
        await until(lambda: log.terminals(job), "the terminal")
        await until(lambda: log.of(room.status), "the status record")

        events = log.events(job)
        log.valid(job)
        numbering(events)
        assert [e["type"] for e in events][0] == "started"
        assert [e["type"] for e in events][-1] == "completed"
        text = "".join(words)
        assert text_of(events) == text
        terminal = events[-1]
        assert terminal["response"]["choices"][0]["message"]["content"] == text
        assert terminal["text_sha256"] == [hashlib.sha256(text.encode()).hexdigest()]
        assert sum(e["tokens"] for e in events if e["type"] == "chunk") == terminal["usage"]["completion_tokens"]
        assert terminal["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert events[0]["metadata"] == terminal["metadata"] == {"k": "v"}
        ended = room.ended[0]
        assert (ended.kind, ended.topic, ended.partition, ended.offset) == ("completed", room.jobs, 1, 1)
        status = log.of(room.status)[0]
        assert (status.partition, status.offset) == (1, ended.status_offset)
