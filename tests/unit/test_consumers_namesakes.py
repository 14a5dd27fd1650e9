"""Who has a static member id: the one who announced it last (R18)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson

from consumers.namesakes import Namesakes
from service.settings import KafkaSettings, Settings


def settings(instance: str = "pod-0", pool: str = "default", worker: str = "w") -> Settings:
    return Settings(pool=pool, worker=worker, kafka=KafkaSettings(instance=instance))


class Scene:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.ours = Namesakes(settings(), self.told.append)

    def announced(self, offset: int) -> None:
        """Our own announcement is written."""
        self.ours._ours = offset
        self.read(offset, self.ours)
        self.ours._judge()

    def read(self, offset: int, whose: Namesakes | None = None, *, value: bytes | None = None, key: Any = None) -> None:
        whose = whose or Namesakes(settings(worker="other"), self.told.append)
        record = SimpleNamespace(
            topic="inference.control",
            offset=offset,
            key=key if key is not None else whose._key,
            value=value if value is not None else whose._announcement(),
        )
        self.ours._take([record])


def test_a_later_announcement_of_the_same_id_supersedes_and_is_told_once() -> None:
    scene = Scene()
    scene.announced(5)
    assert scene.told == []
    scene.read(6)
    scene.read(7)
    assert scene.told == ["other"]


def test_an_elder_ones_announcement_does_not() -> None:
    scene = Scene()
    scene.read(3)
    scene.announced(5)
    scene.read(4)  # read late, after a connection was lost
    assert scene.told == []


def test_one_that_came_while_ours_was_on_its_way_does_if_it_is_later() -> None:
    scene = Scene()
    scene.read(6)
    scene.announced(5)
    assert scene.told == ["other"]


def test_other_ids_other_pools_and_what_is_no_announcement_do_not_count() -> None:
    scene = Scene()
    scene.announced(5)
    scene.read(6, Namesakes(settings("pod-1"), scene.told.append))
    scene.read(7, Namesakes(settings(pool="another"), scene.told.append))
    scene.read(8, key=b"w", value=orjson.dumps({"kind": "drain"}))
    for offset, value in enumerate(
        (b"", b"not json", b"[]", b'{"kind":"announcement"}', b'{"kind":"drain","boot":1}'), 9
    ):
        scene.read(offset, value=value)
    assert scene.told == []
