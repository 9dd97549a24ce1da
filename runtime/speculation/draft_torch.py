"""EAGLE's layer in torch, on any device: for engines that it has no lowering for."""

import numpy as np
import torch

from qtool.compile.backends.reference import Batch, Pool
from qtool.compile.heads.eagle import draft
from qtool.compile.heads.head import Head
from qtool.compile.heads.reference import DraftReference
from qtool.core.qtensor import Linear
from qtool.runtime.engines.contract import Floats, Step, StepResult

_BLOCK_SIZE = 32


class TorchLayer:
    """Runs steps eagerly, weights dense in float32."""

    takes_trees = True

    def __init__(self, head: Head, *, num_tokens: int, device: str | None = None) -> None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._device = torch.device(chosen)
        self._config = head.config
        self._tensors = {
            name: tensor.to(self._device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in head.tensors.items()
        }
        self.block_size = _BLOCK_SIZE
        self.num_blocks = -(-num_tokens // _BLOCK_SIZE)
        layer = head.config.decoder()
        self._pool = Pool.allocate(layer, self.num_blocks, _BLOCK_SIZE, torch.float32, self._device)

    @torch.inference_mode()
    def run(self, step: Step, features: Floats) -> StepResult:
        """Logits and features of the wanted rows."""
        rows = np.empty(0, np.int32) if step.hidden_rows is None else step.hidden_rows
        batch = Batch(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            past_lens=step.past_lens.tolist(),
            new_lens=step.new_lens.tolist(),
            block_tables=[self._tensor(np.asarray(table)) for table in step.block_tables],
            logit_rows=self._tensor(step.logit_rows),
            hidden_rows=self._tensor(rows),
            masks=[torch.from_numpy(step.mask(i)).to(self._device) for i in range(len(step.new_lens))],
        )
        beside = torch.from_numpy(features).to(self._device)
        drafted = draft(self._config, self, DraftReference(batch, self._pool, beside))
        return StepResult(drafted.logits.cpu().numpy(), drafted.hidden[0].cpu().numpy())

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, module: str) -> Linear:
        return Linear(self._tensors[f"{module}.weight"], self._tensors.get(f"{module}.bias"))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
