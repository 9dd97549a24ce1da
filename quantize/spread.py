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

    Raises what `work` raises for the first item that it fails on.
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

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, items))
