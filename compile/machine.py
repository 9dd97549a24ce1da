"""What this machine does in a second, measured in a moment."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from qtool.compile.roofline import Machine

_BYTES, _SIZE = 256 << 20, 768
_TRIES = 12
"""The best counts: whatever else runs here only takes away."""


def measure() -> Machine:
    """Bandwidth of reading with every core, float32 operations of a matrix product; the best of several."""
    return Machine(bandwidth=_bandwidth(), flops=_flops(), measured=True)


def _bandwidth() -> float:
    workers = os.cpu_count() or 1
    numbers = np.zeros(_BYTES // 8, np.float64)
    numbers.fill(1.0)  # zeros alone are no memory yet
    parts = np.array_split(numbers, workers)
    with ThreadPoolExecutor(workers) as pool:
        return _BYTES / _least_time(lambda: list(pool.map(np.max, parts)))


def _flops() -> float:
    left = np.ones((_SIZE, _SIZE), np.float32)
    return 2 * _SIZE**3 / _least_time(lambda: left @ left)


def _least_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
