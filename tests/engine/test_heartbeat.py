from __future__ import annotations

import threading
from pathlib import Path

import pytest

from radix_mla.engine import heartbeat
from radix_mla.engine.heartbeat import Heartbeat, Pulse


def test_a_watcher_sees_beats_and_the_age_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    pulse = Pulse.create(tmp_path / "heartbeat")
    assert pulse.heartbeat_age_s is None
    assert pulse.step_age_s == 0.0
    beat = Heartbeat(tmp_path / "heartbeat")
    beat._thread = threading.Thread(target=lambda: None)  # no beats but the first
    beat.start()
    beat.busy()
    now[0] = 107.0
    assert pulse.heartbeat_age_s == 7.0
    assert pulse.step_age_s == 7.0
    beat.busy()
    assert pulse.step_age_s == 0.0, "a new step: a long chain of healthy ones is not stuck"
    beat.idle()
    now[0] = 200.0
    assert pulse.step_age_s == 0.0
    beat.stop()


def test_the_thread_beats_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.001)
    pulse = Pulse.create(tmp_path / "heartbeat")
    beat = Heartbeat(tmp_path / "heartbeat").start()
    first = float(pulse._values[0])
    reached = threading.Event()
    while not reached.wait(0.001):
        if pulse._values[0] > first:
            reached.set()
    beat.stop()
    last = float(pulse._values[0])
    assert not beat._thread.is_alive()
    assert pulse._values[0] == last
