"""The client over a channel: one reader, calls, death, stuck steps, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq
from support.fake_engine import FakeEngine, Script

from radix_mla.engine.ipc import (
    Abort,
    Admitted,
    Audit,
    Command,
    Drain,
    EngineStats,
    Event,
    Fatal,
    Flush,
    Outputs,
    Reply,
    SequenceOutput,
    Submit,
    decode_command,
    encode,
)
from radix_mla.errors import EngineDead
from radix_mla.request import Request, SamplingParams
from server.engine_client import ChannelEngineClient
from server.request_stream import RequestStream
from server.zmq_channel import ZmqChannel


@dataclass
class FakeChannel:
    sent: list[Command] = field(default_factory=list)
    incoming: asyncio.Queue[list[Event]] = field(default_factory=asyncio.Queue)
    closed: bool = False
    connects: bool = True

    async def connect(self, timeout_s: float) -> bool:
        return self.connects

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def receive(self, timeout_s: float) -> list[Event]:
        return await self.incoming.get()

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeProcess:
    is_alive: bool = True
    exit_cause: str | None = None
    heartbeat_age_s: float | None = 0.1
    step_age_s: float = 0.0
    closed: list[float] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waited.append(timeout_s)
        return True

    def close(self, grace_s: float = 5.0) -> None:
        self.closed.append(grace_s)
        self.is_alive = False


@dataclass
class Rig:
    channel: FakeChannel
    process: FakeProcess
    client: ChannelEngineClient

    async def feed(self, *events: Event) -> None:
        self.channel.incoming.put_nowait(list(events))
        while not self.channel.incoming.empty():  # noqa: ASYNC110 - the reader tells nobody
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    channel, process = FakeChannel(), FakeProcess()
    client = ChannelEngineClient(channel, process, {"a": 1}, step_timeout_s=20)
    await client.start()
    yield Rig(channel, process, client)
    await client.close()


def _request(request_id: str = "r") -> Request:
    return Request(
        request_id=request_id,
        prompt=np.array([1, 2], dtype="<i4").tobytes(),
        params=SamplingParams(max_tokens=3),
    )


def _outputs(*sequences: SequenceOutput, admitted: tuple[Admitted, ...] = ()) -> Outputs:
    return Outputs(list(admitted), list(sequences), [], EngineStats(num_running=1))


async def test_events_reach_their_own_stream_in_order(rig: Rig) -> None:
    first, second = rig.client.submit([_request("a")]), rig.client.submit([_request("b")])
    admitted = Admitted("a", 0, 1, {"new": 1}, 0.0)
    outputs = [
        SequenceOutput("a", 0, [1]),
        SequenceOutput("b", 0, [2]),
        SequenceOutput("x", 0, [3]),
    ]
    await rig.feed(_outputs(*outputs, admitted=(admitted,)))
    assert await first.receive() == [admitted, outputs[0]]
    assert await second.receive() == [outputs[1]]
    assert rig.client.stats.num_running == 1
    assert [command for command in rig.channel.sent if isinstance(command, Submit)] == [
        Submit(_request("a")),
        Submit(_request("b")),
    ]


async def test_what_has_arrived_is_taken_at_once(rig: Rig) -> None:
    stream = rig.client.submit([_request()])
    await rig.feed(*(_outputs(SequenceOutput("r", 0, [i])) for i in range(5)))
    assert len(await stream.receive()) == 5


async def test_requests_of_one_submit_share_a_stream_and_are_forgotten_alone(rig: Rig) -> None:
    stream = rig.client.submit([_request("a"), _request("b")])
    rig.client.forget("a")
    await rig.feed(_outputs(SequenceOutput("a", 0, [1]), SequenceOutput("b", 0, [2])))
    assert await stream.receive() == [SequenceOutput("b", 0, [2])]


async def test_silence_is_an_empty_list() -> None:
    assert await RequestStream().receive(0.001) == []


async def test_aborts_are_sent(rig: Rig) -> None:
    rig.client.abort("r", 2, "stop")
    assert rig.channel.sent == [Abort("r", 2, "stop")]


async def test_calls_are_matched_with_their_replies(rig: Rig) -> None:
    flush = asyncio.create_task(rig.client.flush("ns"))
    audit = asyncio.create_task(rig.client.audit())
    await asyncio.sleep(0)
    assert rig.channel.sent == [Flush(1, "ns"), Audit(2)]
    await rig.feed(Reply(2, {"ok": True}), Reply(99, {}), Reply(1, {"tokens": 7}))
    assert await flush == 7
    assert await audit == {"ok": True}


@pytest.mark.parametrize("how", ["exit", "fatal"])
async def test_death_fails_everything_that_waits(rig: Rig, how: str) -> None:
    stream = rig.client.submit([_request()])
    call = asyncio.create_task(rig.client.audit())
    await asyncio.sleep(0)
    if how == "exit":
        rig.process.is_alive, rig.process.exit_cause = False, "killed by SIGKILL"
        await rig.feed()
    else:
        await rig.feed(Fatal("RuntimeError", "device lost"))
    with pytest.raises(EngineDead, match=r"SIGKILL|device lost"):
        await stream.receive()
    with pytest.raises(EngineDead):
        await call
    with pytest.raises(EngineDead):
        rig.client.submit([_request()])
    with pytest.raises(EngineDead):
        await rig.client.flush(None)
    assert rig.client.problem is not None
    rig.client.abort("r")
    assert not any(isinstance(command, Abort) for command in rig.channel.sent)


async def test_events_before_the_death_are_delivered(rig: Rig) -> None:
    stream = rig.client.submit([_request()])
    await rig.feed(_outputs(SequenceOutput("r", 0, [1])), Fatal("X", "y"))
    assert await stream.receive() == [SequenceOutput("r", 0, [1])]
    with pytest.raises(EngineDead):
        await stream.receive()


async def test_x08_a_long_healthy_step_is_no_problem(rig: Rig) -> None:
    rig.process.step_age_s = 15.0
    await rig.feed()
    assert rig.client.problem is None


async def test_x08_silence_and_stuck_steps_are_problems(rig: Rig) -> None:
    rig.process.heartbeat_age_s = 6.0
    assert "silent" in str(rig.client.problem)
    rig.process.heartbeat_age_s = 0.1
    rig.process.step_age_s = 21.0
    assert "step" in str(rig.client.problem)


async def test_x08_flush_and_audit_do_not_wait_for_a_silent_engine(rig: Rig) -> None:
    rig.process.heartbeat_age_s = 6.0
    for call in (rig.client.flush(None), rig.client.audit()):
        with pytest.raises(EngineDead, match="silent"):
            await call
    assert rig.channel.sent == []


@pytest.mark.parametrize("which", ["heartbeat_age_s", "step_age_s"])
async def test_x08_a_stuck_engine_is_ended_and_pending_requests_fail(rig: Rig, which: str) -> None:
    stream = rig.client.submit([_request()])
    setattr(rig.process, which, 21.0)
    await rig.feed()
    with pytest.raises(EngineDead, match="stuck"):
        await stream.receive()
    assert rig.process.closed == [0.0]


async def test_an_unreadable_message_ends_the_client(rig: Rig) -> None:
    async def broken(timeout_s: float) -> list[Event]:
        raise ValueError("bad message")

    stream = rig.client.submit([_request()])
    rig.channel.receive = broken  # type: ignore[method-assign]
    await rig.feed()
    with pytest.raises(EngineDead, match="unreadable"):
        await stream.receive()


async def test_an_engine_that_does_not_connect_is_dead() -> None:
    process = FakeProcess(exit_cause="exit status 1")
    client = ChannelEngineClient(FakeChannel(connects=False), process, {})
    with pytest.raises(EngineDead, match="exit status 1"):
        await client.start()


async def test_close_drains_then_ends_the_process() -> None:
    channel, process = FakeChannel(), FakeProcess()
    client = ChannelEngineClient(channel, process, {})
    await client.start()
    await client.close()
    assert channel.sent == [Drain()]
    assert len(process.waited) == len(process.closed) == 1
    assert channel.closed


async def test_the_zmq_channel_carries_whole_messages(tmp_path: Any) -> None:
    addresses = f"ipc://{tmp_path}/commands", f"ipc://{tmp_path}/events"
    channel = ZmqChannel(*addresses)
    assert not await channel.connect(0.01)
    channel.send(Drain())  # nobody is there: dropped, not raised
    with zmq.Context() as context:
        commands, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        commands.connect(addresses[0])
        outputs.connect(addresses[1])
        assert await channel.connect(2)
        assert await channel.receive(0.01) == []
        sent = [_outputs(SequenceOutput("r", 0, [i])) for i in range(3)]
        for event in sent:
            outputs.send(encode(event))
        received: list[Event] = []
        while len(received) < 3:
            received += await channel.receive(1)
        assert received == sent
        command = Submit(_request())
        channel.send(command)
        assert await asyncio.to_thread(_receive, commands) == command
        commands.close(0)
        outputs.close(0)
    channel.close()


def _receive(socket: zmq.Socket[bytes]) -> Command:
    assert socket.poll(2000)
    return decode_command(socket.recv())


async def test_the_fake_engine_speaks_like_the_real_one() -> None:
    engine = FakeEngine(lambda request, index: Script([5, 6], "stop", 6, cached=1))
    stream = engine.submit([_request()])
    events: list[Any] = []
    while not events or getattr(events[-1], "finish_reason", None) is None:
        events += await stream.receive(1)
    assert isinstance(events[0], Admitted)
    assert events[0].num_cached_tokens + sum(events[0].missed.values()) == 2
    assert [event.token_ids for event in events[1:]] == [[5], [6]]
    assert events[-1].stop_token_id == 6
