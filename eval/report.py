"""The drift report: what was measured, on what, and which gates it passed."""

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from qtool.eval.drift import Drift
from qtool.eval.gates import GateResult


class DriftReport(BaseModel):
    """One comparison; `model_dump_json` is what ``qtool eval --json`` prints."""

    model_config = ConfigDict(frozen=True)

    model: str
    baseline: str
    dataset: str
    num_windows: int
    window_len: int
    drift: Drift
    perplexity_increase: float
    gates: list[GateResult]

    @property
    def passed(self) -> bool:
        """Whether every gate that was set is kept."""
        return all(gate.passed for gate in self.gates)

    def table(self) -> Table:
        """The report for a terminal."""
        drift = self.drift
        table = Table(title=f"drift of {self.model} from {self.baseline}", title_justify="left")
        table.add_column("measure")
        table.add_column("value", justify="right")
        table.add_row("perplexity, baseline", f"{drift.perplexity_base:.3f}")
        table.add_row("perplexity", f"{drift.perplexity:.3f} ({self.perplexity_increase:+.2%})")
        table.add_row("KL(base ‖ model), mean", f"{drift.kl_mean:.5f} nats")
        table.add_row("KL(base ‖ model), 99th percentile", f"{drift.kl_p99:.5f} nats")
        table.add_row("top-1 agreement", f"{drift.top1_agreement:.2%}")
        table.add_row("on", f"{self.dataset}: {self.num_windows} windows of {self.window_len} tokens")
        for gate in self.gates:
            style = "green" if gate.passed else "bold red"
            table.add_row("gate", f"[{style}]{gate}[/{style}]")
        return table
