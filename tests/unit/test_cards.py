"""What a worker leaves for `headrace status`, and what is made of it."""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from service import cards
from service.cards import Card
from service.cli.stack import _verdict
from service.cli.worker import _forget_lock
from service.settings import Settings
from service.stray_settings import known, strays
from service.topics import MISSING, REMEDY, Finding, TopicsRefused


def test_a_worker_shows_while_it_runs_and_leaves_nothing(tmp_path: Path) -> None:
    card = Card.of(Settings(worker="w/1"), "http://127.0.0.1:1")
    cards.write(tmp_path, card)
    assert cards.alive(tmp_path) == [card] and [path.name for path in tmp_path.iterdir()] == ["worker-w_1.json"]
    cards.remove(tmp_path, "w/1", os.getpid() + 1)  # a former one of the same name
    assert cards.alive(tmp_path) == [card]
    cards.remove(tmp_path, "w/1", os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_gone_does_not_show(tmp_path: Path) -> None:
    card = Card.of(Settings(worker="w"), "http://127.0.0.1:1")
    (tmp_path / "worker-torn.json").write_text("{")
    cards.write(tmp_path, replace(card, started=card.started - 1))  # its pid was given again
    assert cards.alive(tmp_path) == []
    cards.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-torn.json"]


def test_status_asks_each_worker_how_it_is() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = answers.pop(0)
            self.send_response(200 if ready else 503)
            self.end_headers()
            self.wfile.write(b'{"checks": {"worker": "ok", "engine": "the engine is starting"}}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    answers = [True, False]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    card = Card.of(Settings(worker="w"), f"http://127.0.0.1:{server.server_address[1]}")
    assert [_verdict(card), _verdict(card)] == ["ready", "not ready (the engine is starting)"]
    server.shutdown()
    server.server_close()
    assert _verdict(card) == "does not answer"


def test_the_lock_of_a_name_with_a_process_id_goes_and_others_stay(tmp_path: Path) -> None:
    unnamed, named = Settings(state_dir=tmp_path), Settings(state_dir=tmp_path, worker="w")
    locks = {one.worker: tmp_path / f"{one.worker}.lock" for one in (unnamed, named)}
    for path in locks.values():
        path.touch()
    with locks[unnamed.worker].open() as held:  # by a delivery process that lives on
        fcntl.flock(held, fcntl.LOCK_EX)
        _forget_lock(unnamed)
        assert locks[unnamed.worker].exists()
    _forget_lock(unnamed)
    _forget_lock(named)
    assert not locks[unnamed.worker].exists() and locks["w"].exists()


def test_a_misspelt_setting_is_told_with_what_may_be_meant() -> None:
    (line,) = strays(["HEADRACE_ENGINE__MAX_NUM_SEQ", "HEADRACE_TEST_STORE", "HEADRACE_CACHE", "PATH"])
    assert (
        line == "HEADRACE_ENGINE__MAX_NUM_SEQ is no setting and is ignored; did you mean HEADRACE_ENGINE__MAX_NUM_SEQS?"
    )
    assert "HEADRACE_ENGINE__KIND?" in strays(["HEADRACE_ENGINE_KIND"])[0]
    assert strays(["HEADRACE_XYZZY"]) == ["HEADRACE_XYZZY is no setting and is ignored"]
    assert strays(known()) == [] and strays(["headrace_pool", "HEADRACE_ENGINE"]) == []


def test_a_pool_without_topics_is_told_once() -> None:
    findings = [Finding(f"t{n}", MISSING, REMEDY) for n in range(3)]
    assert str(TopicsRefused(findings)) == f"3 topics are missing (t0, t1, t2); {REMEDY}"
    assert str(TopicsRefused(findings[:1])) == f"t0: {MISSING}; {REMEDY}"
