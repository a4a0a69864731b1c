"""`radix-mla chat`: talk to a running server in the terminal.

Shows the prompt's progress, the answer as it comes, and how much of the prompt was cached.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import IO, Annotated, Any

import typer

from server.chat_client import ChatClient, ChatError, Progress, Stats, Text

_HELP = "/clear starts over · /exit, Ctrl-D leaves · Ctrl-C stops an answer"
_DIM, _PLAIN, _CLEAR_LINE = "\033[2m", "\033[0m", "\r\033[K"


class Terminal:
    """Writes one conversation. `colour`: the output is a terminal."""

    def __init__(self, client: ChatClient, out: IO[str], *, colour: bool) -> None:
        self._client = client
        self._out = out
        self._colour = colour
        self._shows_progress = False
        self._is_dim = False

    def turn(self, question: str) -> bool:
        """Asks and shows; False when it failed (the reason is shown)."""
        pieces = self._client.ask(question)
        try:
            self._show(pieces)
        except KeyboardInterrupt:
            pieces.close()
            self._end("stopped")
            return True
        except ChatError as error:
            self._end(f"error: {error}")
            return False
        self._end(summary(self._client.stats))
        return True

    def run(self, read_line: Callable[[str], str]) -> None:
        """Reads questions until the end."""
        self._write_dim(f"{self._client.model} at {self._client.url} · {_HELP}\n")
        head = [message for message in self._client.messages if message["role"] == "system"]
        while True:
            try:
                question = read_line("> ").strip()
            except EOFError:
                self._out.write("\n")
                return
            except KeyboardInterrupt:
                self._out.write("\n")
                continue
            if question in ("/exit", "/quit"):
                return
            if question == "/clear":
                self._client.messages = list(head)
                self._write_dim("a new conversation\n")
            elif question.startswith("/"):
                self._write_dim(_HELP + "\n")
            elif question:
                self.turn(question)

    def _show(self, pieces: Iterator[Progress | Text]) -> None:
        for piece in pieces:
            if isinstance(piece, Progress):
                self._progress(piece)
            else:
                self._clear_progress()
                self._style(dim=piece.is_reasoning)
                self._out.write(piece.text)
            self._out.flush()

    def _progress(self, progress: Progress) -> None:
        if not self._colour:
            return
        share = 100 * progress.done // max(1, progress.total)
        self._style(dim=True)
        self._out.write(
            f"{_CLEAR_LINE}prompt {progress.done:,} of {progress.total:,} tokens ({share}%), "
            f"{progress.cached:,} cached"
        )
        self._shows_progress = True

    def _clear_progress(self) -> None:
        if self._shows_progress:
            self._out.write(_CLEAR_LINE)
            self._shows_progress = False

    def _end(self, text: str) -> None:
        self._clear_progress()
        self._style(dim=False)
        self._out.write("\n")
        self._write_dim(f"[{text}]\n")

    def _write_dim(self, text: str) -> None:
        self._style(dim=True)
        self._out.write(text)
        self._style(dim=False)
        self._out.flush()

    def _style(self, *, dim: bool) -> None:
        if self._colour and dim != self._is_dim:
            self._out.write(_DIM if dim else _PLAIN)
        self._is_dim = dim


def summary(stats: Stats) -> str:
    """One line: tokens cached, time to the first token, speed, why it ended if not by itself."""
    share = 100 * stats.cached_tokens / max(1, stats.prompt_tokens)
    parts = [
        f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens cached ({share:.0f}%)"
    ]
    if stats.first_token_s is not None:
        parts.append(f"first token {stats.first_token_s:.2f} s")
    speed = stats.tokens_per_s
    tokens = f"{stats.completion_tokens:,} tokens"
    parts.append(tokens if speed is None else f"{tokens} at {speed:.0f}/s")
    if stats.finish_reason not in ("stop", None):
        parts.append(f"ended by {stats.finish_reason}")
    return " · ".join(parts)


def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question; without it, a conversation.")
    ] = None,
    url: Annotated[
        str, typer.Option("--url", envvar="RADIX_MLA_URL", help="Where the server is.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Model name; default: the server's first.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="API key.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; default: the model's.")
    ] = None,
) -> None:
    """Talk to a running server."""
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    client = ChatClient(url, model, api_key, options)
    if system:
        client.messages.append({"role": "system", "content": system})
    terminal = Terminal(client, sys.stdout, colour=sys.stdout.isatty())
    try:
        client.model = model or client.served_model()
    except ChatError as error:
        print(f"radix-mla: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if message is None and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines with it
        terminal.run(input)
    elif not terminal.turn(message if message is not None else sys.stdin.read()):
        raise typer.Exit(1)
