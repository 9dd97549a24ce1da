import torch
from torch import nn

from qtool.calibrate.replay import Replay, silenced


def test_what_was_recorded_is_given_again_without_computing() -> None:
    linear = nn.Linear(5, 3)
    windows = torch.randn(4, 2, 5)
    replay = Replay(linear)
    with replay.recording():
        first = [linear(window) for window in windows]
    with torch.no_grad():
        linear.weight.zero_()
    for _ in range(2):
        with replay.playing():
            again = [linear(window) for window in windows]
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(linear(windows[0]), first[0])


def test_nothing_recorded_is_computed() -> None:
    linear = nn.Linear(5, 3)
    window = torch.randn(2, 5)
    for replay in (Replay(linear), Replay(None)):
        with replay.playing():
            assert torch.equal(linear(window), linear.forward(window))


def test_a_block_that_fails_leaves_the_module_as_it_was() -> None:
    linear = nn.Linear(5, 3)
    replay = Replay(linear)
    try:
        with replay.recording():
            linear(torch.randn(2, 5))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not linear._forward_hooks
    assert "forward" not in vars(linear)


def test_a_silenced_linear_gives_zeros_of_its_shape_and_computes_again_afterwards() -> None:
    linear, x = nn.Linear(5, 3), torch.randn(4, 2, 5)
    whole = linear(x)
    with silenced(linear):
        assert torch.equal(linear(x), torch.zeros(4, 2, 3))
    assert torch.equal(linear(x), whole)
