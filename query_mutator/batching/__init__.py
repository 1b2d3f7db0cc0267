"""From token lengths to reproducible, full batches: buckets, plans, packs, shards, analysis, streams.

Importing it loads no torch; the names of `torch_data` load it when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from query_mutator.batching import analyze, core, distributed, generation, planning, samples, streaming
from query_mutator.batching.analyze import *  # noqa: F403 - each package's __all__ says what is public
from query_mutator.batching.core import *  # noqa: F403
from query_mutator.batching.distributed import *  # noqa: F403
from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation import *  # noqa: F403
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthTable, as_lengths
from query_mutator.batching.planning import *  # noqa: F403
from query_mutator.batching.samples import *  # noqa: F403
from query_mutator.batching.streaming import *  # noqa: F403

TORCH_NAMES = (
    "PackedCollator",
    "PaddedCollator",
    "PlanBatchSampler",
    "PlanDataset",
    "Row",
    "flex_block_mask",
    "sdpa_block_mask",
    "varlen_kwargs",
)

__all__ = ["BatchFileError", "IdTable", "LengthTable", "as_lengths"]
__all__ += analyze.__all__
__all__ += core.__all__
__all__ += distributed.__all__
__all__ += generation.__all__
__all__ += planning.__all__
__all__ += samples.__all__
__all__ += streaming.__all__


def __getattr__(name: str) -> Any:
    if name in TORCH_NAMES:
        return getattr(importlib.import_module("query_mutator.batching.torch_data"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
