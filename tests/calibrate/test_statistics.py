import pytest
import torch
from torch import Tensor, nn

from qtool.calibrate.statistics import Collector
from qtool.errors import QtoolError


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 7)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


@torch.no_grad()
def test_statistics_are_those_of_all_the_inputs_together() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(), torch.randn(4, 3, 5)
    collector = Collector()
    with collector.watching({"gate": mlp.gate, "up": mlp.up, "down": mlp.down}):
        for window in x:
            mlp(window[None])
    mlp(x)  # the hooks are gone: not counted
    seen = collector.statistics()
    flat = x.view(12, 5)
    assert seen["gate"].tokens == 12
    assert torch.allclose(seen["gate"].second_moment, flat.T @ flat / 12, atol=1e-6)
    assert torch.allclose(seen["gate"].mean_abs, flat.abs().mean(0))
    assert torch.equal(seen["gate"].max_abs, flat.abs().amax(0))
    assert seen["down"].second_moment.shape == (7, 7)


@torch.no_grad()
def test_the_moment_of_a_wide_input_is_whole() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(600, 2), torch.randn(3, 50, 600)
    collector = Collector()
    with collector.watching({"it": linear}):
        for window in x:
            linear(window[None])
    flat = x.view(-1, 600)
    moment = collector.statistics()["it"].second_moment
    assert torch.allclose(moment, flat.T @ flat / 150, atol=1e-5)
    assert torch.equal(moment[:256, 256:], moment[256:, :256].T)


@torch.no_grad()
def test_linears_with_the_same_input_share_their_statistics() -> None:
    mlp, collector = Mlp(), Collector()
    with collector.watching({"gate": mlp.gate, "up": mlp.up, "down": mlp.down}):
        mlp(torch.ones(1, 2, 5))
    seen = collector.statistics()
    assert seen["gate"] is seen["up"]
    assert seen["gate"] is not seen["down"]


def test_the_output_power_is_the_mean_square_of_the_output() -> None:
    torch.manual_seed(1)
    x, linear, collector = torch.randn(50, 5), nn.Linear(5, 3, bias=False), Collector()
    with collector.watching({"it": linear}), torch.no_grad():
        expected = float(linear(x).square().sum(-1).mean())
    assert collector.statistics()["it"].output_power(linear.weight.detach()) == pytest.approx(
        expected, rel=1e-5
    )


def test_dividing_statistics_gives_those_of_the_divided_input() -> None:
    torch.manual_seed(2)
    x, scale = torch.randn(20, 5), torch.rand(5) + 0.5
    seen = []
    for inputs in (x, x / scale):
        linear, collector = nn.Linear(5, 2), Collector()
        with collector.watching({"it": linear}), torch.no_grad():
            linear(inputs)
        seen.append(collector.statistics()["it"])
    divided = seen[0].divided(scale)
    assert torch.allclose(divided.second_moment, seen[1].second_moment, atol=1e-6)
    assert torch.allclose(divided.mean_abs, seen[1].mean_abs)
    assert torch.allclose(divided.max_abs, seen[1].max_abs)


def test_an_input_too_large_to_square_is_an_error_naming_the_layer() -> None:
    mlp, collector = Mlp(), Collector()
    with collector.watching({"model.layers.3.mlp.up_proj": mlp.up}), torch.no_grad():
        mlp(torch.full((1, 1, 5), 1e30))
    with pytest.raises(QtoolError, match=r"layers\.3\.mlp\.up_proj: its input reaches 1e\+30"):
        collector.statistics()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_input_that_is_not_finite_is_an_error_naming_the_layer(bad: float) -> None:
    mlp, collector = Mlp(), Collector()
    with (
        collector.watching({"model.layers.3.mlp.up_proj": mlp.up}),
        pytest.raises(QtoolError, match=r"layers\.3\.mlp\.up_proj: its input is NaN or infinite"),
    ):
        mlp(torch.tensor([[1.0, 2.0, bad, 0.0, 1.0]]))


@pytest.mark.parametrize("lengths", [[6, 6], [1, 1], [5, 1, 8], [700, 300, 500]])
@torch.no_grad()
def test_tokens_are_held_out_of_the_later_halves_and_ranges_are_of_the_earlier(lengths: list[int]) -> None:
    numbered = torch.arange(sum(lengths)).float()[:, None] * torch.tensor([1.0, -1.0])
    linear, collector = nn.Linear(2, 1), Collector()
    with collector.watching({"it": linear}):
        for window in numbered.split(lengths):
            linear(window[None])
    seen = collector.statistics()["it"]
    halves = [window.tensor_split([(len(window) + 1) // 2]) for window in numbered.split(lengths)]
    earlier, later = (torch.cat(parts) for parts in zip(*halves, strict=True))
    stride = 1
    while len(later[::stride]) > 256:
        stride *= 2
    assert torch.equal(seen.held_out.tokens, later[::stride])
    assert torch.equal(seen.held_out.low, earlier.amin(0))
    assert torch.equal(seen.held_out.high, earlier.amax(0))
    assert torch.equal(seen.low, numbered.amin(0))
    assert torch.equal(seen.high, numbered.amax(0))
    halved = seen.divided(torch.tensor([2.0, 4.0])).held_out
    assert torch.equal(halved.tokens, seen.held_out.tokens / torch.tensor([2.0, 4.0]))
