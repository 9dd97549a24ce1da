"""The driver of the torch engine on a GPU: weights and KV pool stay there, a step is one copy in and one out.

Attention is the Triton kernel of `qtool.compile.kernels`; all else is torch, queued without waiting.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from qtool.compile.backends.fused import Fused, FusedTokens
from qtool.compile.backends.fused_pool import FusedPool
from qtool.compile.backends.reference import ResidentWeights
from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Weights, decode, linear_shapes
from qtool.compile.engine import EngineSpec
from qtool.compile.hidden import HiddenStates
from qtool.compile.kernels.launch import DTYPES, POOL_DTYPES, Batch
from qtool.compile.kernels.spec import KEYS_PER_SPLIT, AttentionSpec
from qtool.compile.rope import Rope
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import KvScales
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines.contract import Floats, Ints, Step, StepResult, slots_of, wanted_hidden_rows
from qtool.runtime.engines.pool import DEFAULT_TOKENS
from qtool.runtime.engines.pool import num_blocks as blocks_for

BLOCK_SIZE = 32
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SHARE = 0.5
_ALIGNED = 4
"""32-bit numbers in 16 bytes: kernels are compiled once for pointers that are multiples of that."""


class FusedEngine:
    """Runs the decoder on a GPU, weights dense in `dtype`; without one, in Triton's interpreter alone."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[KvScales] | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        """`dtype` is float16 or bfloat16, `kv_dtype` the same, or int8 or float8_e4m3fn with scales.

        Raises UsageError for a shape that the kernel does not have.
        """
        kv_dtype = kv_dtype or dtype
        shape = config.num_heads, config.num_kv_heads, config.head_dim, block_size
        # refused here and not at the first step
        AttentionSpec(*shape, config.attention_scale, DTYPES[dtype], POOL_DTYPES[kv_dtype])
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.hidden_states = hidden_states
        self.takes_trees = True
        self._config, self._device = config, device
        self._weights = ResidentWeights(weights, dtype, device)
        self._pool = FusedPool(config, num_blocks, block_size, kv_dtype, device, kv_scales)
        self._frequencies: dict[Rope, torch.Tensor] = {}

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows."""
        return self.run_with_hidden(step).logits

    @torch.inference_mode()
    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows."""
        layers = () if self.hidden_states is None else self.hidden_states.layers
        with self._active():
            operations = Fused(self._to_device(step), self._pool, self._frequencies)
            decoded = decode(self._config, self._weights, operations, layers)
            operations.commit()
            hidden = torch.cat(decoded.hidden, 1) if decoded.hidden else torch.empty(0, 0)
            return StepResult(decoded.logits.float().cpu().numpy(), hidden.float().cpu().numpy())

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        with self._active():
            self._pool.copy_block(source, target)

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer."""
        with self._active():
            self._pool.move_slots(*self._copy(sources, targets))

    def _active(self) -> AbstractContextManager[None]:
        """Within, kernels are launched on the engine's GPU: which one is current is each thread's own."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _to_device(self, step: Step) -> FusedTokens:
        num_tokens, starts = len(step.token_ids), np.concatenate(([0], np.cumsum(step.new_lens)))
        blocks = -(-step.past_lens // self.block_size)
        tables = np.zeros((len(blocks), max(1, int(blocks.max()))), np.int32)
        for row, count in enumerate(blocks.tolist()):
            tables[row, :count] = step.block_tables[row][:count]
        slots = [
            slots_of(table, np.arange(past, past + new, dtype=np.int32), self.block_size)
            for table, past, new in zip(step.block_tables, step.past_lens, step.new_lens, strict=True)
        ]
        on_device = self._copy(
            step.token_ids,
            step.positions,
            step.logit_rows,
            wanted_hidden_rows(step, self.hidden_states),
            tables,
            step.past_lens,
            starts,
            np.concatenate(slots),
        )
        token_ids, positions, logit_rows, hidden_rows, block_tables, past_lens, new_starts, places = on_device
        tree = None
        if step.masks is not None and any(mask is not None for mask in step.masks):
            seen = np.zeros((num_tokens, int(step.new_lens.max())), np.bool_)
            for sequence, (start, count) in enumerate(zip(starts, step.new_lens, strict=False)):
                seen[start : start + count, :count] = step.mask(sequence)
            tree = self._send(torch.from_numpy(seen))
        batch = Batch(block_tables, past_lens, new_starts, positions, tree)
        return FusedTokens(token_ids, positions, logit_rows, hidden_rows, batch, places)

    def _copy(self, *arrays: Ints) -> list[torch.Tensor]:
        """Integers on the device, all in one copy."""
        starts = np.cumsum([0, *(array.size + -array.size % _ALIGNED for array in arrays)])
        packed = np.zeros(starts[-1], np.int32)
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.size] = array.reshape(-1)
        sent = self._send(torch.from_numpy(packed))
        return [
            sent[start : start + array.size].view(array.shape)
            for start, array in zip(starts.tolist(), arrays, strict=False)
        ]

    def _send(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device, for which the host need not wait."""
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def open_fused(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    spec: EngineSpec | None,
    *,
    kv_cache_tokens: int | None,
    hidden_states: HiddenStates | None,
    device: str,
) -> FusedEngine:
    """Open a checkpoint, or with `spec` an engine of target ``reference``, on a GPU: ``cuda``, ``cuda:1``.

    It computes in the checkpoint's own 16-bit type, in bfloat16 where that is float32. So is the KV cache, or
    with codes and scales as a checkpoint says; an engine has been compiled for f16. Raises UsageError when
    there is no such GPU, and for an engine whose KV cache is to have 32 bits.
    """
    if spec is not None and spec.kv_cache == "f32":
        raise UsageError(
            f"{checkpoint.path}: was compiled for a KV cache in f32, on a GPU it has 16 bits; compile it "
            "with --kv-cache f16, or serve the checkpoint itself"
        )
    gpu, dtype = _find(device), _compute_dtype(checkpoint)
    kv_dtype, scales = dtype, None
    if spec is None and checkpoint.kv_cache is not None:
        kv_dtype = _CODES[checkpoint.kv_cache.kind]
        scales = [checkpoint.kv_scales(f"model.layers.{i}.self_attn") for i in range(config.num_layers)]
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize
    tokens = kv_cache_tokens or _default_tokens(config, dtype, per_token, gpu)
    engine = FusedEngine(
        config,
        CheckpointWeights(config, checkpoint),
        num_blocks=blocks_for(tokens, BLOCK_SIZE, per_token),
        dtype=dtype,
        device=gpu,
        kv_dtype=kv_dtype,
        kv_scales=scales,
        hidden_states=hidden_states,
    )
    _warm_up(engine)
    return engine


def _warm_up(engine: FusedEngine) -> None:
    """Bring the weights onto the GPU and compile the kernels, before the first request has to wait for it.

    A token, a chunk, and a token after a past that is long enough to be cut into parts; all in block 0.
    """
    for past, new in ((0, 1), (0, BLOCK_SIZE), (2 * KEYS_PER_SPLIT, 1)):
        tokens = np.zeros(new, np.int32)
        engine.run(
            Step(
                token_ids=tokens,
                positions=np.arange(past, past + new, dtype=np.int32),
                past_lens=np.array([past], np.int32),
                new_lens=np.array([new], np.int32),
                block_tables=[[0] * (past // BLOCK_SIZE + 1)],
                logit_rows=tokens[:1],
            )
        )


def _find(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type != "cuda":
        raise UsageError(
            f"device {device!r} is unknown; wanted cpu, cuda, or a GPU by its number as in cuda:0"
        )
    if not torch.cuda.is_available():
        raise UsageError(
            f"device {device}: torch {torch.__version__} sees no CUDA GPU here; leave --device out to run on "
            "the CPU, or install a build of torch for CUDA where there is one"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise UsageError(f"device {device}: the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)


def _compute_dtype(checkpoint: Checkpoint) -> torch.dtype:
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return torch.float16 if named == "float16" else torch.bfloat16


def _default_tokens(config: DecoderConfig, dtype: torch.dtype, per_token: int, gpu: torch.device) -> int:
    """Tokens of KV cache when none were asked for: as in `pool.num_blocks`, of the GPU's memory."""
    shapes: Sequence[tuple[int, int]] = [
        *linear_shapes(config).values(),
        (config.vocab_size, config.hidden_size),
    ]
    weights = dtype.itemsize * sum(rows * columns for rows, columns in shapes)
    free, _ = torch.cuda.mem_get_info(gpu)
    if weights >= free:
        raise QtoolError(
            f"{config.architecture}: its weights take {weights / 2**30:.1f} GiB on {gpu}, where "
            f"{free / 2**30:.1f} GiB are free; a smaller model, or another GPU"
        )
    return max(min(DEFAULT_TOKENS, int((free - weights) * _SHARE) // per_token), BLOCK_SIZE)
