"""Grammars: from a request's `Grammar` to what masks its logits, compiled off the step path.

xgrammar (extra `grammar`) is imported with the first grammar that is compiled. Compiling runs in
a process of its own under a time limit (grammar_process.py); here the result is only read back.
A second library fits behind the three methods of `TokenMatcher`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radix_mla.errors import EngineError, InvalidRequest
from radix_mla.request import Grammar
from radix_mla.sampling.grammar_process import WorkerProcess
from radix_mla.sampling.grammar_worker import Setup

TIMEOUT_S = 0.6  # the answer is there within a second; on a busy machine it may take longer
MAX_TEXT_BYTES = 256 << 10
_CACHE_BYTES = 256 << 20
_NUM_THREADS = 4
_JSON_KINDS = frozenset(("json_object", "json_schema"))


class TokenMatcher(Protocol):
    """Where one sequence stands in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Goes on with a token; False (and nothing changed) when it cannot follow."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Sets the bits of the ids that can follow. int32 [ceil(vocab / 32)], lowest bit first."""

    def reset(self) -> None:
        """Back to the beginning."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """forbidden: int32 [ceil(vocab / 32)], ids that are masked whatever the grammar says."""

    compiled: Any  # xgrammar.CompiledGrammar
    forbidden: NDArray[np.int32]
    eos_ids: tuple[int, ...]
    num_bytes: int

    def matcher(self) -> TokenMatcher:
        return _XGrammarMatcher(self)


class _XGrammarMatcher:
    """`TokenMatcher` of xgrammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar.compiled)
        self._allowed = ~grammar.forbidden

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask.fill(-1)  # it leaves a mask alone in which everything is allowed
        if self._matcher.is_terminated():
            mask.fill(0)
            return
        self._matcher.fill_next_token_bitmask(mask[None])
        mask &= self._allowed

    def reset(self) -> None:
        self._matcher.reset()


class GrammarCompiler:
    """Compiles in the background; results are kept by grammar. Thread-safe."""

    def __init__(
        self,
        folder: str,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        timeout_s: float = TIMEOUT_S,
        trust_remote_code: bool = False,
    ) -> None:
        """Starts nothing."""
        self._setup = Setup(
            folder=folder,
            eos_ids=sorted(eos_ids),
            vocab_size=vocab_size,
            timeout_s=timeout_s,
            trust_remote_code=trust_remote_code,
        )
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._vocabulary: _Vocabulary | None = None
        self._is_started = False
        self._is_closed = False
        self._known: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    @staticmethod
    def is_installed() -> bool:
        return find_spec("xgrammar") is not None

    def start(self) -> None:
        """Gets ready ahead of the first grammar, so that this one need not wait. Idempotent."""
        if not self._is_started and self.is_installed():
            self._is_started = True
            self._pool.submit(self._prepare)

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The future's exception is InvalidRequest for what is wrong with the grammar.

        Raises InvalidRequest at once for what needs no compiling to be refused.
        """
        if not self.is_installed():
            raise InvalidRequest(
                "Structured output needs xgrammar, which this server lacks: "
                "pip install 'radix-mla[grammar]'.",
                code="unsupported_parameter",
            )
        if len(grammar.text.encode()) > MAX_TEXT_BYTES:
            raise _refused(grammar, f"it is longer than {MAX_TEXT_BYTES >> 10} KiB")
        with self._lock:
            future = self._known.get(grammar)
            if future is not None and not _failed_by_us(future):
                self._known.move_to_end(grammar)
                return future
            self._trim()
            future = self._known[grammar] = self._pool.submit(self._compile, grammar)
            return future

    def close(self) -> None:
        """Ends the worker; what is being compiled fails. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True  # or a compile that is about to begin would start another worker
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        worker, vocabulary = self._ready()
        result = worker.compile(grammar)
        if result[:1] != b"k":
            raise _refused(grammar, result[1:].decode(errors="replace"))
        return vocabulary.read(grammar, result[1:].decode())

    def _prepare(self) -> None:
        _, vocabulary = self._ready()
        vocabulary.load()

    def _ready(self) -> tuple[WorkerProcess, _Vocabulary]:
        """A worker that lives, and the vocabulary, which is the same for each of them."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the grammar compiler is closed")
            if self._worker is None or self._worker.is_dead:
                self._worker = WorkerProcess(self._setup)
            worker = self._worker
        description = worker.wait_ready()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._setup, description)
            return worker, self._vocabulary

    def _trim(self) -> None:
        """Forgets the grammars that were asked for least recently."""
        total = sum(_size(future) for future in self._known.values())
        for grammar, future in list(self._known.items()):
            if total <= _CACHE_BYTES:
                break
            if future.done():
                total -= _size(future)
                del self._known[grammar]


def _size(future: Future[CompiledGrammar]) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 64 << 10  # the text itself, and to bound their number
    return future.result().num_bytes


def _failed_by_us(future: Future[CompiledGrammar]) -> bool:
    """A failure that is not the grammar's own: worth another try."""
    if not future.done():
        return False
    return future.cancelled() or not isinstance(future.exception(), InvalidRequest | None)


def _refused(grammar: Grammar, why: str) -> InvalidRequest:
    name = grammar.kind.replace("_", " ")
    return InvalidRequest(f"This {name} cannot be used: {why}.", code="invalid_grammar")


class _Vocabulary:
    """The vocabulary in this process, from the worker's description of it."""

    def __init__(self, setup: Setup, answer: Mapping[str, Any]) -> None:
        self._eos_ids = tuple(setup.eos_ids)
        self._size = setup.vocab_size
        self._special: list[tuple[int, str]] = [(int(i), text) for i, text in answer["special"]]
        self._control: list[int] = answer["control"]
        self._serialised: str = answer["info"]
        self._info: Any = None
        self._lock = threading.Lock()

    def load(self) -> Any:
        """The xgrammar.TokenizerInfo; the first call imports xgrammar."""
        import xgrammar

        with self._lock:
            if self._info is None:
                self._info = xgrammar.TokenizerInfo.deserialize_json(self._serialised)
            return self._info

    def read(self, grammar: Grammar, serialised: str) -> CompiledGrammar:
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, self.load())
        return CompiledGrammar(
            compiled, self._forbidden(grammar), self._eos_ids, compiled.memory_size_bytes
        )

    def _forbidden(self, grammar: Grammar) -> NDArray[np.int32]:
        """Special tokens that the grammar does not spell out, and for JSON raw control characters.

        A special token inside a string would vanish from the text, or end a turn. xgrammar allows
        raw control characters in strings with a length, where JSON does not; a structural tag with
        such a string loses them everywhere.
        """
        text, named = grammar.text, frozenset[int]()
        if grammar.kind == "structural_tag":
            tag = json.loads(text)
            text, named = json.dumps(tag, ensure_ascii=False), frozenset(_named_tokens(tag))
        ids = [
            token_id
            for token_id, spelled in self._special
            if spelled not in text and token_id not in named
        ]
        if grammar.kind in _JSON_KINDS or '"maxLength"' in text or '"minLength"' in text:
            ids += self._control
        bits = np.zeros(-(-self._size // 32) * 32, dtype=np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view("<i4")


def _named_tokens(tag: Any) -> Iterator[int]:
    """The ids that a structural tag allows by number."""
    if isinstance(tag, list):
        for item in tag:
            yield from _named_tokens(item)
    elif isinstance(tag, dict):
        for name, value in tag.items():
            if name == "token" and isinstance(value, int):
                yield value
            elif name == "trigger_tokens" and isinstance(value, list):
                yield from (item for item in value if isinstance(item, int))
            else:
                yield from _named_tokens(value)
