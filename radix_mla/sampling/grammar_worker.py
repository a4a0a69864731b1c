"""The grammar compiler's own process: it can be killed, which a thread inside C++ cannot.

    engine ── (job, kind, text) ──► worker ── fork ──► child: compiles, writes the result, exits
           ◄─ (job, result) ──────         ◄─ pipe ──        or is killed at its time limit

The worker imports xgrammar and reads the vocabulary once, and has a single thread, so that a fork
costs milliseconds. `grammar.py` starts it as `python -m radix_mla.sampling.grammar_worker FD`, with
a socket: the first message is the Setup as JSON, the first answer the vocabulary's description.
It ends when the socket does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from radix_mla.sampling.grammar_compile import compile_text

MAX_RESULT_BYTES = 16 << 20
_MEMORY_BYTES = 3 << 30  # of address space, beside what the worker itself has
_MAX_CHILDREN = 4
_MAX_CPU_S = 10
_MAX_PATIENCE = 5  # times the limit, for who was kept waiting by others
_CONTROL = frozenset(range(0x20)) - {0x0A}
_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Warning: )?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """eos_ids: what may follow a complete text. vocab_size: ids that can be sampled."""

    folder: str
    eos_ids: list[int]
    vocab_size: int
    timeout_s: float
    trust_remote_code: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """special: id → text of the special tokens; control: ids whose bytes JSON text cannot hold."""

    token_bytes: list[bytes]
    special: dict[int, str]
    control: list[int]


def read_vocabulary(setup: Setup) -> Vocabulary:
    """The bytes of each id; empty for ids that no text contains. Raises CheckpointError."""
    from radix_mla.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(setup.folder, trust_remote_code=setup.trust_remote_code)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer")
    never = {*setup.eos_ids, tokenizer.bos_token_id, tokenizer.hf.pad_token_id}
    token_bytes, special, control = [], {}, []
    for token_id in range(setup.vocab_size):
        raw = b"" if token_id in never else _bytes_of(tokenizer, token_id)
        token_bytes.append(raw)
        if raw and token_id in tokenizer.special_ids:
            special[token_id] = raw.decode(errors="replace")
        elif not _CONTROL.isdisjoint(raw):
            control.append(token_id)
    return Vocabulary(token_bytes, special, control)


def _bytes_of(tokenizer: Any, token_id: int) -> bytes:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if not tokenizer.is_byte_level and "▁" in token:
        return str(token).replace("▁", " ").encode()
    raw: bytes = tokenizer.token_bytes(token_id)
    # Part of a character, of which this tokenizer does not tell the bytes.
    return b"" if "�".encode() in raw else raw


@dataclass(slots=True)
class _Child:
    job: int
    pid: int
    pipe: Connection
    started: float
    deadline: float


class Worker:
    """The loop: at most a few children at once, each with its deadline."""

    def __init__(self, connection: Connection, info: Any, timeout_s: float) -> None:
        self._connection = connection
        self._info = info
        self._timeout_s = timeout_s
        self._queue: deque[tuple[int, str, str]] = deque()
        self._children: list[_Child] = []

    def run(self) -> None:
        while True:
            while self._queue and len(self._children) < _MAX_CHILDREN:
                self._children.append(self._fork(*self._queue.popleft()))
            ready = wait([self._connection, *(c.pipe for c in self._children)], self._patience())
            if self._connection in ready:
                try:
                    job, kind, text = json.loads(self._connection.recv_bytes())
                except (EOFError, OSError):
                    return
                self._queue.append((job, kind, text))
            now = time.monotonic()
            for child in list(self._children):
                if child.pipe in ready:
                    self._finish(child, self._result(child))
                elif now >= child.deadline and not self._gets_more_time(child, now):
                    seconds = f"{self._timeout_s:g}"
                    self._finish(child, b"e" + f"it took longer than {seconds} s".encode())

    def close(self) -> None:
        for child in self._children:
            os.kill(child.pid, signal.SIGKILL)

    def _gets_more_time(self, child: _Child, now: float) -> bool:
        """On a busy machine the limit may pass before a harmless grammar had its turn."""
        if now - child.started >= _MAX_PATIENCE * self._timeout_s:
            return False
        if _cpu_s(child.pid) >= self._timeout_s / 2:
            return False
        child.deadline = now + self._timeout_s / 2
        return True

    def _patience(self) -> float | None:
        deadlines = [child.deadline for child in self._children]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _fork(self, job: int, kind: str, text: str) -> _Child:
        read_fd, write_fd = os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            # Nothing of the parent's may run here: no cleanup, no return.
            try:
                os.close(read_fd)
                _compile_in_child(Connection(write_fd, readable=False), self._info, kind, text)
            finally:
                os._exit(0)
        os.close(write_fd)
        pipe = Connection(read_fd, writable=False)
        return _Child(job, pid, pipe, started, started + self._timeout_s)

    def _result(self, child: _Child) -> bytes:
        try:
            return child.pipe.recv_bytes(MAX_RESULT_BYTES + 1)
        except (EOFError, OSError):
            return b"ecompiling it needs more memory or depth than is allowed"

    def _finish(self, child: _Child, result: bytes) -> None:
        self._children.remove(child)
        child.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        # Said first: giving gigabytes back takes the system a while.
        self._connection.send_bytes(child.job.to_bytes(8, "little") + result)
        os.waitpid(child.pid, 0)


def _compile_in_child(pipe: Connection, info: Any, kind: str, text: str) -> None:
    """Sends `k` and the serialised grammar, or `e` and why not."""
    import xgrammar

    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))  # if the worker is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.memfd_create("stderr")
    os.dup2(log, 2)
    try:
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        compiled = compile_text(compiler, kind, text)
        # xgrammar warns where it does not enforce something; then the output could be invalid.
        # The schemas inside of a tag are tools', where as much as can be is enforced.
        warnings = os.pread(log, 4096, 0).decode(errors="replace")
        if "Warning: " in warnings and kind != "structural_tag":
            result = b"e" + readable(warnings).encode()
        elif not _can_begin(compiled, info.vocab_size):
            result = b"eno text matches it"
        else:
            result = b"k" + compiled.serialize_json().encode()
    except Exception as error:
        result = b"e" + readable(str(error)).encode()
    if len(result) > MAX_RESULT_BYTES:
        result = f"eit needs more than {MAX_RESULT_BYTES >> 20} MiB".encode()
    pipe.send_bytes(result)


def _can_begin(compiled: Any, vocab_size: int) -> bool:
    """Whether there is a first token. A grammar whose mask takes too long is found out here too."""
    import xgrammar

    mask = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
    return bool(mask.any())


def readable(text: str) -> str:
    """The first line, without xgrammar's time and place."""
    lines = [line.strip() for line in _PREFIX.sub("", text).splitlines()]
    return next((line for line in lines if line), "it is not valid")[:500].rstrip(".")


def _cpu_s(pid: int) -> float:
    """Seconds that a process has computed; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    setup = Setup(**json.loads(connection.recv_bytes()))
    try:
        import xgrammar

        vocabulary = read_vocabulary(setup)
        info = xgrammar.TokenizerInfo(
            vocabulary.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=setup.vocab_size,
            stop_token_ids=setup.eos_ids,
        )
        answer: dict[str, Any] = {
            "info": info.serialize_json(),
            "special": list(vocabulary.special.items()),
            "control": vocabulary.control,
        }
    except Exception as error:
        connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(json.dumps(answer).encode())
    worker = Worker(connection, info, setup.timeout_s)
    try:
        worker.run()
    except OSError:
        pass  # the engine is gone
    finally:
        worker.close()
        os._exit(0)  # at once: there is nothing to tidy up


if __name__ == "__main__":
    main()
