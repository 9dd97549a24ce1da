"""Compile a checkpoint into an engine folder."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qtool.compile.abilities import check_dynamic_quantization, check_schemes
from qtool.compile.backends.tensorrt.profiles import check_limits
from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.engine import DRAFT_FOLDER, ENGINE, EngineSpec, check_files, own_files, read_spec
from qtool.compile.heads.build import write_head
from qtool.compile.heads.config import HEAD_CONFIG
from qtool.compile.heads.head import read_head
from qtool.compile.heads.target import warn_of_another_target
from qtool.compile.hidden import HiddenLayer, HiddenStates, parse_layers
from qtool.compile.targets import TARGETS, check_target
from qtool.core.checkpoint import COMPANIONS, Checkpoint
from qtool.core.files import new_folder, sha256
from qtool.core.lazy import load
from qtool.core.manifest import MANIFEST, versions
from qtool.core.recipe import OpenVinoOptions, TensorRtOptions
from qtool.errors import UsageError


@dataclass(frozen=True)
class Draft:
    """What is compiled with an engine to draft for it."""

    folder: Path
    model: EngineSpec | None
    """Of a draft model's engine; None: the folder holds heads."""


def find_draft(folder: Path) -> Draft:
    """What a folder holds that drafts. UsageError when it is missing or holds compiled heads, QtoolError
    for a damaged engine."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; wanted draft heads or the engine of a draft model")
    is_engine = (folder / ENGINE).is_file()
    if is_engine and (folder / HEAD_CONFIG).is_file():
        raise UsageError(
            f"{folder}: holds heads that are compiled already, and without what their target shares; "
            f"name the folder that they were compiled from, or serve with --speculative heads={folder}"
        )
    if not is_engine:
        return Draft(folder, None)
    spec = read_spec(folder)
    check_files(folder, spec)
    return Draft(folder, spec)


def compile_engine(
    checkpoint: Path,
    target: str,
    output: Path,
    *,
    kv_cache: str | None = None,
    openvino: OpenVinoOptions | None = None,
    tensorrt: TensorRtOptions | None = None,
    hidden_states: str | None = None,
    draft: Draft | None = None,
    progress: Callable[[str, float], None] = lambda phase, share: None,
) -> EngineSpec:
    """Compile the checkpoint folder for `target` into the new folder `output`, whole or not at all.

    `kv_cache` is the precision of keys and values in the pool: f32 is exact, f16 and bf16 halve the pool's
    bytes, u8 quarters them; what they cost is for ``qtool eval`` to measure. None takes the most exact that
    the target has, and is refused for a checkpoint that asks for a quantized one. `openvino` is what OpenVINO
    may round while it computes. `progress` is told the phase of a build that takes long, and the share of it
    that is done.

    `hidden_states` says what the engine gives of a token beside logits, see `hidden.parse_layers`. Heads that
    `draft` names are compiled into ``draft``, and the engine gives what they read; a draft model's engine is
    copied there.

    Raises UsageError for an unknown target, precision or layer, for options of another target, for a scheme
    that the target does not execute and for an output that exists, QtoolError for a checkpoint that is
    damaged or has something the decoder does not know.
    """
    chosen_cache = kv_cache
    kv_cache = check_target(target, kv_cache, tensorrt, openvino)
    write = load(TARGETS[target].write, extra=target)
    source = Checkpoint(checkpoint)
    if source.kv_cache is not None and chosen_cache is None:
        raise UsageError(
            f"{checkpoint}: asks for an {source.kv_cache}, which target {target} does not execute; say with "
            "--kv-cache what the engine shall have instead, or serve the checkpoint itself"
        )
    config = read_config(source.config, str(checkpoint / "config.json"))
    layers = () if hidden_states is None else parse_layers(hidden_states, config.num_layers)
    head = None
    if draft is not None and draft.model is None:
        head = read_head(draft.folder, checkpoint)
        warn_of_another_target(head.config, draft.folder, checkpoint)
        layers = tuple(dict.fromkeys((*layers, *head.config.hidden_layers)))
    if tensorrt is not None:
        check_limits(tensorrt, config, checkpoint)
    check_schemes(source, target, TARGETS[target].abilities)
    if openvino is not None and openvino.dynamic_quantization is not None:
        check_dynamic_quantization(source, openvino.dynamic_quantization)
    options = {
        "target": target,
        "tensorrt": tensorrt or TensorRtOptions(),
        "progress": progress,
    }
    with new_folder(output) as folder:
        write(source, config, folder, layers, **options if TARGETS[target].takes_options else {})
        _copy_companions(checkpoint, folder)
        max_context = (tensorrt and tensorrt.max_context) or config.max_context
        spec = _spec(source, config, target, kv_cache, openvino, layers, max_context, folder)
        spec.save(folder)
        if head is not None:
            chosen = TARGETS[target]
            (folder / DRAFT_FOLDER).mkdir()
            kv_bytes = next(iter(chosen.kv_bytes.values()))
            write_head(head, target, folder / DRAFT_FOLDER, block_size=chosen.block_size, kv_bytes=kv_bytes)
        elif draft is not None:
            shutil.copytree(draft.folder, folder / DRAFT_FOLDER, ignore=shutil.ignore_patterns(DRAFT_FOLDER))
    return spec


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    """Tokenizer, templates and records, beside what the target wrote."""
    for name in ("config.json", MANIFEST, *COMPANIONS):
        if (checkpoint / name).is_file() and not (folder / name).exists():
            shutil.copyfile(checkpoint / name, folder / name)


def _spec(
    source: Checkpoint,
    config: DecoderConfig,
    target: str,
    kv_cache: str,
    openvino: OpenVinoOptions | None,
    layers: Sequence[HiddenLayer],
    max_context: int,
    folder: Path,
) -> EngineSpec:
    kv_bytes = TARGETS[target].kv_bytes[kv_cache](config.head_dim)
    return EngineSpec(
        target=target,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=max_context,
        block_size=TARGETS[target].block_size,
        kv_cache=kv_cache,
        openvino=openvino,
        hidden_states=HiddenStates(size=config.hidden_size, layers=tuple(layers)) if layers else None,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=min((window for window in config.windows if window is not None), default=None),
        weight_bytes=sum(file.stat().st_size for file in folder.glob(TARGETS[target].weights)),
        kv_bytes_per_token=config.num_layers * config.num_kv_heads * kv_bytes,
        versions=versions(),
        checkpoint={file.name: sha256(file) for file in source.files},
        files=own_files(folder, target),
    )
