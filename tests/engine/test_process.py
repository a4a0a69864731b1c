"""The engine's own process: start, talk, stop, die (X08)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from support.scheduler_sim import make_request
from support.tiny_checkpoint import make_checkpoint

from radix_mla.config import EngineConfig
from radix_mla.engine.ipc import (
    Abort,
    Audit,
    Command,
    Drain,
    Event,
    Flush,
    Outputs,
    Ready,
    Reply,
    Submit,
    decode_event,
    encode,
)
from radix_mla.engine.outputs import EngineStats, SequenceOutput
from radix_mla.engine.process import EngineHandle, _rebuild
from radix_mla.errors import CheckpointError, ConfigError, EngineDead, UnsupportedModel

_TIMEOUT_S = 60


class Client:
    """The parent's two sockets."""

    def __init__(self, handle: EngineHandle) -> None:
        self.stats = EngineStats()
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        self._commands.bind(handle.command_address)
        self._events.bind(handle.event_address)

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._commands.send(encode(command))

    def send_raw(self, data: bytes) -> None:
        self._commands.send(data)

    def receive(self) -> Event:
        assert self._events.poll(_TIMEOUT_S * 1000), "the engine is silent"
        event = decode_event(self._events.recv())
        if isinstance(event, Outputs):
            self.stats = event.stats
        return event

    def until(self, is_wanted: Callable[[Event], bool]) -> Event:
        while True:
            event = self.receive()
            if is_wanted(event):
                return event

    def finish(self, request_id: str, index: int = 0) -> list[SequenceOutput]:
        """All outputs of a sequence up to its end."""
        outputs: list[SequenceOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            event = self.receive()
            if isinstance(event, Outputs):
                key = (request_id, index)
                outputs += [o for o in event.sequences if (o.request_id, o.index) == key]
        return outputs

    def call(self, command: Flush | Audit) -> dict:
        self.send(command)
        event = self.until(
            lambda event: isinstance(event, Reply) and event.call_id == command.call_id
        )
        assert isinstance(event, Reply)
        return event.value

    def close(self) -> None:
        self._context.destroy(linger=0)


def wait_for(condition: Callable[[], bool], timeout_s: float = _TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Not there, or only its entry is left for its parent to read."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def config(model: Path, **knobs: object) -> EngineConfig:
    knobs = {"kv_cache_tokens": 2048, "num_threads": 1, "workspace_tokens": 512} | knobs
    return EngineConfig(model=str(model), **knobs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def handle(model: Path) -> Iterator[EngineHandle]:
    handle = EngineHandle.start(config(model))
    try:
        stages: list[str] = []
        handle.wait_ready(lambda stage, done, total: stages.append(stage), timeout_s=_TIMEOUT_S)
        assert list(dict.fromkeys(stages)) == ["config", "weights", "warm-up"]
        yield handle
    finally:
        handle.close()


@pytest.fixture(scope="module")
def client(handle: EngineHandle) -> Iterator[Client]:
    client = Client(handle)
    first = client.receive()
    assert isinstance(first, Ready)
    assert first.info == handle.info
    yield client
    client.close()


def test_the_parent_does_not_import_torch() -> None:
    code = "import sys, radix_mla.engine.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ready_describes_the_engine(handle: EngineHandle) -> None:
    info = handle.info
    assert info["vocab_size"] == 256
    assert info["max_model_len"] == 2032
    assert info["kv_tokens"] == 2048
    assert info["kv_row_bytes"] == 2 * 576 * 4
    assert info["config"]["page_size"] == 16
    assert any("max_model_len=2032" in decision for decision in info["decisions"])
    assert Path(handle.command_address.removeprefix("ipc://")).parent.stat().st_mode & 0o077 == 0


def test_requests_run_side_by_side_and_hit(client: Client) -> None:
    prompt = list(range(40))
    client.send(Submit(make_request("a", prompt, 3, temperature=0.0, ignore_eos=True)))
    first = client.finish("a")
    client.send(Submit(make_request("b", prompt, 3, temperature=0.0, ignore_eos=True)))
    event = client.until(lambda event: isinstance(event, Outputs) and bool(event.admitted))
    assert isinstance(event, Outputs)
    assert event.admitted[0].num_cached_tokens == 39
    assert event.admitted[0].missed == {"last_token": 1}
    assert event.stats.num_running == 1
    again = [*event.sequences, *client.finish("b")]
    assert [o.token_ids for o in again] == [o.token_ids for o in first]


def test_what_cannot_be_served_ends_each_choice_with_an_error(client: Client) -> None:
    client.send(Submit(make_request("bad", [1, 999_999], 3, n=2)))
    event = client.until(lambda event: isinstance(event, Outputs) and bool(event.sequences))
    assert isinstance(event, Outputs)
    assert [(o.index, o.finish_reason) for o in event.sequences] == [(0, "error"), (1, "error")]
    assert "999999" in str(event.sequences[0].error)


@pytest.mark.parametrize(("reason", "finish"), [("abort", "abort"), ("stop", "stop")])
def test_an_abort_ends_a_running_request(client: Client, reason: str, finish: str) -> None:
    client.send(Submit(make_request("long", [5, 6, 7], 1500, ignore_eos=True)))
    client.until(lambda event: isinstance(event, Outputs) and bool(event.sequences))
    client.send(Abort("long", reason=reason), Abort("unknown"))
    assert client.finish("long")[-1].finish_reason == finish


def test_bytes_that_are_no_command_are_ignored(client: Client) -> None:
    client.send_raw(b"\x80\x04 not a command")
    client.send_raw(encode(Ready({})))
    client.send(Abort("never", reason="no such reason"))
    client.send(Submit(make_request("after", [1, 2], 2, ignore_eos=True)))
    assert client.finish("after")[-1].finish_reason == "length"


def test_flush_and_audit_answer(client: Client) -> None:
    client.send(Submit(make_request("kept", list(range(32)), 1)))
    client.finish("kept")
    audit = client.call(Audit(1))
    assert audit["ok"] is True
    assert sum(audit["counts"].values()) == 2048
    assert client.call(Flush(2))["tokens"] >= 32
    assert client.call(Audit(3))["counts"]["free"] == 2048
    while client.stats.kv_slots["free"] != 2048:
        client.receive()  # told on the change, though there is no work


def test_signals_to_the_group_are_the_parents_business(
    handle: EngineHandle, client: Client
) -> None:
    os.kill(handle.pid, signal.SIGINT)
    os.kill(handle.pid, signal.SIGTERM)
    client.send(Submit(make_request("after-signals", [1, 2], 2, ignore_eos=True)))
    assert client.finish("after-signals")[-1].finish_reason == "length"


def test_x08_a_stopped_engine_goes_silent_and_a_working_one_does_not(
    handle: EngineHandle, client: Client
) -> None:
    client.send(Submit(make_request("work", [1, 2, 3], 1500, ignore_eos=True)))
    client.until(lambda event: isinstance(event, Outputs) and bool(event.sequences))
    assert handle.heartbeat_age_s is not None
    assert handle.heartbeat_age_s < 5
    os.kill(handle.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: (handle.heartbeat_age_s or 0) > 1.0)
        assert handle.is_alive
    finally:
        os.kill(handle.pid, signal.SIGCONT)
    wait_for(lambda: (handle.heartbeat_age_s or 9) < 0.6)
    client.send(Abort("work"))
    client.finish("work")
    wait_for(lambda: handle.step_age_s == 0.0)


def test_drain_finishes_what_is_accepted_and_exits(model: Path) -> None:
    handle = EngineHandle.start(config(model))
    handle.wait_ready(timeout_s=_TIMEOUT_S)
    client = Client(handle)
    try:
        client.send(Submit(make_request("last", [1, 2], 20, ignore_eos=True)), Drain())
        assert len(client.finish("last")) == 20
        assert handle.wait(_TIMEOUT_S)
        assert handle.exit_cause == "exit status 0"
    finally:
        client.close()
        directory = Path(handle.event_address.removeprefix("ipc://")).parent
        handle.close()
        handle.close()
    assert not directory.exists()


def test_an_engine_that_is_killed_while_it_starts_is_dead(model: Path) -> None:
    handle = EngineHandle.start(config(model))
    os.kill(handle.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="SIGKILL"):
        handle.wait_ready(timeout_s=_TIMEOUT_S)


def test_a_start_that_takes_too_long_is_ended(model: Path) -> None:
    handle = EngineHandle.start(config(model))
    with pytest.raises(TimeoutError):
        handle.wait_ready(timeout_s=0.0)
    assert not handle.is_alive


def test_start_errors_reach_the_parent() -> None:
    handle = EngineHandle.start(EngineConfig(model="/no/such/folder"))
    with pytest.raises(CheckpointError, match="/no/such/folder"):
        handle.wait_ready(timeout_s=_TIMEOUT_S)
    assert not handle.is_alive
    assert "/no/such/folder" in str(handle.exit_cause)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ConfigError", ConfigError),
        ("UnsupportedModel", UnsupportedModel),
        ("MemoryError", EngineDead),
        ("ContextOverflow", EngineDead),
        ("annotations", EngineDead),
    ],
)
def test_start_errors_keep_their_kind_where_it_is_ours(kind: str, error: type[Exception]) -> None:
    rebuilt = _rebuild(kind, "the message")
    assert type(rebuilt) is error
    assert "the message" in str(rebuilt)


_PARENT = """
import sys, time
from radix_mla.config import EngineConfig
from radix_mla.engine.process import EngineHandle, _rebuild
handle = EngineHandle.start(EngineConfig(model=sys.argv[1], kv_cache_tokens=512, num_threads=1))
handle.wait_ready()
print(handle.pid, flush=True)
time.sleep(600)
"""


def test_no_engine_outlives_its_parent(model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(model)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    wait_for(lambda: is_gone(pid))


def test_x08_a_killed_engine_is_dead_and_says_why(handle: EngineHandle) -> None:
    # The last one here: it ends the engine that the others share.
    assert handle.is_alive
    assert handle.exit_cause is None
    os.kill(handle.pid, signal.SIGKILL)
    assert handle.wait(_TIMEOUT_S)
    assert not handle.is_alive
    assert "SIGKILL" in str(handle.exit_cause)
