"""``qtool compile``: lower a checkpoint to an engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from qtool.core.recipe import CompileTarget, OpenVinoOptions, TensorRtOptions

    Options = TypeVar("Options", OpenVinoOptions, TensorRtOptions)

_TENSORRT = "TensorRT"
_OPENVINO = "OpenVINO"


def compile_(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file, built-in model or hub id.")],
    *,
    target: Annotated[
        str, typer.Option(help="Backend: openvino, onnx, tensorrt-rtx, tensorrt or reference.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Engine folder to write; must not exist.")],
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="Precision of the KV cache: f32, f16, bf16 or u8, as far as the target has it; its "
            "most exact by default. Below f32 costs accuracy."
        ),
    ] = None,
    hidden_states: Annotated[
        str | None,
        typer.Option(
            help="Give hidden states too, for embeddings and draft heads: final, eagle3, or layers as in "
            "2,15,final."
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Draft heads to compile with it, or a draft model's engine, for --speculative."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Take what its compile section says of the target.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Run the compiled graph on this CPU and print its drift from CHECKPOINT."
        ),
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(
            help="What is computed in: f32, the default, or bf16, for CPUs that multiply it faster (AMX).",
            rich_help_panel=_OPENVINO,
        ),
    ] = None,
    dynamic_quantization: Annotated[
        int | None,
        typer.Option(
            help="Round inputs of quantized linears to int8, 32, 64 or 128 with one scale. Faster on CPUs "
            "with VNNI instructions.",
            rich_help_panel=_OPENVINO,
        ),
    ] = None,
    cc: Annotated[
        str | None,
        typer.Option(help="Compute capabilities to build for, such as 80,86,89.", rich_help_panel=_TENSORRT),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences that decode in one call.", rich_help_panel=_TENSORRT)
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens that one call computes.", rich_help_panel=_TENSORRT)
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; the model's by default.", rich_help_panel=_TENSORRT),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Drafts that one call verifies; 0: none.", rich_help_panel=_TENSORRT)
    ] = None,
) -> None:
    """Build an engine for one kind of machine, ready to serve, and print its folder."""
    from qtool.cli.progress import share_bar
    from qtool.compile.targets import check_target
    from qtool.core.files import refuse_existing
    from qtool.core.recipe import CompileTarget, OpenVinoOptions, TensorRtOptions
    from qtool.core.sources import resolve
    from qtool.runtime.speculation.draft_model import refuse_other_vocabulary
    from qtool.runtime.tokenizer import Tokenizer

    refuse_existing(output)  # before a model is downloaded in vain
    chosen = CompileTarget(target=target) if recipe is None else _of_recipe(recipe, target)
    limits: dict[str, object] = {
        "compute_capabilities": _capabilities(cc),
        "max_num_seqs": max_num_seqs,
        "chunk": chunk,
        "max_context": max_context,
        "draft_tokens": draft_tokens,
    }
    options = _changed(TensorRtOptions, chosen.tensorrt, limits)
    rounding = {"precision": precision, "dynamic_quantization": dynamic_quantization}
    openvino = _changed(OpenVinoOptions, chosen.openvino, rounding)
    kv_cache = kv_cache or chosen.kv_cache
    check_target(target, kv_cache, options, openvino)
    model = resolve(checkpoint)
    tokenizer = Tokenizer.load(model)  # an engine without one cannot be served
    from qtool.compile.build import compile_engine, find_draft  # torch, once all that needs none is checked

    drafts = None if draft is None else find_draft(draft)
    if drafts is not None and drafts.model is not None:
        refuse_other_vocabulary(tokenizer, drafts.folder, drafts.model.vocab_size)
    with share_bar(f"compiling for {target}") as progress:
        compile_engine(
            model,
            target,
            output,
            kv_cache=kv_cache,
            openvino=openvino,
            tensorrt=_with_onnx(options) if verify and target.startswith("tensorrt") else options,
            hidden_states=hidden_states,
            draft=drafts,
            progress=progress,
        )
    if verify:
        try:
            _verify(output, model)
        finally:
            if target.startswith("tensorrt") and not (options and options.keep_onnx):
                _drop_onnx(output)
    typer.echo(output)


def _verify(engine: Path, checkpoint: Path) -> None:
    """Print the drift of the compiled graph; the engine stays whatever comes of it."""
    from qtool.cli.output import stdout_console
    from qtool.cli.progress import progress_bar
    from qtool.errors import QtoolError
    from qtool.eval.verify import NUM_WINDOWS, verify

    try:
        with progress_bar("verifying", NUM_WINDOWS) as advance:
            report = verify(engine, checkpoint, on_window=advance)
    except QtoolError as error:
        raise QtoolError(f"{engine}: is built and was kept, but verifying it failed: {error}") from error
    stdout_console().print(report.table())


def _with_onnx(options: "TensorRtOptions | None") -> "TensorRtOptions":
    from qtool.core.recipe import TensorRtOptions, override
    from qtool.errors import UsageError

    if options is not None and options.attention == "plugin":
        raise UsageError(
            "--verify runs the graph on this CPU, which attention: plugin is not for; leave one out"
        )
    return override(options or TensorRtOptions(), keep_onnx=True)


def _drop_onnx(engine: Path) -> None:
    for file in engine.glob("model.onnx*"):
        file.unlink()


def _of_recipe(recipe: str, target: str) -> "CompileTarget":
    from qtool.errors import UsageError
    from qtool.recipes import find_recipe

    known = {chosen.target: chosen for chosen in find_recipe(recipe).compile}
    if target not in known:
        raise UsageError(
            f"{recipe}: compile names {', '.join(known) or 'no target'}, not {target}; add it there"
        )
    return known[target]


def _capabilities(text: str | None) -> tuple[int, ...] | None:
    from qtool.errors import UsageError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--cc is {text!r}, wanted whole numbers such as 80,86,89") from None


def _changed(
    kind: "type[Options]", options: "Options | None", given: Mapping[str, object]
) -> "Options | None":
    """The options with those of the command line in their place; None when neither says any."""
    from qtool.core.recipe import override

    if all(value is None for value in given.values()):
        return options
    return override(options or kind(), **given)
