"""What a record costs in the ledger: the consumers' loop pays it once per job."""

from __future__ import annotations

import time

from service.job import Place
from service.ledger import Book

TOPIC = "inference.default.jobs.standard"
COUNT = 20_000


def test_registering_and_completing_a_record_takes_microseconds() -> None:
    best = 1.0
    for _ in range(5):
        book = Book(high=900, max_span=32_768)
        book.take((TOPIC, 0), None, 0, COUNT)
        book.settled(0, 0)
        places = [Place(TOPIC, 0, offset) for offset in range(COUNT)]
        running = []
        began = time.process_time()
        for place in places:
            running.append(book.register(place))
            if len(running) == 500:
                for ticket in running[::-1]:
                    assert ticket is not None
                    book.complete(ticket, place.offset)
                running = []
        best = min(best, (time.process_time() - began) / COUNT)
    print(f"register + complete: {best * 1e6:.2f} µs a record")
    assert best < 20e-6


def test_a_commit_of_full_partitions_takes_milliseconds() -> None:
    book = Book(high=900, max_span=32_768)
    for number in range(48):
        book.take((TOPIC, number), None, 0, 10_000)
        book.settled(number, 0)
        for offset in range(0, 1800, 2):
            book.register(Place(TOPIC, number, offset))
    began = time.process_time()
    book.commits()
    whole = time.process_time() - began
    began = time.process_time()
    book.commits()
    again = time.process_time() - began
    print(f"commit of 48 x 900 unfinished: {whole * 1e3:.1f} ms, unchanged {again * 1e3:.1f} ms")
    assert whole < 0.2
    assert again < 0.02
