"""Training: checkpoints of a run, written and read through torch's distributed checkpoint.

The adapters for Lightning and Hugging Face are modules of their own: they need those libraries.
"""

from weightyard.records import KeepBest
from weightyard.trainer.loader_workers import stay_on_signals
from weightyard.trainer.reader import YardReader
from weightyard.trainer.run import TrainRun
from weightyard.trainer.sampler import GlobalOffsetSampler
from weightyard.trainer.writer import YardWriter

__all__ = [
    "GlobalOffsetSampler",
    "KeepBest",
    "TrainRun",
    "YardReader",
    "YardWriter",
    "stay_on_signals",
]
