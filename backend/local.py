"""An engine on this machine: vLLM's AsyncLLM, its engine core in a process of its own.

One thread of this process runs the event loop that AsyncLLM lives in; `submit` may be called from anywhere. vLLM's
classes are named by string here, so that this module knows nothing of the plugin but its address.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from multiprocessing import spawn
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lazyrag import errors
from lazyrag.backend import control, wire
from lazyrag.backend.contents import Sender
from lazyrag.backend.engine import (
    Cancel,
    Chunks,
    Deliver,
    Delta,
    EngineInfo,
    Request,
    Sampling,
    no_prefetch_counters,
    no_tier_counters,
    prefetch_requests,
)
from lazyrag.backend.fingerprint import model_fingerprint
from lazyrag.backend.guided import check_size
from lazyrag.backend.layout import Span, check_spans, take_apart
from lazyrag.backend.spawned import quieten
from lazyrag.backend.tiers.disk import DiskTier, most_header_bytes
from lazyrag.backend.tiers.policy import POLICIES
from lazyrag.errors import (
    ConfigError,
    ContextOverflowError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    RequestError,
)
from lazyrag.modes import ReuseMode, default_block_size
from lazyrag.types import COMPUTED, DISK, HBM, HOST, Reuse

SHUTDOWN_S = 30  # a killed engine core leaks shared memory
CPU_KV_BYTES = 1 << 30
CPU_BLOCK = 32
THREAD = "lazyrag-engine"
PLUGIN = "lazyrag.backend.plugin"
SPAWNED = "lazyrag.backend.spawned"
REUSED = (HBM, HOST, DISK)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LocalEngine:
    """Runs a model in vLLM. Constructing it starts the engine and returns when it is ready (tens of seconds).

    Args:
        model: folder of a Hugging Face checkpoint.
        mode: a `ReuseMode` as text. In mode exact the engine is plain vLLM; any other is a default, and requests may
            have others.
        dtype: as vLLM's `--dtype`.
        max_model_len: None for the model's own.
        block_size: tokens a KV block; None for a default that suits the device and the mode. In mode exact on a CPU it
            is taken up to a multiple of 32.
        kv_cache_bytes: size of the KV pool; None for vLLM's choice on a GPU, 1 GiB on a CPU.
        kv_root: folder for the KV of chunks; None keeps it in the pool only.
        kv_disk_bytes: limit for `kv_root`; None for no limit.
        kv_host_bytes: host memory for the KV of chunks, beside the pool; None or 0 for none. Pinned on a GPU's host.
        tier_policy: which chunks host memory gives up: a name of `lazyrag.backend.tiers.policy.POLICIES`.
        debug: check the scheduler's invariants after every step.
        engine_args: further arguments of vLLM's AsyncEngineArgs; they win.

    Raises:
        ConfigError: vLLM knows no such argument, or refuses its value.
        MissingExtraError: vLLM is not installed.
        UnsupportedError: the model or a setting is refused; the message holds every reason.
        EngineStartError: vLLM could not start.
    """

    def __init__(
        self,
        model: str,
        *,
        mode: str = "lazy",
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_root: Path | None = None,
        kv_disk_bytes: int | None = None,
        kv_host_bytes: int | None = None,
        tier_policy: str = "cost",
        debug: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        prepare_process()
        reuse_mode = ReuseMode.parse(mode)
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        arguments |= device_arguments(arguments, reuse_mode)
        if not reuse_mode.is_exact:
            arguments |= plugin_arguments(debug)
            if kv_root is not None or kv_host_bytes:
                arguments["kv_transfer_config"] = connector_arguments(
                    kv_root, kv_disk_bytes, host_bytes=kv_host_bytes, policy=tier_policy
                )
        arguments |= with_own_config(engine_args or {}, arguments)
        self._mode = reuse_mode
        self._engine_args = dict(engine_args or {})
        self._counters: Counter[str] = Counter()
        self._ids = itertools.count()
        self._sender = Sender()
        self._tiers, self._prefetches = no_tier_counters(), no_prefetch_counters()
        self._closed = False
        # A request is either handed to the loop before `close` looks for what is in flight, or refused.
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=THREAD, daemon=True)
        self._thread.start()
        try:
            with starting() as start:
                try:
                    self._info = self._wait(self._start(arguments))
                except errors.LazyRAGError:
                    raise
                except Exception as error:
                    raise start.error(error) from error
        except BaseException:
            self._stop_loop()
            raise

    # ------------------------------------------------------------ life

    async def _start(self, arguments: dict[str, Any]) -> EngineInfo:
        from vllm import AsyncEngineArgs
        from vllm.utils.torch_utils import get_kv_cache_torch_dtype
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except JSONDecodeError as error:
            raise EngineStartError(
                f"A file in {arguments['model']} cannot be read:",
                why=f"it holds broken JSON ({error}); the head of a .safetensors file is JSON, too.",
                fix="Fetch the model again.",
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "vLLM does not accept the engine's settings:",
                why=explanation(error),
                fix="engine_args holds arguments of `vllm serve`, with underscores.",
            ) from error
        model = config.model_config
        fingerprint = model_fingerprint(
            model.model,
            dtype=str(model.dtype).removeprefix("torch."),
            kv_cache_dtype=config.cache_config.cache_dtype,
            engine_args=self._engine_args,
        )
        if config.kv_transfer_config is not None:
            extra = config.kv_transfer_config.kv_connector_extra_config
            extra["fingerprint"] = fingerprint
            if extra["root"] is not None:
                DiskTier(extra["root"], fingerprint, extra["budget_bytes"])  # a folder that cannot be is an error here
        self._llm = AsyncLLM.from_vllm_config(config)
        layers, ranks = model.get_num_layers(config.parallel_config), config.parallel_config.tensor_parallel_size
        # Where there are fewer heads than ranks, several keep the same one.
        heads = model.get_num_kv_heads(config.parallel_config) * ranks
        kv_dtype = get_kv_cache_torch_dtype(config.cache_config.cache_dtype, model.dtype)
        return EngineInfo(
            model=model.model,
            tokenizer=model.tokenizer,
            mode=str(self._mode),
            max_model_len=model.max_model_len,
            block_size=config.cache_config.block_size,
            kv_bytes_per_token=2 * layers * heads * model.get_head_size() * kv_dtype.itemsize,
            kv_bytes_per_chunk=ranks * most_header_bytes(layers),
            fingerprint=fingerprint,
        )

    def close(self) -> None:
        """Stop the engine; requests in flight get `EngineDeadError`. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._wait(self._cancel_tasks())
            # In this thread: once the interpreter is shutting down, a loop can give work to no other one.
            self._llm.shutdown(timeout=SHUTDOWN_S)
            del self._llm  # its finaliser shuts down once more, and must not do so when the interpreter is half gone
        finally:
            self._stop_loop()

    async def _cancel_tasks(self) -> None:
        """End the requests, and vLLM's own tasks, which would report the death of the engine core as an error."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------ requests

    @property
    def info(self) -> EngineInfo:
        """What the text half must know; constant."""
        return self._info

    @property
    def alive(self) -> bool:
        """Whether the engine core runs. vLLM watches its process."""
        llm = getattr(self, "_llm", None)  # None once it is closed
        return llm is not None and not self._closed and not llm.errored

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        """See `lazyrag.backend.engine.Engine.submit`."""
        started = time.monotonic()
        with self._closing:
            closed = self._closed
            if not closed:
                running: Future[None] = asyncio.run_coroutine_threadsafe(
                    self._run(request, deliver, started), self._loop
                )
        if closed:
            deliver(EngineDeadError("The engine is closed."))
            return lambda: None

        def cancel() -> None:
            running.cancel()

        return cancel

    async def _run(self, request: Request, deliver: Deliver, started: float) -> None:
        try:
            await self._generate(request, deliver, started)
        except asyncio.CancelledError:
            if self._closed:
                deliver(EngineDeadError("The engine was closed while this request was in flight."))
            raise
        except Exception as error:
            deliver(request_error(error))

    async def _generate(self, request: Request, deliver: Deliver, started: float) -> None:
        check_length(request, self._info.max_model_len)
        try:
            await self._attempt(request, deliver, started, send_everything=False)
        except errors.UnknownContentError:
            await self._attempt(request, deliver, started, send_everything=True)

    async def _attempt(self, request: Request, deliver: Deliver, started: float, *, send_everything: bool) -> None:
        token_ids, extra = self._in_parts(request, send_everything=send_everything)
        prompt = as_prompt(token_ids, request.namespace)
        if extra and request.warms_only:
            extra |= control.control_to_args(control.WARM)
        params = sampling_params(request, extra)
        ttft = None
        request_id = f"lazyrag-request-{next(self._ids)}"
        async with aclosing(self._llm.generate(prompt, params, request_id=request_id)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if ttft is None and completion.token_ids:
                    ttft = time.monotonic() - started
                if not output.finished:
                    deliver(delta(completion))
                    continue
                if error := wire.error_from_params(output.kv_transfer_params):
                    raise error
                if completion.finish_reason == "error":
                    raise RequestError("The request failed inside vLLM.", why="Its log says more.")
                self._note_tiers(output.kv_transfer_params)
                report = wire.report_from_params(output.kv_transfer_params)
                reuse = reuse_of(request, report, output.num_cached_tokens or 0)
                self._count(reuse)
                deliver(delta(completion, reuse=reuse, ttft_s=ttft))

    def _in_parts(self, request: Request, *, send_everything: bool) -> tuple[list[int], dict[str, Any]]:
        """The tokens that vLLM is given, and what makes the request a lazy one."""
        if self._mode.is_exact or not (request.segments or request.prefix_len):
            return list(request.token_ids), {}
        spans = [Span(s.start, s.num_tokens, s.offset, s.chunk_tokens) for s in request.segments]
        check_spans(spans, request.prefix_len, len(request.token_ids))
        literals, contents = take_apart(request.token_ids, spans, request.prefix_len)
        identities: list[object] = [segment.chunk_id for segment in request.segments]
        if request.prefix_len:
            identities.insert(0, "preamble")
        runs = list(zip(identities, contents, strict=True))
        try:
            names, sent = self._sender.names(runs, namespace=request.namespace, everything=send_everything)
        except ValueError as error:
            raise RequestError("The tokens of a segment are not valid:", why=f"{error}.") from None
        return literals, wire.request_to_args(
            wire.WireRequest(spans, request.prefix_len, names, sent, request.sink, request.kv_quota)
        )

    def _count(self, reuse: Reuse) -> None:
        self._counters.update(
            requests=1, prompt_tokens=reuse.prompt_tokens, reused_tokens=reuse.reused_tokens, **Counter(reuse.sources)
        )

    def stats(self) -> dict[str, Any]:
        """See `lazyrag.backend.engine.Engine.stats`."""
        keys = ("requests", "prompt_tokens", "reused_tokens", HBM, HOST, DISK, COMPUTED)
        return {
            **{key: self._counters[key] for key in keys},
            "tiers": {name: dict(counters) for name, counters in self._tiers.items()},
            "prefetch": dict(self._prefetches),
        }

    def _note_tiers(self, params: Mapping[str, Any] | None) -> None:
        report = (params or {}).get(wire.REPORT) or {}
        self._tiers = report.get(control.TIERS, self._tiers)
        self._prefetches = report.get(control.PREFETCHED, self._prefetches)

    # ------------------------------------------------------------ tiers

    def prefetch(
        self, chunks: Chunks, *, prefix: Sequence[int] = (), sink: Sequence[int] = (), namespace: str = ""
    ) -> None:
        """See `lazyrag.backend.engine.Engine.prefetch`."""
        if self._mode.is_exact:
            return
        requests = prefetch_requests(chunks, prefix, sink, namespace, self._info)
        with self._closing:
            if not self._closed:
                for request in requests:
                    asyncio.run_coroutine_threadsafe(self._prefetch(request), self._loop)

    async def _prefetch(self, request: Request) -> None:
        try:
            await self._operate(control.PREFETCH, (), request)
        except Exception as error:  # it was a favour: the request itself will say what is wrong
            logger.debug("Chunks were not prefetched: %s", request_error(error))

    def pin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.pin`."""
        self._have_done(control.PIN, chunks, namespace)

    def unpin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.unpin`."""
        self._have_done(control.UNPIN, chunks, namespace)

    def forget(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.forget`."""
        self._have_done(control.FORGET, chunks, namespace)

    def _have_done(self, operation: str, chunks: Chunks, namespace: str) -> None:
        """Wait for an operation."""
        tokens = [ids for _, ids in chunks]
        if self._mode.is_exact or not tokens:
            return
        with self._closing:
            if self._closed:
                raise EngineDeadError("The engine is closed.")
            done = asyncio.run_coroutine_threadsafe(
                self._operate(operation, tokens, Request([0], namespace=namespace)), self._loop
            )
        try:
            done.result()
        except CancelledError:
            raise EngineDeadError("The engine was closed while chunks were asked for.") from None
        except Exception as error:
            raise request_error(error) from error

    async def _operate(self, operation: str, chunks: Sequence[Sequence[int]], request: Request) -> None:
        """Send an operation of `control` and wait for its answer.

        Args:
            operation: which.
            chunks: on these, or on the request's own.
            request: carries it.
        """
        for send_everything in (False, True):
            token_ids, extra = self._in_parts(request, send_everything=send_everything)
            params = sampling_params(request, {**extra, **control.control_to_args(operation, chunks)})
            request_id = f"lazyrag-request-{next(self._ids)}"
            prompt = as_prompt(token_ids, request.namespace)
            error = None
            async with aclosing(self._llm.generate(prompt, params, request_id=request_id)) as outputs:
                async for output in outputs:
                    error = wire.error_from_params(output.kv_transfer_params)
                    self._note_tiers(output.kv_transfer_params)
            if error is None:
                return
            if send_everything or not isinstance(error, errors.UnknownContentError):
                raise error


# ---------------------------------------------------------------- arguments


def prepare_process() -> None:
    """Set vLLM's environment before its first import, where the user has not."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # what concerns the user is raised or logged by LazyRAG
    # A process that has used torch may hold OpenMP threads, which do not survive a fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    quieten()


def device_arguments(arguments: Mapping[str, Any], mode: ReuseMode) -> dict[str, Any]:
    """Defaults where vLLM's own do not suit the CPU."""
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise errors.MissingExtraError(
            "vLLM is not installed.",
            why=str(error),
            fix='Type: pip install "lazyrag[gpu]" (or "lazyrag[cpu]").',
        ) from error
    if not current_platform.is_cpu():
        return {}
    block_size = arguments["block_size"] or default_block_size(mode)
    if mode.is_exact:  # vLLM's own attention on CPUs takes no other; it is no matter of answers
        block_size = -(-block_size // CPU_BLOCK) * CPU_BLOCK
    return {
        "block_size": block_size,
        "kv_cache_memory_bytes": arguments["kv_cache_memory_bytes"] or CPU_KV_BYTES,
        "enforce_eager": True,  # compiling takes 95 s on two cores and gains little there
    }


def plugin_arguments(debug: bool) -> dict[str, Any]:
    """What makes a vLLM engine a LazyRAG engine."""
    from vllm.platforms import current_platform

    own = {"additional_config": {wire.REPORT: {"debug": debug}}}
    if current_platform.is_cpu():
        return own | {
            "scheduler_cls": f"{PLUGIN}.scheduler.LazyScheduler",
            "worker_cls": f"{PLUGIN}.worker_cpu.LazyCPUWorker",
        }
    if current_platform.is_cuda():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        return own | {
            "scheduler_cls": f"{PLUGIN}.scheduler.LazyAsyncScheduler",
            "worker_cls": f"{PLUGIN}.worker_cuda.LazyCUDAWorker",
            "attention_backend": "FLASH_ATTN",
            "async_scheduling": True,
        }
    raise errors.UnsupportedError(
        f"Reuse of chunks runs on CPUs and on NVIDIA GPUs, not on {current_platform.device_name}.",
        fix='Use mode="exact" on this machine.',
    )


def with_own_config(engine_args: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A user's arguments, whose `additional_config` keeps what LazyRAG has put into its own."""
    if "additional_config" not in engine_args:
        return dict(engine_args)
    merged = {**(engine_args["additional_config"] or {}), **arguments.get("additional_config", {})}
    return {**engine_args, "additional_config": merged}


def connector_arguments(
    root: Path | None, budget_bytes: int | None = None, *, host_bytes: int | None = None, policy: str = "cost"
) -> dict[str, Any]:
    """The engine's `kv_transfer_config` for chunk KV outside the pool; the fingerprint is added later.

    Args:
        root: folder on disk; None for none.
        budget_bytes: limit for it.
        host_bytes: host memory.
        policy: which chunks that gives up.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy not in POLICIES:
        raise ConfigError(f"There is no tier policy {policy!r}.", fix=f"Known: {', '.join(POLICIES)}.")
    extra = {"root": None if root is None else str(root), "budget_bytes": budget_bytes}
    return {
        "kv_connector": "LazyRAGConnector",
        "kv_connector_module_path": "lazyrag.backend.tiers.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "host_bytes": host_bytes, "policy": policy},
    }


def explanation(error: Exception) -> str:
    """What an exception says; of pydantic's, without its dump of everything that was given."""
    if isinstance(error, ValidationError):
        return "; ".join(found["msg"] for found in error.errors())
    return str(error)


_starting = threading.Lock()


_CAUSE = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): .+", re.MULTILINE)
"""How the first traceback in a log ends. What comes up in this process says only that a child died."""


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine's processes write while they are started.

    Attributes:
        refusals: file in which the plugin says why it refuses (`wire.REFUSALS`).
        log: file for all that vLLM logs.
    """

    refusals: Path
    log: Path

    def error(self, error: Exception) -> EngineStartError:
        """What the user is told of a start that failed inside vLLM. The log is kept, unless the reason is known.

        Args:
            error: what came up in this process.
        """
        if refused := self.refusals.read_text(encoding="utf-8"):
            return errors.UnsupportedError(refused)
        if not self.log.exists():  # vLLM logs elsewhere
            return EngineStartError("The engine could not start.", why=str(error), fix="vLLM's log names the cause.")
        logged = self.log.read_bytes()
        with tempfile.NamedTemporaryFile(prefix="lazyrag-vllm-", suffix=".log", delete=False) as kept:
            kept.write(logged)
        cause = _CAUSE.search(logged.decode("utf-8", "replace"))
        why = cause[0] if cause else str(error)
        return EngineStartError("The engine could not start:", why=why, fix=f"vLLM's whole log: {kept.name}")


def logging_settings(log: Path) -> dict[str, Any]:
    """Python's logging settings for vLLM: errors to stderr, and everything into a file."""
    handler = {"formatter": "line"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(levelname)s %(asctime)s %(process)d [%(name)s:%(lineno)d] %(message)s"}},
        "handlers": {
            "file": {**handler, "class": "logging.FileHandler", "filename": str(log), "level": "INFO"},
            "stderr": {**handler, "class": "logging.StreamHandler", "stream": "ext://sys.stderr", "level": "ERROR"},
        },
        "loggers": {"vllm": {"handlers": ["file", "stderr"], "level": "INFO", "propagate": False}},
    }


@contextmanager
def starting() -> Iterator[Start]:
    """What holds for this process while an engine's processes are started, one engine at a time.

    A spawned process runs the main script again, up to where it would start the engine again, if that script has no
    `if __name__ == "__main__"`. The engine needs nothing of that script, so what the engine's thread tells its children
    names a module of ours instead.
    """
    stock = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        data = stock(name)
        if threading.current_thread().name == THREAD:
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = SPAWNED
        return data

    with _starting, tempfile.TemporaryDirectory(prefix="lazyrag-") as folder:
        start = Start(Path(folder) / "refusals", Path(folder) / "vllm.log")
        start.refusals.touch()
        settings = Path(folder) / "logging.json"
        settings.write_text(json.dumps(logging_settings(start.log)), encoding="utf-8")
        before = dict(os.environ)
        os.environ[wire.REFUSALS] = str(start.refusals)
        os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # vLLM's own imports cause some
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # and its kernels tell to which memory they are bound
        if os.environ.get("VLLM_LOGGING_LEVEL") == "ERROR":  # nobody has asked for more
            os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(settings))
        spawn.get_preparation_data = without_main
        try:
            yield start
        finally:
            spawn.get_preparation_data = stock
            for name in (wire.REFUSALS, "PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "VLLM_LOGGING_CONFIG_PATH"):
                if name not in before:
                    os.environ.pop(name, None)


# ---------------------------------------------------------------- one request


def check_length(request: Request, max_model_len: int) -> None:
    """Refuse early what vLLM would refuse with less to go by."""
    if len(request.token_ids) >= max_model_len:
        raise ContextOverflowError(
            f"The prompt has {len(request.token_ids)} tokens; prompt and answer together may have {max_model_len}.",
            fix="Retrieve fewer or shorter chunks, or start with a larger max_model_len if the model has it.",
        )


def as_prompt(token_ids: Sequence[int], namespace: str) -> dict[str, Any]:
    """Tokens as a prompt of vLLM's."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    return prompt | {"cache_salt": namespace} if namespace else prompt


def sampling_params(request: Request, extra: Mapping[str, Any]) -> Any:
    """A request's settings as vLLM's SamplingParams, with these `extra_args`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: Sampling = request.sampling
    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            stop=list(sampling.stop),
            seed=sampling.seed,
            logprobs=sampling.logprobs,
            ignore_eos=sampling.ignore_eos,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            structured_outputs=constraint(sampling),
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(extra) or None,
            skip_clone=True,  # nobody else has them
        )
    except ValueError as error:
        raise RequestError("A sampling setting is not valid:", why=explanation(error)) from error


def constraint(sampling: Sampling) -> Any:
    """What an answer may look like, as vLLM's StructuredOutputsParams; None: anything.

    Raises:
        RequestError: it shall look like two things, or is too large, or is no structural tag.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    schema, tag = sampling.json_schema, sampling.structural_tag
    if schema is not None and tag is not None:
        raise RequestError("A request cannot have both json_schema and structural_tag.")
    for form in (schema, tag):
        if form is not None:
            check_size(form)
    if tag is not None:
        params = StructuredOutputsParams(structural_tag=json.dumps(tag))
        try:  # what this compiler refuses goes to another one, which takes the older form only, and fails on assertions
            validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
        except Exception as error:
            raise RequestError("The structural tag is not valid:", why=explanation(error)) from error
        return params
    return StructuredOutputsParams(json=dict(schema)) if schema is not None else None


def delta(completion: Any, *, reuse: Reuse | None = None, ttft_s: float | None = None) -> Delta:
    """Our delta from vLLM's CompletionOutput."""
    return Delta(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        logprobs=tuple({token: p.logprob for token, p in step.items()} for step in completion.logprobs or ()),
        finish_reason=completion.finish_reason,
        reuse=reuse,
        ttft_s=ttft_s,
    )


def reuse_of(request: Request, report: wire.WireReport | None, num_cached_tokens: int) -> Reuse:
    """What was reused, in tokens of the logical prompt.

    Args:
        request: the request.
        report: the scheduler's; None for an ordinary request.
        num_cached_tokens: vLLM's own count; for a lazy request it counts padded tokens and is not used.
    """
    if report is None:
        return Reuse(len(request.token_ids), num_cached_tokens)
    sources = tuple(report["sources"])
    reused = sum(s.num_tokens for s, source in zip(request.segments, sources, strict=True) if source in REUSED)
    reused += request.prefix_len if report["preamble"] in REUSED else 0
    return Reuse(len(request.token_ids), reused + report["cached_suffix_tokens"], sources)


def request_error(error: Exception) -> EngineError:
    """What the caller is told of an exception that ended a request."""
    if type(error).__name__ == "EngineGenerateError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # vLLM's wrapper, which says nothing
    if isinstance(error, EngineError):
        return error
    if isinstance(error, errors.LazyRAGError):
        return RequestError(error.what, why=error.why, fix=error.fix)
    name = type(error).__name__
    if name == "EngineDeadError":
        return EngineDeadError("The engine stopped.", why=str(error), fix="vLLM's log names the cause; start anew.")
    if isinstance(error, ValueError) or name == "VLLMValidationError":
        return RequestError("vLLM refused the request:", why=explanation(error))
    return EngineError("The request failed inside vLLM.", why=f"{name}: {error}")
