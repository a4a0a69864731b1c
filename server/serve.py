"""`radix-mla serve`: start the engine, open the port, drain on SIGTERM.

    bind ─► engine starts ‖ tokenizer loads ─► listen ─► serve ─► drain ─► engine ends ─► exit

The port is taken first and listened on last: what is wrong with model, knobs or port is one line
and exit code 1 before any client can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

import radix_mla.models.hf_config as hf_config
from radix_mla.engine.process import EngineHandle
from radix_mla.errors import ConfigError, RadixMlaError
from radix_mla.text.tokenizer import Tokenizer
from server import logs
from server.app import create_app
from server.draining import DrainingServer
from server.engine_client import ChannelEngineClient
from server.limits import LimitedHttpProtocol
from server.loading import load_progress
from server.openai.sampling import SamplingDefaults
from server.service import ModelFacts
from server.settings import Settings
from server.zmq_channel import ZmqChannel

logger = logging.getLogger("radix_mla.server")
_GRACE_S = 2
_KEEP_ALIVE_S = 75
_FORCED = 130


def run(settings: Settings) -> int:
    """Serves until told to stop; the process's exit code."""
    logs.configure(settings.log_level, settings.log_format, access_log=settings.access_log)
    try:
        with _terminate_as_exit():
            return _run(settings)
    except (RadixMlaError, OSError) as error:
        print(f"radix-mla: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _FORCED


def _run(settings: Settings) -> int:
    folder = locate_model(settings.model)
    _raise_file_limit()
    with contextlib.closing(_bind(settings.host, settings.port)) as listener:
        handle = EngineHandle.start(settings.engine_config(str(folder)))
        try:
            with ThreadPoolExecutor(1) as pool, load_progress() as report:
                tokenizer = pool.submit(
                    Tokenizer.from_dir, folder, trust_remote_code=settings.trust_remote_code
                )
                info = handle.wait_ready(report)
                loaded = tokenizer.result()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(settings, handle, info, folder, loaded, listener))
        finally:
            handle.close(grace_s=0.5)


async def _serve(
    settings: Settings,
    handle: EngineHandle,
    info: dict[str, Any],
    folder: Path,
    tokenizer: Tokenizer | None,
    listener: socket.socket,
) -> int:
    channel = ZmqChannel(handle.command_address, handle.event_address)
    engine = ChannelEngineClient(channel, handle, info, step_timeout_s=settings.step_timeout)
    await engine.start()
    config = hf_config.ModelConfig.from_dir(folder, settings.hf_overrides)
    defaults = SamplingDefaults()
    if settings.generation_config == "auto":
        model_defaults = hf_config.GenerationDefaults.from_dir(folder, config)
        defaults = SamplingDefaults.of_model(model_defaults)
    facts = model_facts(settings, folder, info)
    app = create_app(engine, settings, facts, tokenizer=tokenizer, defaults=defaults)
    server = DrainingServer(uvicorn_config(app, settings), app.state.service)
    _log_start(info, facts, tokenizer, listener)
    try:
        await server.serve(sockets=[listener])
    finally:
        if server.force_exit:
            await server.lifespan.shutdown()
        else:
            await engine.close()
    return _FORCED if server.force_exit else 0


def model_facts(settings: Settings, folder: Path, info: dict[str, Any]) -> ModelFacts:
    """What the API shows, from the engine's Ready.info."""
    config = info["config"]
    return ModelFacts(
        names=served_names(settings, folder),
        path=str(folder),
        vocab_size=info["vocab_size"],
        max_model_len=info["max_model_len"],
        kv_tokens=info["kv_tokens"],
        page_size=config["page_size"],
        dims={
            **{key: value for key, value in info["dims"].items() if key != "vocab_size"},
            "architecture": info["architecture"],
            "num_params": info["num_params"],
            "active_params": info["active_params"],
            "kv_row_bytes": info["kv_row_bytes"],
            "dtype": config["dtype"],
            "kv_dtype": config["kv_dtype"],
            "eos_token_ids": info["eos_token_ids"],
        },
    )


def served_names(settings: Settings, folder: Path) -> tuple[str, ...]:
    """As given, else the folder's name; the model argument itself is understood as well."""
    if settings.served_model_name:
        return tuple(settings.served_model_name)
    if settings.model is None:
        return ("demo",)
    is_hub_id = not Path(settings.model).expanduser().exists()
    own = settings.model if is_hub_id else folder.resolve().name
    return tuple(dict.fromkeys((own, settings.model)))


def locate_model(model: str | None) -> Path:
    """The model's folder: a folder, a hub id, or the bundled demo model.

    Raises ConfigError, CheckpointError.
    """
    if model is None:
        return demo_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from radix_mla.models.checkpoint import locate  # imports torch: only for what is no folder

    return locate(model)


def demo_model() -> Path:
    """The bundled model: inside an installed package, or beside a source tree's packages."""
    package = Path(hf_config.__file__).parent.parent
    for folder in (package / "demo_model", package.parent / "configs" / "demo"):
        if (folder / "config.json").exists():
            return folder
    raise ConfigError("the bundled demo model is missing; name a model: radix-mla serve MODEL")


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """uvicorn with our limits and without its own logging."""
    return uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port without listening. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.set_inheritable(False)
    return listener


def _raise_file_limit() -> None:
    """A connection is a file: the soft limit (often 1,024) goes up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """SIGTERM while loading unwinds the stack, so that the engine is closed."""

    def unwind(sig: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _log_start(
    info: dict[str, Any], facts: ModelFacts, tokenizer: Tokenizer | None, listener: socket.socket
) -> None:
    dims, config = info["dims"], info["config"]
    logger.info(
        "model %s: %s, %.1f M parameters, %d layers, hidden %d, %d heads, latent %d + rope %d",
        facts.name,
        info["architecture"],
        info["num_params"] / 1e6,
        dims["num_hidden_layers"],
        dims["hidden_size"],
        dims["num_attention_heads"],
        dims["kv_lora_rank"],
        dims["qk_rope_head_dim"],
    )
    logger.info(
        "KV cache: %d tokens in pages of %d, %s, %d bytes a token",
        facts.kv_tokens,
        facts.page_size,
        config["kv_dtype"],
        info["kv_row_bytes"],
    )
    reason = "as configured"
    for decision in info["decisions"]:
        if decision.startswith("max_model_len="):
            reason = decision.partition(": ")[2]
        else:
            logger.info("decided: %s", decision)
    logger.info("max_model_len %d: %s", facts.max_model_len, reason)
    if tokenizer is None:
        logger.warning("no tokenizer files: token-id prompts only")
    elif tokenizer.chat_template is None:
        logger.warning("no chat template: /v1/chat/completions answers 400")
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving on http://%s:%d (docs at /docs, metrics at /metrics)", shown, port)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
