"""The allocator against trying everything."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from qtool.quantize.allocation import Option, frontier

OPTIONS = st.builds(
    Option,
    st.integers(0, 12),
    st.one_of(st.integers(0, 5).map(float), st.floats(0, 10, allow_nan=False)),
)
THINGS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


def totals(things: list[list[Option]]) -> list[tuple[int, float]]:
    """Of every choice, summed in the same order."""
    found = []
    for chosen in product(*things):
        size, loss = 0, 0.0
        for option in chosen:
            size, loss = size + option.size, loss + option.loss
        found.append((size, loss))
    return found


@given(THINGS)
def test_the_curve_holds_every_total_worth_having_and_no_other(things: list[list[Option]]) -> None:
    every, found = totals(things), frontier(things)
    worth = {
        (size, loss)
        for size, loss in every
        if not any((s <= size and x < loss) or (s < size and x <= loss) for s, x in every)
    }
    assert set(zip(found.sizes.tolist(), found.losses.tolist(), strict=True)) == worth
    assert len(found.sizes) == len(worth)


@given(THINGS, st.integers(0, 60) | st.just(10**30), st.floats(0, 50))
def test_budgets_get_the_best_that_fits(things: list[list[Option]], size: int, loss: float) -> None:
    every, found = totals(things), frontier(things)
    point = found.within(size)
    fitting = [one for one in every if one[0] <= size]
    assert (point is None) == (not fitting)
    if point is not None:
        assert float(found.losses[point]) == min(one[1] for one in fitting)
    point = found.below(loss)
    fitting = [one for one in every if one[1] <= loss]
    assert (point is None) == (not fitting)
    if point is not None:
        assert int(found.sizes[point]) == min(one[0] for one in fitting)


@given(THINGS)
def test_the_options_of_a_point_add_up_to_it(things: list[list[Option]]) -> None:
    found = frontier(things)
    for point, total in enumerate(zip(found.sizes.tolist(), found.losses.tolist(), strict=True)):
        chosen = [options[place] for options, place in zip(things, found.options(point), strict=True)]
        assert totals([[option] for option in chosen]) == [total]


def test_many_layers_of_few_sizes_are_quick() -> None:
    """30 layers of 4 fused linears in 4 formats: 4**120 choices."""
    sizes = [(3, 4, 5, 8), (2, 3, 4, 6), (9, 12, 14, 24), (5, 6, 7, 12)]
    things = [
        [Option(1152 * size, (1 + layer % 7) / 4.0**size) for size in sizes[part]]
        for layer in range(30)
        for part in range(4)
    ]
    found = frontier(things)
    assert len(found.sizes) < 1000
    point = found.within(sum(options[1].size for options in things))
    assert point is not None
    assert float(found.losses[point]) < sum(options[1].loss for options in things)
