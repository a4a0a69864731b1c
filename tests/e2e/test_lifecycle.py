"""Death and drain, with real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from support.server_process import ServerProcess, wait_for

LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 3000, "ignore_eos": True}


def engine_of(server: ServerProcess) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    engines = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    assert len(engines) == 1, [child.cmdline() for child in children]
    return engines[0]


def serve(tiny_model: Path, *, without: Sequence[str] = ("xgrammar",)) -> ServerProcess:
    flags = ("--served-model-name", "tiny", "--kv-cache-tokens", "8192")
    return ServerProcess(tiny_model, *flags, without=without)


def test_engine_death_fails_pending_requests_and_health(tiny_model: Path) -> None:
    with serve(tiny_model) as server:
        results: list[tuple[int, object]] = []
        body = {"model": "tiny", **LONG}
        threads = [
            threading.Thread(
                target=lambda: results.append(server.request("POST", "/v1/completions", body))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metrics().total("requests_running") == 3)
        engine_of(server).send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        assert [status // 100 for status, _ in results] == [5, 5, 5]
        assert all("error" in value for _, value in results)  # type: ignore[operator]
        wait_for(lambda: server.request("GET", "/health")[0] == 503, 5)
        assert server.request("GET", "/ready")[0] == 503
        status, value = server.request("POST", "/v1/completions", body)
        assert status == 503, value


def test_sigterm_drains_and_leaves_no_process(tiny_model: Path) -> None:
    with serve(tiny_model, without=()) as server:
        engine = engine_of(server)
        body = {**LONG, "model": "tiny", "max_tokens": 300}
        connection = server.open_stream("/v1/completions", **body)
        reply = connection.getresponse()
        assert reply.status == 200
        reply.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = reply.read().decode()
        assert '"finish_reason":"length"' in rest.replace(" ", "")
        assert rest.rstrip().endswith("data: [DONE]")
        connection.close()
        assert server.process.wait(20) == 0
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_no_engine_outlives_a_killed_server(tiny_model: Path) -> None:
    with serve(tiny_model, without=()) as server:
        engine = engine_of(server)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        wait_for(lambda: not engine.is_running(), 10)


def test_a_bad_model_is_one_clear_line_before_the_port_opens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    try:
        ServerProcess(tmp_path)
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("the server started")
    assert "GPT2LMHeadModel" in text
    assert "Traceback" not in text
    assert text.startswith("server exited 1")


def test_a_second_sigterm_answers_in_the_error_shape_and_leaves(tiny_model: Path) -> None:
    with serve(tiny_model) as server, ThreadPoolExecutor(1) as pool:
        engine = engine_of(server)
        body = {"model": "tiny", **LONG, "n": 8}
        pending = pool.submit(server.request, "POST", "/v1/completions", body)
        wait_for(lambda: server.metrics().total("requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.request("GET", "/ready")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        status, value = pending.result(10)
        assert status == 503
        assert value["error"]["message"]
        assert server.process.wait(10) == 130
        wait_for(lambda: not engine.is_running())
        assert "Traceback" not in server.output()
