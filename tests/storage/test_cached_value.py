"""A value that is read again when it is old: by one thread, while the others take the last one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from inference_site.core.storage import cached_value
from inference_site.core.storage.cached_value import CachedValue


class Store:
    """Counts how often it is read; a reading ends when it may."""

    def __init__(self) -> None:
        self.reads = 0
        self.is_read, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def read(self) -> int:
        self.is_read.set()
        self.may_end.wait()
        self.reads += 1
        return self.reads


def test_a_value_is_read_once_in_its_time() -> None:
    store = Store()
    recent = CachedValue(store.read, ttl_s=3600)
    assert [recent.now(), recent.now(), recent.no_older_than(3600)] == [1, 1, 1]
    assert recent.no_older_than(0) == 2


def test_what_is_forgotten_is_read_anew() -> None:
    store = Store()
    recent = CachedValue(store.read, ttl_s=3600)
    recent.now()
    recent.forget()
    assert recent.now() == 2


def test_while_one_thread_reads_the_others_take_the_last_value() -> None:
    store = Store()
    recent = CachedValue(store.read, ttl_s=0)
    recent.now()
    store.is_read.clear()
    store.may_end.clear()
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(recent.now)
        assert store.is_read.wait(60)
        assert recent.now() == 1
        insistent = pool.submit(recent.no_older_than, 3600)
        store.may_end.set()
        assert (reader.result(60), insistent.result(60)) == (2, 2)


def test_an_error_is_for_the_one_that_reads() -> None:
    answers = iter([0, 7])
    recent = CachedValue(lambda: 14 // next(answers), ttl_s=3600)
    with pytest.raises(ZeroDivisionError):
        recent.now()
    assert recent.now() == 2


def test_a_value_is_kept_fresh_though_a_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_value, "_FRESH", 1e-6)
    answers = iter([1, 0, 2])
    is_fresh = threading.Event()

    def read() -> int:
        answer = next(answers, 3)
        if answer == 0:
            raise ZeroDivisionError
        if answer == 3:
            is_fresh.set()
        return answer

    recent = CachedValue(read, ttl_s=3600)
    assert recent.now() == 1
    recent.keep_fresh()
    assert is_fresh.wait(60)
    assert recent.now() > 1


def test_a_value_that_nobody_asks_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_value, "_FRESH", 1e-6)
    monkeypatch.setattr(cached_value, "_ASKED_S", 0.0)
    store = Store()
    recent = CachedValue(store.read, ttl_s=3600)
    recent.now()
    store.is_read.clear()
    recent.keep_fresh()
    assert not store.is_read.wait(0.3)
    monkeypatch.setattr(cached_value, "_ASKED_S", 3600.0)
    recent.now()
    assert store.is_read.wait(60)
    monkeypatch.setattr(cached_value, "_ASKED_S", 0.0)
