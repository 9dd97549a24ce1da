"""Run a checkpoint layer by layer with transformers' own modules, one layer in memory at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibrate.finite import is_finite
from qtool.calibrate.hidden import HiddenStates
from qtool.calibrate.kv import KvRanges, KvRounding
from qtool.calibrate.skeleton import HEAD, PREFIX, check_stored, skeleton
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError, UsageError

CPU = torch.device("cpu")
_CACHES = ("cache", "past_key_values")
"""What transformers calls the cache that it hands to a layer, now and in older families."""

Weights = Callable[[str], Tensor]
"""A parameter's full name, such as ``model.layers.0.mlp.up_proj.weight`` → its value, any float dtype."""


def checkpoint_weights(checkpoint: Checkpoint) -> Weights:
    """The weights that a checkpoint stores, quantized ones as the numbers that their codes stand for."""

    def read(name: str) -> Tensor:
        module, _, attribute = name.rpartition(".")
        if attribute == "weight" and checkpoint.format is not None and checkpoint.format.quantizes(module):
            return checkpoint.linear(module).dense()
        return checkpoint.tensor(name)

    return read


@dataclass(frozen=True)
class _Call:
    """What the model passes to a layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerRunner:
    """A decoder without weights, whose layers get theirs one at a time, in float32.

    Hidden states are [S, L, hidden]: S windows of L tokens, run one window at a time, so that `device` holds
    one layer and one window's activations, and memory the states, unless they are on disk. With `fast`,
    products are in bfloat16 where the device multiplies that faster: half the time for 0.4 % of a layer's
    output, less than 8-bit weights cost.

    Raises UsageError for a config that describes no decoder, QtoolError for a checkpoint whose tensors are
    not those that its config describes.
    """

    def __init__(self, checkpoint: Checkpoint, *, fast: bool = False, device: torch.device = CPU) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self._fast = fast and _multiplies_bfloat16(device)
        self.model = skeleton(checkpoint)
        if checkpoint.format is None:
            check_stored(checkpoint, self.model)
        self._calls: list[_Call] = []
        self._table = self.model.get_input_embeddings()
        self.tied = HEAD in self.linears() and self.model.get_submodule(HEAD).weight is self._table.weight
        """Whether the head's weight is the embedding table."""

    def __len__(self) -> int:
        return len(self.model.model.layers)

    @property
    def vocab_size(self) -> int:
        """V, the tokens that the embedding table has rows for."""
        return int(self._table.num_embeddings)

    @property
    def hidden_size(self) -> int:
        """The numbers that stand for a token between layers."""
        return int(self._table.embedding_dim)

    @property
    def head_weight(self) -> str:
        """The stored tensor that holds the head's weight [V, hidden]."""
        if not self.tied:
            return f"{HEAD}.weight"
        return next(f"{name}.weight" for name, part in self.model.named_modules() if part is self._table)

    def linears(self) -> dict[str, nn.Linear]:
        """Every linear layer of the model by its full name, without weights."""
        return {name: part for name, part in self.model.named_modules() if isinstance(part, nn.Linear)}

    def embed(self, windows: Tensor) -> Tensor:
        """The hidden states [S, L, hidden] that windows [S, L] of token ids bring to the first layer, see
        `embedded`."""
        return torch.stack(list(self.embedded(windows)))

    @torch.no_grad()
    def embedded(self, windows: Tensor) -> Iterator[Tensor]:
        """The hidden states [L, hidden] that each of windows [S, L] of token ids brings to the first layer.

        Records on the way what each layer is called with: masks, positions and their embeddings. Raises
        UsageError when these depend on the tokens, since one record could not serve all windows then.
        """
        with self.outside(), _recording(self.model.model.layers) as calls:
            for window in windows:
                self.model.model(input_ids=window[None].to(self.device), use_cache=False)
                first, seen = calls[0][0], [call for _, call in calls]
                if not self._calls:
                    self._calls = seen
                if not _same(self._calls, seen):
                    raise UsageError(
                        f"{self.checkpoint.path}: the layers of {self.checkpoint.architecture} are handed "
                        "more than hidden states that depends on the tokens, which is not supported"
                    )
                calls.clear()
                yield first[0]

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What lies in the decoder beside its layers (embedding, last norm) with its weights, for a block."""
        parts = [(name, part) for name, part in self.model.model.named_children() if name != "layers"]
        for name, part in parts:
            self._load(part, f"model.{name}", checkpoint_weights(self.checkpoint))
        try:
            yield
        finally:
            for _, part in parts:
                part.to("meta")

    @contextmanager
    def logits(self) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """The logits [L, V] of a window [L], given what the last layer makes of it [L, hidden], for a block.

        They can be differentiated with respect to that.
        """

        def behind(window: Tensor, hidden: Tensor) -> Tensor:
            with _giving(self.model.model.layers, hidden[None]):
                logits: Tensor = self.model(input_ids=window[None].to(self.device), use_cache=False).logits
            return logits[0].float()

        with self.outside(), self.head():
            yield behind

    @contextmanager
    def head(self) -> Iterator[nn.Module]:
        """The linear that makes logits, with its weights in float32, released at the block's end."""
        head: nn.Module = self.model.get_submodule(HEAD)
        read = checkpoint_weights(self.checkpoint)
        self._load(head, HEAD, lambda name: read(self.head_weight if name == f"{HEAD}.weight" else name))
        try:
            yield head
        finally:
            head.to("meta")

    @torch.no_grad()
    def run_head(self, windows: Tensor, hidden: HiddenStates) -> None:
        """Bring what the last layer makes of windows [S, L], `hidden` [S, L, hidden], to the head.

        The head computes nothing, so no weights of it are needed: what watches it sees its inputs.
        """
        head = self.model.get_submodule(HEAD)
        with self.outside(), ExitStack() as undo:
            head.forward = lambda x: x.new_zeros(())
            undo.callback(delattr, head, "forward")
            for window, state in zip(windows, hidden, strict=True):
                with _giving(self.model.model.layers, state[None].to(self.device)):
                    self.model(input_ids=window[None].to(self.device), use_cache=False)

    @contextmanager
    def layer(self, index: int, weights: Weights) -> Iterator[nn.Module]:
        """Layer `index` with its weights in float32, released at the block's end.

        Raises QtoolError naming a weight that is missing, of another shape, or NaN or infinite.
        """
        layer: nn.Module = self.model.model.layers[index]
        self._load(layer, f"{PREFIX}.{index}", weights)
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.no_grad()
    def run(
        self,
        index: int,
        hidden: Iterable[Tensor],
        cache: KvRanges | KvRounding | None = None,
        *,
        exact: bool = False,
    ) -> Iterator[Tensor]:
        """Run the loaded layer `index` on hidden states [S, L, hidden]: its output [1, L, hidden] for each
        window in turn. Keys and values pass through `cache`; `exact` overrules `fast`."""
        fast = self._fast and not exact
        with _linears_in_bfloat16(self.model.model.layers[index]) if fast else nullcontext():
            for window in hidden:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=fast):
                    output = self.call(index, window.to(self.device), cache)
                yield output

    def call(self, index: int, window: Tensor, cache: KvRanges | KvRounding | None = None) -> Tensor:
        """The output [1, L, hidden] of the loaded layer `index` for one window, [L, hidden], which it can be
        differentiated with respect to."""
        call = self._calls[index]
        kwargs = call.kwargs if cache is None else call.kwargs | {self._cache_argument(call): cache}
        output = self.model.model.layers[index](window[None], *call.args, **kwargs)
        given: Tensor = output[0] if isinstance(output, tuple) else output
        return given

    def _cache_argument(self, call: _Call) -> str:
        for name in _CACHES:
            if name in call.kwargs:
                return name
        raise UsageError(
            f"{self.checkpoint.path}: the layers of {self.checkpoint.architecture} take no cache of keys and "
            "values, so its scales cannot be calibrated; drop quantization.kv_cache"
        )

    def advance(self, index: int, hidden: HiddenStates, cache: KvRanges | KvRounding | None = None) -> None:
        """Replace the hidden states by what the loaded layer `index` makes of them, in place."""
        for row, output in enumerate(self.run(index, hidden, cache)):
            hidden[row] = output[0]

    def update(self, index: int, window: Tensor) -> Tensor:
        """What the loaded layer `index` adds to the hidden states [L, hidden] of one window, in float32."""
        output = next(self.run(index, window[None], exact=True))
        return output[0] - window.to(self.device)

    def _load(self, part: nn.Module, prefix: str, weights: Weights) -> None:
        stored = set(part.state_dict())
        for path, module in part.named_modules():
            scope = f"{path}." if path else ""
            computed = [name for name, _ in module.named_buffers(recurse=False) if scope + name not in stored]
            if computed:
                self._compute_buffers(f"{prefix}.{path}", module, computed)
            for name, value in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                if scope + name in stored:
                    tensor = _checked(f"{prefix}.{scope}{name}", value.shape, weights, self.device)
                    is_parameter = isinstance(value, nn.Parameter)
                    setattr(
                        module, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
                    )

    def _compute_buffers(self, where: str, module: nn.Module, names: list[str]) -> None:
        """Fill the buffers that no checkpoint stores (rotary frequencies, say) from the config.

        That is what transformers does when it loads a model; the module's weights, still without memory,
        are not touched by it.
        """
        for name in names:
            setattr(module, name, torch.full_like(module.get_buffer(name), torch.nan, device=self.device))
        self.model._init_weights(module)
        if any(bool(module.get_buffer(name).isnan().any()) for name in names):
            raise QtoolError(f"{where}: its buffers {', '.join(names)} cannot be computed from the config")


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def _linears_in_bfloat16(layer: nn.Module) -> Iterator[None]:
    """Round the weights of the layer's linears for a block: autocast would do so anew for each window."""
    kept = [(part, part.weight) for part in layer.modules() if isinstance(part, nn.Linear)]
    for linear, weight in kept:
        linear.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    try:
        yield
    finally:
        for linear, weight in kept:
            linear.weight = weight


def _checked(name: str, shape: torch.Size, weights: Weights, device: torch.device) -> Tensor:
    value = weights(name).to(device, torch.float32, copy=True)
    if value.shape != shape:
        raise QtoolError(f"{name}: has shape {list(value.shape)}, wanted {list(shape)} as config.json says")
    if not is_finite(value):
        raise QtoolError(f"{name}: holds NaN or infinite weights; fetch or convert the checkpoint again")
    return value


@contextmanager
def _recording(layers: nn.ModuleList) -> Iterator[list[tuple[Tensor, _Call]]]:
    """Make each layer hand its input on unchanged, and record what it was called with."""
    calls: list[tuple[Tensor, _Call]] = []

    def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((hidden_states, _Call(args, kwargs)))
        return hidden_states

    for layer in layers:
        layer.forward = record
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _giving(layers: nn.ModuleList, output: Tensor) -> Iterator[None]:
    """Make each layer give `output`, whatever comes to it."""
    for layer in layers:
        layer.forward = lambda *_, **__: output
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    if isinstance(one, _Call) and isinstance(other, _Call):
        return _same([one.args, one.kwargs], [other.args, other.kwargs])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
