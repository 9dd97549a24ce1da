"""Opens draft heads, compiled or not, for an engine."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from qtool.compile.engine import ENGINE, check_files, read_spec
from qtool.compile.heads.config import HEAD_CONFIG, HeadConfig, read_head_config, refuse_file
from qtool.compile.heads.target import warn_of_another_target
from qtool.compile.hidden import HiddenLayer
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines.contract import Engine, Floats, Ints
from qtool.runtime.speculation.choosing import Chooser
from qtool.runtime.speculation.contract import Drafter
from qtool.runtime.speculation.draft_layer import DraftLayer
from qtool.runtime.speculation.eagle import EagleDrafter, Fusion
from qtool.runtime.speculation.medusa import MedusaDrafter

WEIGHTS = "head.safetensors"


def open_heads(
    path: Path,
    engine: Engine,
    *,
    width: int = 1,
    whole: bool = False,
    device: str | None = None,
    threads: int | None = None,
) -> Drafter:
    """A drafter over the heads in `path`, for `engine`: compiled ones, what ``qtool train-draft`` wrote, or
    heads in a published layout that lack nothing. `width` above 1 drafts trees; `whole` ones have
    as many tokens as are asked for, however unlikely.

    Raises UsageError when the engine gives no hidden states, or others than the heads read, QtoolError for
    heads that are damaged.
    """
    refuse_file(path)
    if (path / HEAD_CONFIG).is_file():
        config, tensors = read_head_config(path), _read(path / WEIGHTS)
    else:
        from qtool.compile.heads.head import read_head

        head = read_head(path)
        config, tensors = head.config, {name: tensor.float().numpy() for name, tensor in head.tensors.items()}
    columns = _columns(path, config, engine)
    chooser = Chooser(tensors["draft_tokens"].astype(np.int32), engine.vocab_size)
    if config.kind == "medusa":
        exact: dict[str, Floats] = {name: value.astype(np.float32) for name, value in tensors.items()}
        return MedusaDrafter(config, exact, columns, chooser, width=width, whole=whole)
    fusion = Fusion(columns)
    if config.kind == "eagle3":
        bias = tensors.get("fc.bias")
        fusion = Fusion(
            columns,
            tensors["fc.weight"].astype(np.float32),
            None if bias is None else bias.astype(np.float32),
        )
    layer = _open_layer(path, engine.num_blocks * engine.block_size, device, threads)
    return EagleDrafter(config.kind, layer, fusion, chooser, width=width, whole=whole)


def warn_of_another(path: Path, model: Path) -> None:
    """Log a warning when the heads in `path` say that they were trained for another model than `model`."""
    if (path / HEAD_CONFIG).is_file():
        warn_of_another_target(read_head_config(path), path, model)


def _read(file: Path) -> dict[str, Floats]:
    """The tensors beside a head.json, all of finite numbers. Imports no torch."""
    try:
        tensors: dict[str, Floats] = dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise QtoolError(
            f"{file}: is missing, truncated or no safetensors file ({error}); train or fetch the head again"
        ) from error
    if "draft_tokens" not in tensors:
        raise QtoolError(f"{file}: lacks draft_tokens; train or fetch the head again")
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise QtoolError(f"{file}: {name} holds NaN or infinity; train or fetch the head again")
    return tensors


def _columns(path: Path, config: HeadConfig, engine: Engine) -> Ints:
    """The columns of the engine's hidden states that the heads read."""
    given, wanted = engine.hidden_states, config.hidden_layers
    if given is None or not set(wanted) <= set(given.layers):
        raise UsageError(
            f"{path}: these heads read hidden states of {_names(wanted)}, and the engine gives "
            f"{'none' if given is None else _names(given.layers)}; compile it with "
            f"--hidden-states {_names(wanted)}, or with the heads: --draft {path}"
        )
    if (given.size, engine.vocab_size) != (config.hidden_size, config.vocab_size):
        raise UsageError(
            f"{path}: these heads are for {config.hidden_size} features and {config.vocab_size} tokens, the "
            f"engine has {given.size} and {engine.vocab_size}; name the heads of this model"
        )
    every = np.arange(given.width, dtype=np.int32)
    return np.concatenate([every[given.columns(layer)] for layer in wanted])


def _names(layers: tuple[HiddenLayer, ...]) -> str:
    return ",".join(map(str, layers))


def _open_layer(path: Path, num_tokens: int, device: str | None, threads: int | None) -> DraftLayer:
    """The graph of a compiled head, else its weights in torch."""
    if (path / ENGINE).is_file():
        check_files(path, read_spec(path))
        from qtool.runtime.speculation.draft_openvino import OpenVinoLayer

        return OpenVinoLayer(path, num_tokens=num_tokens, threads=threads)
    from qtool.compile.heads.head import read_head
    from qtool.runtime.speculation.draft_torch import TorchLayer

    return TorchLayer(read_head(path), num_tokens=num_tokens, device=device)
