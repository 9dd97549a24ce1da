import resource
from pathlib import Path

import pytest
import torch

from qtool.calibrate.hidden import SpilledStates, hold


def test_states_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    states = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    inside, spilled = hold(states, 5, None), hold(states, 5, tmp_path)
    assert isinstance(inside, torch.Tensor)
    assert isinstance(spilled, SpilledStates)
    assert inside is not states
    for held in (inside, spilled):
        held[3] = 2 * held[1]
        held[0] = torch.zeros(7, 3)
    assert len(spilled) == 5
    assert torch.equal(torch.stack(list(spilled)), inside)
    assert torch.equal(torch.stack(list(spilled)), inside)  # again, though a file has a place it is read at
    assert torch.equal(spilled[3], 2 * states[1])


def test_a_file_of_states_has_no_name_that_a_killed_run_could_leave(tmp_path: Path) -> None:
    held = hold(torch.ones(4, 2, 3), 4, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(held[2], torch.ones(2, 3))


def test_a_disk_without_room_for_all_states_is_an_error_at_once(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 24, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            hold(torch.ones(4, 2, 3), 4, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
