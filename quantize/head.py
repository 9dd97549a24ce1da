"""Quantize the linear that gives the logits: it lies behind the layers, and may be the embedding table."""

import torch
from torch import Tensor

from qtool.calibrate.hidden import HiddenStates
from qtool.calibrate.layers import LayerRunner
from qtool.calibrate.skeleton import HEAD
from qtool.calibrate.statistics import Collector
from qtool.quantize.layer import LoadedLayer, QuantizedLayer, quantize_layer
from qtool.quantize.plan import Assignment


def quantize_head(
    runner: LayerRunner, windows: Tensor, hidden: HiddenStates | None, assignment: Assignment
) -> QuantizedLayer:
    """Quantize the head, given windows [S, L] and what the last layer makes of them, `hidden` [S, L, hidden];
    None where the head is not calibrated.

    A tied head gets codes of its own: the table that embeds tokens stays as it is. No channel scales are
    searched, since the norm before it lies outside the layers too.
    """
    collector = Collector()
    if hidden is not None:
        with collector.watching({HEAD: runner.linears()[HEAD]}):
            runner.run_head(windows, hidden)
    with runner.head() as head:
        layer = LoadedLayer(HEAD, head, _stored_dtypes(runner), lambda: torch.zeros(0))
        return quantize_layer(layer, {HEAD: assignment}, collector.statistics(), [runner.device])


def _stored_dtypes(runner: LayerRunner) -> dict[str, torch.dtype]:
    """The dtype of each of the head's tensors, wherever its weight is stored."""
    source, bias = runner.checkpoint, f"{HEAD}.bias"
    found = {f"{HEAD}.weight": source.tensor(runner.head_weight).dtype}
    return found | ({bias: source.tensor(bias).dtype} if bias in source else {})
