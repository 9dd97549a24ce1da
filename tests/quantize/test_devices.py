import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qtool.errors import QtoolError, UsageError
from qtool.quantize.devices import parse_devices
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.quantize.spread import spread
from tests.quantize.test_pipeline import contents, override, recipe_of, text

__all__ = ["text"]  # a fixture

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would say with two of them."""
    answers: dict[str, object] = {"is_available": True, "device_count": 2, "current_device": 1}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("said", "indices"),
    [("cuda", [1]), ("cuda:0", [0]), ("cuda:1,cuda:0", [1, 0]), ("cuda:0, cuda", [0, 1]), ("auto", [0, 1])],
)
def test_gpus_are_named_one_by_one_or_by_auto(two_gpus: None, said: str, indices: list[int]) -> None:
    assert parse_devices(said) == tuple(torch.device("cuda", index) for index in indices)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("cuda:2", "there are 2 GPUs, cuda:0 to cuda:1"),
        ("cuda:0,cuda:0", "names a GPU twice"),
        ("cuda,cuda:1", "names a GPU twice"),
        ("cpu,cuda", "unknown; wanted cpu, cuda, cuda:0,cuda:1 or auto"),
        ("gpu", "unknown"),
        ("", "unknown"),
    ],
)
def test_devices_that_are_none_are_refused(two_gpus: None, said: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_devices(said)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parse_devices("cpu") == parse_devices("auto") == (CPU,)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="cannot use it, since it was built without CUDA; use cpu"):
        parse_devices("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UsageError, match="cannot use it, since it finds no GPU; use cpu"):
        parse_devices("cuda:0")


def test_spread_work_keeps_its_order_and_uses_every_device() -> None:
    devices = [torch.device("cuda", index) for index in range(3)]
    used: list[torch.device] = []

    def work(item: int, device: torch.device) -> int:
        used.append(device)
        while len(set(used)) < 3:  # until the others have begun too
            pass
        return item * item

    assert spread(range(17), devices, work) == [item * item for item in range(17)]
    assert set(used) == set(devices)


@pytest.mark.parametrize("devices", [[CPU], [CPU, CPU]])
def test_spread_work_raises_what_its_first_failure_raised(devices: list[torch.device]) -> None:
    def work(item: int, _: torch.device) -> int:
        if item > 2:
            raise QtoolError(f"item {item}")
        return item

    with pytest.raises(QtoolError, match="item 3"):
        spread(range(6), devices, work)


def test_spread_work_shares_the_threads_there_are_and_leaves_them_as_they_were() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert spread(range(3), [CPU, CPU], lambda *_: torch.get_num_threads()) == [2, 2, 2]
        assert torch.get_num_threads() == 4
        assert spread(range(3), [CPU], lambda *_: torch.get_num_threads()) == [4, 4, 4]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["rtn", "awq+gptq", "best"])
def test_linears_spread_over_devices_give_the_same_bytes(
    tiny: Path, text: Path, tmp_path: Path, method: str
) -> None:
    recipe = recipe_of(text, method, targets="*", keep=["lm_head"])
    if method == "awq+gptq":
        rule = override(recipe.quantization.rules[0], method={"name": method, "correct": True})
        recipe = override(recipe, quantization={"rules": [rule], "keep": ["lm_head"]})
    for devices in ([CPU], [CPU, CPU, CPU]):
        quantize_checkpoint(tiny, recipe, tmp_path / str(len(devices)), devices=devices)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


class Homeless(TorchFunctionMode):
    """Notes where tensors are made that do not say on which device. Numbers without dimensions may be on the
    CPU: they go with tensors on any."""

    factories = (
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand),
        *(torch.randn, torch.randint, torch.tensor, torch.zeros),
    )
    elsewhere = ("windows.py", "formats")
    """Tokens, and what only describes a stored tensor, belong on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self.factories and "device" not in (kwargs or {}) and made.dim():
            frame: FrameType | None = sys._getframe(1)
            file = Path(frame.f_code.co_filename if frame else "").resolve()
            ours = file.is_relative_to(ROOT) and not {"tests", "site-packages"} & set(file.parts)
            if ours and frame and not any(name in file.parts for name in self.elsewhere):
                self.found.add(f"{file.relative_to(ROOT)}:{frame.f_lineno}")
        return made


def test_tensors_made_without_a_device_are_noticed() -> None:
    scope: dict[str, Any] = {"torch": torch}
    code = "a = torch.ones(2)\nb = torch.ones(2, device='cpu')\nc = torch.zeros(())"
    with Homeless() as mode:
        exec(compile(code, str(ROOT / "quantize" / "made_up.py"), "exec"), scope)
    assert isinstance(scope["a"], Tensor)
    assert mode.found == {"quantize/made_up.py:1"}


@pytest.mark.parametrize(
    ("method", "weights", "activations", "kv_cache"),
    [
        ("best", {"group_size": 32, "symmetric": False}, None, None),
        ("awq+gptq", {"group_size": 32, "symmetric": True}, {"format": "int8", "dynamic": False}, "fp8"),
        ("smoothquant", {"num_bits": 8, "group_size": None}, {"format": "int8"}, "int8"),
        ("awq", {"format": "nvfp4"}, None, None),
        ("awq", {"format": "mxfp4"}, None, None),
        ("rtn", {"format": "fp8", "granularity": "block"}, {"format": "fp8", "group_size": 32}, None),
        ("rtn", {"format": "fp8", "granularity": "tensor"}, {"format": "fp8", "dynamic": False}, None),
    ],
)
def test_every_tensor_says_on_which_device_it_is(
    tiny: Path,
    text: Path,
    tmp_path: Path,
    method: str,
    weights: dict[str, object],
    activations: dict[str, object] | None,
    kv_cache: str | None,
) -> None:
    recipe = recipe_of(text)
    named: dict[str, object] = {"name": method} | ({"correct": True} if "gptq" in method else {})
    rule = {"targets": ["*"], "weights": weights, "activations": activations, "method": named}
    quantization = {"rules": [rule], "keep": ["lm_head"], "kv_cache": kv_cache}
    with Homeless() as mode:
        quantize_checkpoint(tiny, override(recipe, quantization=quantization), tmp_path / "out")
    assert not mode.found
