"""Hidden states: what an engine gives of a token beside its logits, for embeddings and for draft heads."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from qtool.errors import QtoolError, UsageError

FINAL: Literal["final"] = "final"
HiddenLayer = int | Literal["final"]
"""A number i is the residual stream that enters layer i; "final" is what the last norm gives."""


class HiddenStates(BaseModel):
    """The hidden states of one engine: `layers` side by side, `size` features each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: PositiveInt
    layers: tuple[HiddenLayer, ...]

    @property
    def width(self) -> int:
        """Numbers that a row of them has."""
        return self.size * len(self.layers)

    def columns(self, layer: HiddenLayer) -> slice:
        """Where `layer` lies in a row; QtoolError when it is not there."""
        if layer not in self.layers:
            raise QtoolError(
                f"the engine gives hidden states of {', '.join(map(str, self.layers))}, not of {layer}; "
                f"compile it with --hidden-states {','.join(map(str, (*self.layers, layer)))}"
            )
        start = self.size * self.layers.index(layer)
        return slice(start, start + self.size)


NO_HIDDEN_STATES = "this engine gives no hidden states; compile it with --hidden-states final"


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, those that EAGLE-3's published heads read (its repository's choice;
    the paper, section 3.1, leaves them open)."""
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(min(max(layer, 0), num_layers - 1) for layer in wanted))


def parse_layers(text: str, num_layers: int) -> tuple[HiddenLayer, ...]:
    """Read ``final``, ``eagle3`` or a list such as ``2,15,27,final``; UsageError when it is none of these."""
    found: list[HiddenLayer] = []
    for part in text.split(","):
        if part == FINAL:
            found.append(FINAL)
        elif part == "eagle3":
            found += eagle3_layers(num_layers)
        elif part.isdecimal() and int(part) < num_layers:
            found.append(int(part))
        else:
            raise UsageError(
                f"hidden states are asked for by {text!r}; wanted final, eagle3 or layers 0 to "
                f"{num_layers - 1}, as in 2,15,final"
            )
    return tuple(dict.fromkeys(found))
