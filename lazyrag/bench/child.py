"""An engine in a process of its own, at the command of the process that measures.

The engine core is in this process, too (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): no third process takes part, and a request
costs no serialisation, in any arm. Between commands the process sleeps in `recv`.

Commands are (name of a method of `Server`, arguments), answers ("ok", value) or ("error", exception).
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from lazyrag.backend import local, wire
from lazyrag.backend.contents import Sender
from lazyrag.backend.control import PREFETCH, WARM, control_to_args
from lazyrag.backend.layout import Span, take_apart
from lazyrag.backend.tiers.policy import COMPUTE
from lazyrag.bench.profile import Profile
from lazyrag.bench.workload import Prompt
from lazyrag.errors import EngineError, LazyRAGError
from lazyrag.modes import ReuseMode
from lazyrag.types import DISK, HBM, HOST

GAUGE_BLOCKS, GAUGE_BYTES, GAUGE_REPEATS = 1000, 128, 25
GPU_KV_BYTES = 40 * 10**9
"""Two engines of an 8B model, each with such a pool, fit one GPU of 141 GB."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How to start an engine.

    Attributes:
        engine: which of the systems (arms.py).
        arguments: of vLLM's `LLM`, beyond what the device and LazyRAG ask for.
        exact: in fp32 where that runs (on a CPU).
        capture_sizes: batch sizes (tokens) that CUDA graphs are made for; none on a CPU; empty for vLLM's own choice.
        host_bytes, kv_root: tiers beside the pool; none by default.
    """

    engine: str
    arguments: dict[str, Any]
    exact: bool = False
    capture_sizes: tuple[int, ...] = ()
    host_bytes: int = 0
    kv_root: Path | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """What one call of `generate` took and found.

    Attributes:
        ms: wall time of the call, what the client prepares included.
        gauge_ms: of a fixed piece of work right before it: how fast the CPU was.
        found: for each prompt, tokens that were in the cache; of a lazy request, those of whole resident segments.
    """

    ms: float
    gauge_ms: float
    found: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """What a stream of requests met.

    Attributes:
        ttft_ms: of each request, from its arrival to its first token.
        total_s: from the start to the last token of all, waiting for arrivals included.
        gauge_ms: as in `Timed`.
        gave_up: too many were late, and those that were left have been aborted.
    """

    ttft_ms: tuple[float, ...]
    total_s: float
    gauge_ms: float
    gave_up: bool = False


def main(connection: Connection, spec: Spec) -> None:
    """Start the engine, then serve commands until the other side hangs up."""
    warnings.simplefilter("ignore", FutureWarning)  # vLLM's own imports cause some
    os.dup2(2, 1)  # stdout is for the answers of the command line
    try:
        server = Server(spec)
        connection.send(("ok", server.facts()))
    except Exception as error:
        connection.send(("error", _sendable(error)))
        return
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", getattr(server, name)(**arguments)))
        except Exception as error:
            connection.send(("error", _sendable(error)))


def gauge() -> float:
    """Milliseconds for a fixed number of hashes: the last of several times, for a core that slept starts slowly.

    The engine that is measured next is awake then, whichever it is, as it would be under traffic.
    """
    block, ms = bytes(GAUGE_BYTES), 0.0
    for _ in range(GAUGE_REPEATS):
        start = time.perf_counter()
        for _ in range(GAUGE_BLOCKS):
            sha256(block).digest()
        ms = (time.perf_counter() - start) * 1e3
    return ms


def _sendable(error: Exception) -> LazyRAGError:
    if isinstance(error, LazyRAGError):
        return error
    return EngineError("An engine that is measured failed:", why=f"{type(error).__name__}: {error}")


class Server:
    """The engine, and what can be asked of it."""

    def __init__(self, spec: Spec) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_PLUGINS"] = "" if spec.engine == "stock" else "lazyrag"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        local.prepare_process()
        wanted: dict[str, Any] = {"block_size": None, "kv_cache_memory_bytes": None, **spec.arguments}
        of_device = local.device_arguments(wanted, ReuseMode("lazy"))
        from vllm import LLM
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": 0,
            **{name: value for name, value in wanted.items() if value is not None},
            **of_device,
        }
        if current_platform.is_cpu() and spec.exact:
            arguments["dtype"] = "float32"
        if current_platform.is_cuda():
            arguments.setdefault("kv_cache_memory_bytes", GPU_KV_BYTES)
            # The same in every engine, by name: what LazyRAG's needs, and what is best for the other.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
            arguments = {"attention_backend": "FLASH_ATTN", "async_scheduling": True, **arguments}
            if spec.capture_sizes and not arguments.get("enforce_eager"):
                compilation = {"cudagraph_capture_sizes": list(spec.capture_sizes)}
                arguments["compilation_config"] = compilation | dict(arguments.get("compilation_config") or {})
        if spec.engine != "stock":
            arguments |= local.plugin_arguments(debug=False)
        if spec.engine == "materialize":
            arguments |= {
                "scheduler_cls": "lazyrag.bench.materialize.MaterializeScheduler",
                "worker_cls": "lazyrag.bench.materialize_worker.MaterializeWorker",
            }
        if spec.host_bytes:
            transfer = local.connector_arguments(spec.kv_root, host_bytes=spec.host_bytes)
            transfer["kv_connector_extra_config"]["fingerprint"] = sha256(repr(arguments).encode()).hexdigest()
            arguments["kv_transfer_config"] = transfer
        self._arguments = arguments
        self._llm = LLM(**arguments)
        self._profile: Profile | None = None
        self._num_served = 0
        self._sender = Sender()

    def facts(self) -> dict[str, Any]:
        """What the figures belong to: device, versions, the engine's arguments, its KV pool."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        config = self._llm.llm_engine.vllm_config
        return {
            "device": current_platform.get_device_name(),
            "cuda": torch.version.cuda,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "block_size": config.cache_config.block_size,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "arguments": {name: value for name, value in self._arguments.items() if name != "model"},
        }

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> Timed:
        """Serve requests that are sent together; none other runs.

        Raises:
            RequestError: one of them failed.
        """
        speed = gauge()
        start = time.perf_counter()
        inputs, params = self._requests(prompts, max_tokens)
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        ms = (time.perf_counter() - start) * 1e3
        found = tuple(_found(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
        return Timed(ms, speed, found)

    def compute(self, prompts: Sequence[Prompt]) -> Timed:
        """Have the KV of the prompts' documents computed, as an ingest does; of ordinary requests, that of all tokens.

        An ordinary request ends in its first token, which vLLM samples in the step that ends its prefill.

        Raises:
            RequestError: one of them failed.
        """
        speed = gauge()
        start = time.perf_counter()
        inputs, params = self._requests(prompts, 1, warms_only=True)
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        ms = (time.perf_counter() - start) * 1e3
        found = tuple(_found(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
        return Timed(ms, speed, found)

    def profile(self, prompt: Prompt) -> dict[str, float]:
        """Serve a request; milliseconds by part."""
        self._profile = self._profile or Profile(self._llm)
        self._profile.start()
        return self._profile.parts(self.generate([prompt], 1).ms)

    def answers(self, prompts: Sequence[Prompt], max_tokens: int, logprobs: int) -> list[Any]:
        """For each prompt, its greedy tokens and for each of them {token: log-probability} of the likeliest."""
        inputs, params = self._requests(prompts, max_tokens, logprobs=logprobs)
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            _found(prompt, output)
        answers = [output.outputs[0] for output in outputs]
        return [
            (list(a.token_ids), [{token: p.logprob for token, p in step.items()} for step in a.logprobs])
            for a in answers
        ]

    def forget(self) -> None:
        """Empty the cache."""
        self._llm.reset_prefix_cache()

    def serve(
        self,
        prompts: Sequence[Prompt],
        arrivals: Sequence[float],
        max_tokens: int,
        in_turn: bool = False,
        slo_ms: float | None = None,
        max_late: int = 0,
    ) -> Served:
        """Serve a stream: request i is sent `arrivals[i]` seconds after the start, or when the step then ends.

        While nobody is served, nothing changes in an engine, so the time to the next arrival is counted and not slept:
        a slow stream takes as long as its requests do.

        Args:
            prompts: the requests.
            arrivals: seconds, ascending.
            max_tokens: of each answer.
            in_turn: see `arms.Arm`.
            slo_ms: a first token that comes later is late; None: none is.
            max_late: give up when more than this many are late.

        Raises:
            RequestError: one of them failed.
        """
        engine = self._llm.llm_engine
        engine.engine_core.engine_core.scheduler.serves_in_turn = in_turn  # stock schedulers read no such thing
        inputs, params = self._requests(prompts, max_tokens, stream=True)
        first: dict[str, float] = {}
        speed, sent = gauge(), 0
        ids = [f"served-{self._num_served + i}" for i in range(len(prompts))]
        self._num_served += len(ids)
        start = time.perf_counter()
        while sent < len(prompts) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                start = min(start, time.perf_counter() - arrivals[sent])
            while sent < len(prompts) and arrivals[sent] <= time.perf_counter() - start:
                engine.add_request(ids[sent], inputs[sent], params[sent])
                sent += 1
            for output in engine.step():
                if error := wire.error_from_params(output.kv_transfer_params):
                    raise error
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - start)
            if (
                slo_ms is not None
                and _num_late(ids[:sent], arrivals, first, time.perf_counter() - start, slo_ms) > max_late
            ):
                engine.abort_request(ids[:sent])
                self._sender = Sender()  # what was to carry tokens may not have been sent
                while engine.has_unfinished_requests():
                    engine.step()
                return Served((), time.perf_counter() - start, speed, gave_up=True)
        total = time.perf_counter() - start
        waits = (first[name] - arrival for name, arrival in zip(ids, arrivals, strict=True))
        return Served(tuple(wait * 1e3 for wait in waits), total, speed)

    # ---------------------------------------------------------------- tiers (tiers.py)

    @property
    def _connector(self) -> Any:
        """The scheduler's half; everything is in this process."""
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector

    def generate_from_tiers(self, prompt: Prompt) -> tuple[Timed, list[str]]:
        """Serve a request that is to have one token; where each document's KV came from."""
        speed = gauge()
        start = time.perf_counter()
        inputs, params = self._requests([prompt], 1)
        (output,) = self._llm.generate(inputs, params, use_tqdm=False)
        ms = (time.perf_counter() - start) * 1e3
        found = _found(prompt, output)
        report = wire.report_from_params(output.kv_transfer_params)
        return Timed(ms, speed, (found,)), report["sources"] if report is not None else []

    def prefetch(self, prompt: Prompt, ahead_s: float) -> None:
        """Tell the engine of a prompt's documents, and let so much time pass."""
        from vllm import SamplingParams

        end = time.perf_counter() + ahead_s
        engine = self._llm.llm_engine
        token_ids, extra = self._sent(prompt)
        params = SamplingParams(max_tokens=1, detokenize=False, extra_args=extra | control_to_args(PREFETCH))
        engine.add_request(f"prefetch-{self._num_served}", {"prompt_token_ids": token_ids[:1]}, params)
        self._num_served += 1
        while time.perf_counter() < end:  # as an engine in a process of its own would do
            engine.step()
            time.sleep(0.0005)

    def empty_host(self) -> None:
        """Let host memory hold nothing, and the operating system's cache no file."""
        self._connector.reset_cache()
        root = self._arguments["kv_transfer_config"]["kv_connector_extra_config"]["root"]
        for path in Path(root).rglob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def set_disk(self, bytes_per_s: float | None, always_load: bool) -> None:
        """Make the disk as slow as this (None: as it is), and have the rule followed or not.

        The next measurement of the disk counts alone: it is another one than those that were measured before.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        disk, speeds = get_kv_transfer_group().disk, self._connector.speeds
        for instance, name in ((disk, "load"), (speeds, "is_loading_faster")):
            vars(instance).pop(name, None)
        speeds._measured.discard(DISK)
        if always_load:
            speeds.is_loading_faster = lambda *args, **kwargs: True
        if bytes_per_s is not None:
            stock = disk.load

            turn, free_s = threading.Lock(), time.perf_counter()

            def slowly(key: str, form: Any, **kwargs: Any) -> Any:
                nonlocal free_s
                start = time.perf_counter()
                data = stock(key, form, **kwargs)
                with turn:  # the readers share what the disk gives
                    free_s = max(free_s, start) + form.num_bytes / bytes_per_s
                    end = free_s
                time.sleep(max(0.0, end - time.perf_counter()))
                return data

            disk.load = slowly

    def speeds(self) -> dict[str, float]:
        """Measured speeds: bytes a second by tier, tokens a second; and the KV's size."""
        connector = self._connector
        names = (HOST, DISK, COMPUTE)
        rates = {name: rate for name in names if (rate := connector.speeds.rate(name)) is not None}
        return rates | {"kv_bytes_per_token": connector.token_bytes}

    def tiers(self) -> dict[str, dict[str, int]]:
        """The tiers' counters."""
        report: dict[str, dict[str, int]] = self._connector.report()
        return report

    def bandwidth(self, num_bytes: int = 1 << 28, n: int = 9) -> dict[str, float]:
        """Of copies from memory as the host tier has it to the device: the median of some."""
        import torch
        from vllm.platforms import current_platform

        from lazyrag.backend.tiers.host import HostMemory

        device = torch.device(current_platform.device_type)
        memory = HostMemory(num_bytes, device)
        source, target = memory.at(0, num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(n + 1):
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        memory.close()
        return {"bytes_per_s": num_bytes / median(seconds[1:]), "n": n}

    def _requests(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        stream: bool = False,
        warms_only: bool = False,
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Prompts as vLLM's inputs and parameters.

        Args:
            prompts: the requests.
            max_tokens: of each answer.
            logprobs: of the likeliest so many tokens.
            stream: answers come token by token.
            warms_only: those that are lazy are sent as `engine.warm` sends them.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        inputs, params = [], []
        for prompt in prompts:
            token_ids, extra_args = self._sent(prompt)
            if warms_only and extra_args:
                token_ids, extra_args = [*token_ids, 0], extra_args | control_to_args(WARM)
            inputs.append({"prompt_token_ids": token_ids} | ({"cache_salt": prompt.salt} if prompt.salt else {}))
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=logprobs,
                    output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
                    extra_args=extra_args or None,
                    skip_clone=True,  # in every arm
                )
            )
        return inputs, params

    def _sent(self, prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        """The token ids that go to vLLM, and what makes a request a lazy one: as `LocalEngine` sends it."""
        if not prompt.spans:
            return prompt.token_ids, {}
        k = prompt.first_k
        spans = [Span(start + k, length - k, k, length) for start, length in prompt.spans]
        literals, contents = take_apart(prompt.token_ids, spans, 0)
        runs = list(zip(prompt.documents, contents, strict=True))
        names, sent = self._sender.names(runs, namespace=prompt.salt or "")
        return literals, wire.request_to_args(wire.WireRequest(spans, 0, names, sent))


def _num_late(
    ids: Sequence[str], arrivals: Sequence[float], first: Mapping[str, float], now: float, slo_ms: float
) -> int:
    """How many of the requests that were sent got their first token late, or are still without it and late."""
    waits = (first.get(name, now) - arrival for name, arrival in zip(ids, arrivals, strict=False))
    return sum(wait * 1e3 > slo_ms for wait in waits)


def _found(prompt: Prompt, output: Any) -> int:
    """Cached tokens of a request that is done, of the logical prompt."""
    if error := wire.error_from_params(output.kv_transfer_params):
        raise error
    report = wire.report_from_params(output.kv_transfer_params)
    if report is None:
        return int(output.num_cached_tokens or 0)
    sizes = (num_tokens - prompt.first_k for _, num_tokens in prompt.spans)
    return sum(size for size, source in zip(sizes, report["sources"], strict=True) if source == HBM)
