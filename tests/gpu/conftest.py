from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="1", HF_HUB_OFFLINE="1")
for folder in ("kernels", "engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
