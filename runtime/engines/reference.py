"""The driver of the reference engine: torch, eager, on any device."""

from pathlib import Path

import numpy as np
import torch

from qtool.compile.backends.reference import KV_DTYPES, Batch, Pool, Reference, ResidentWeights
from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.decoder import Weights, decode
from qtool.compile.engine import ENGINE, read_spec
from qtool.compile.hidden import FINAL, HiddenStates, eagle3_layers
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.kv_cache import KvCache
from qtool.core.lazy import load
from qtool.runtime.engines.contract import Engine, Floats, Ints, Step, StepResult, wanted_hidden_rows
from qtool.runtime.engines.pool import num_blocks

BLOCK_SIZE = 32


class ReferenceEngine:
    """Runs the decoder eagerly, weights dense in `dtype`. Weights are read at the first step.

    With `kv_cache` keys and values are rounded to it, and stored as the numbers that it would give back.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        kv_cache: KvCache | None = None,
        device: str = "cpu",
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.hidden_states = hidden_states
        self.takes_trees = True
        self._config = config
        self._device = torch.device(device)
        self._weights = ResidentWeights(weights, dtype, self._device)
        self._pool = Pool.allocate(config, num_blocks, block_size, kv_dtype, self._device)
        self._kv_cache = kv_cache

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows."""
        return self.run_with_hidden(step).logits

    @torch.inference_mode()
    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows."""
        batch = Batch(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            past_lens=step.past_lens.tolist(),
            new_lens=step.new_lens.tolist(),
            block_tables=[self._tensor(np.asarray(table)) for table in step.block_tables],
            logit_rows=self._tensor(step.logit_rows),
            hidden_rows=self._tensor(wanted_hidden_rows(step, self.hidden_states)),
            masks=[torch.from_numpy(step.mask(i)).to(self._device) for i in range(len(step.new_lens))],
        )
        layers = () if self.hidden_states is None else self.hidden_states.layers
        decoded = decode(self._config, self._weights, Reference(batch, self._pool, self._kv_cache), layers)
        hidden = torch.cat(decoded.hidden, 1) if decoded.hidden else torch.empty(0, 0)
        return StepResult(decoded.logits.float().cpu().numpy(), hidden.float().cpu().numpy())

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        for cache in (self._pool.keys, self._pool.values):
            cache[:, target] = cache[:, source]

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer."""
        for cache in (self._pool.keys, self._pool.values):
            slots = cache.flatten(1, 2)
            slots[:, self._tensor(targets)] = slots[:, self._tensor(sources)]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)


def open_reference(
    path: Path, kv_cache_tokens: int | None, threads: int | None, device: str = "cpu"
) -> Engine:
    """Open a checkpoint folder, or an engine folder of target ``reference``.

    On the CPU it runs eagerly in float32, on ``cuda`` as `fused.open_fused` says.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint.config, str(path / "config.json"))
    spec = read_spec(path) if (path / ENGINE).is_file() else None
    hidden: HiddenStates | None = HiddenStates(
        size=config.hidden_size, layers=(*eagle3_layers(config.num_layers), FINAL)
    )
    if spec is not None:  # a checkpoint gives them all: they cost nothing where none are wanted
        hidden = spec.hidden_states
    if device != "cpu":
        opened: Engine = load("qtool.runtime.engines.fused:open_fused", extra="kernels")(
            checkpoint, config, spec, kv_cache_tokens=kv_cache_tokens, hidden_states=hidden, device=device
        )
        return opened
    kv_dtype = KV_DTYPES["f32" if spec is None else spec.kv_cache]
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize
    return ReferenceEngine(
        config,
        CheckpointWeights(config, checkpoint),
        num_blocks=num_blocks(kv_cache_tokens, BLOCK_SIZE, per_token),
        kv_dtype=kv_dtype,
        kv_cache=None if spec is not None else checkpoint.quantized_kv_cache(config.num_layers),
        hidden_states=hidden,
    )
