"""Time flash-linear-attention's kernel configurations at Qwen3.6-27B's shape and write down the best ones.

    python -m bench.linear_attention_configs OUT

Needs a GPU; a few minutes. Put what it writes into `extract/kernels/configs/smXY` for the GPU's compute capability.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from dflash_offline.extract.kernels.delta_rule import delta_rule


def main(out: Path) -> None:
    """Run once, let the library choose, and keep what it chose."""
    assert os.environ.get("FLA_CACHE_MODE", "disabled") == "disabled", "unset FLA_CACHE_MODE first"
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k = (torch.nn.functional.normalize(make(6, 2700, 16, 128), dim=-1) for _ in range(2))
    delta_rule(q, k, make(6, 2700, 48, 128), make(6, 2700, 48), make(6, 2700, 48), make(48), make(48))
    torch.cuda.synchronize()
    out.mkdir(parents=True, exist_ok=True)
    for tuner in gc.get_objects():
        if type(tuner).__name__ != "CachedAutotuner" or not tuner.cache:
            continue
        best: Any = next(iter(tuner.cache.values()))
        chosen = {name: getattr(best, name) for name in ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")}
        said = {"kernel_name": tuner.kernel_name, "triton_version": triton.__version__, "default_config": chosen}
        (out / f"{tuner.kernel_name}.json").write_text(json.dumps(said, indent=1) + "\n")
        print(tuner.kernel_name, chosen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
