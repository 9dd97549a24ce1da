"""Spread work whose parts know nothing of each other over devices."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(
    items: Sequence[Item], devices: Sequence[torch.device], work: Callable[[Item, torch.device], Result]
) -> list[Result]:
    """What `work` makes of each item, in their order: one after the other, or a thread for each of several
    devices, which takes the next item when it is done with one.

    Named more than once, the CPU divides its threads among those. Raises what `work` raises for the first
    item that it fails on.
    """
    if len(devices) == 1:
        return [work(item, devices[0]) for item in items]
    free: SimpleQueue[torch.device] = SimpleQueue()
    for device in devices:
        free.put(device)

    def run(item: Item) -> Result:
        device = free.get()
        try:
            return work(item, device)
        finally:
            free.put(device)

    threads = torch.get_num_threads()
    each = max(1, threads // len(devices))
    try:  # torch keeps this number a thread, and hands the latest to threads that are new
        with ThreadPoolExecutor(len(devices), initializer=torch.set_num_threads, initargs=(each,)) as pool:
            return list(pool.map(run, items))
    finally:
        torch.set_num_threads(threads)
