"""What each process that an engine spawns runs first, in the place of the main script (`local.starting`)."""

from __future__ import annotations

import logging
import os

UNASKED = ("vllm.triton_utils.importing",)
"""Loggers that warn of what concerns no user, before vLLM has set its logging up: that there is no Triton for a CPU."""


def quieten() -> None:
    """Let these loggers tell errors only, unless vLLM was told to say more."""
    if os.environ.get("VLLM_LOGGING_LEVEL") == "ERROR":
        for name in UNASKED:
            logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__mp_main__":  # in a spawned process
    quieten()
