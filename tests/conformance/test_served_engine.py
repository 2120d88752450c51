"""`lazyrag serve` with a real engine, whose core dies under way: the one test of the server that runs a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.alone]

REPO = Path(__file__).parents[2]
MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", REPO / ".models" / "smollm2-135m-fp32"))
PATIENCE_S = 300


def children(pid: int) -> list[int]:
    """Every process below this one."""
    with suppress(psutil.NoSuchProcess):
        return [below.pid for below in psutil.Process(pid).children(recursive=True)]
    return []


def test_an_engine_that_dies_is_started_again_and_its_chunks_are_still_there(
    tmp_path: Path, passages: list[str]
) -> None:
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL}: type make .models/smollm2-135m-fp32/config.json")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LAZYRAG_", "VLLM_"))}
    environment |= {
        "LAZYRAG_EMBEDDER": "hash",
        "LAZYRAG_MODE": "lazy",
        "LAZYRAG_KV_CACHE_BYTES": "256MiB",
        "LAZYRAG_MAX_MODEL_LEN": "2048",
    }
    command = [sys.executable, "-c", "from lazyrag.cli import main; main()", "serve"]
    errors = (tmp_path / "errors").open("w+")
    server = subprocess.Popen(
        [*command, "--model", MODEL, "--store", tmp_path / "kb", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    try:
        assert server.stdout is not None
        url = json.loads("".join(server.stdout.readline() for _ in range(3)))["url"]
        with (
            httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
        ):
            added = http.post("/v1/documents", json={"documents": passages[:3]}).json()
            assert added["warmed"] == 3
            model = client.models.list().data[0].id
            prompt = f"{passages[2]}\n\n{passages[0]}\n\nWhat was found?"

            def answer() -> tuple[str, int | None]:
                got = client.completions.create(model=model, prompt=prompt, max_tokens=6)
                assert got.usage is not None
                assert got.usage.prompt_tokens_details is not None
                return got.choices[0].text, got.usage.prompt_tokens_details.cached_tokens

            before, cached = answer()
            assert cached is not None
            assert cached > 100
            under_way = [
                client.completions.create(
                    model=model, prompt=prompt, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in range(6)
            ]
            for stream in under_way:
                next(iter(stream))
            for pid in children(server.pid):
                os.kill(pid, signal.SIGKILL)
            for stream in under_way:
                with pytest.raises(openai.APIError, match="The engine stopped"):
                    list(stream)
            with pytest.raises(openai.InternalServerError, match="being started"):
                answer()
            assert http.get("/ready").status_code == 503
            deadline = time.monotonic() + PATIENCE_S
            while http.get("/ready").status_code != 200:
                assert time.monotonic() < deadline, "the engine was not started again"
                time.sleep(0.5)
            assert answer() == (before, cached)
            assert 'segment_tokens_total{source="disk"} 0' not in http.get("/metrics").text
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        errors.seek(0)
        said = errors.read()
        assert passages[0] not in said
        assert "The engine runs again." in said
    finally:
        left = children(server.pid)
        server.kill()
        server.communicate()
        errors.close()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == [], "the server left processes behind"
