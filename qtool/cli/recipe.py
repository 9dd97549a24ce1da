"""``qtool recipe``: list, show and check recipes, and print their JSON Schema."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.output import size_text, stdout_console

if TYPE_CHECKING:
    from qtool.core.recipe import Calibration
    from qtool.quantize.preview import Preview

app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.")

_Reference = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or a shipped recipe's name.")]


@app.command("list")
def list_() -> None:
    """Name and description of each recipe that ships."""
    from qtool.core.recipe import load_recipe
    from qtool.recipes import shipped

    files = shipped()
    width = max(map(len, files), default=0)
    for name, file in files.items():
        typer.echo(f"{name:{width}}  {load_recipe(file).description}")


@app.command()
def show(
    reference: _Reference,
    resolved: Annotated[bool, typer.Option(help="With every default filled in.")] = False,
) -> None:
    """Print a recipe, as it is written or as it is understood."""
    from qtool.recipes import find_recipe, recipe_file

    if not resolved:
        typer.echo(recipe_file(reference).read_text(encoding="utf-8"), nl=False)
        return
    import yaml

    data = find_recipe(reference).model_dump(mode="json")
    typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def check(
    references: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Files or shipped names.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file, built-in model or hub id: what it would become is printed."),
    ] = None,
) -> None:
    """Say ok, or everything that is wrong with exit code 2, for each recipe."""
    from qtool.compile.targets import check_target
    from qtool.core.sources import resolve
    from qtool.errors import UsageError
    from qtool.recipes import find_recipe

    model = None if checkpoint is None else resolve(checkpoint)
    problems = []
    for reference in references:
        try:
            recipe = find_recipe(reference)
        except UsageError as error:
            problems.append(str(error))
            continue
        try:
            for engine in recipe.compile:
                check_target(engine.target, engine.kv_cache, engine.tensorrt, engine.openvino)
        except UsageError as error:
            problems.append(f"{reference}: compile: {error}")
            continue
        if model is None:
            typer.echo(f"{reference}: ok")
            continue
        from qtool.calibrate.text import load_records
        from qtool.quantize.preview import preview  # torch

        try:
            found = preview(model, recipe)
            load_records(recipe.evaluation.dataset)
        except UsageError as error:
            problems.append(f"{reference}: {error}")
            continue
        typer.echo(f"{reference}: ok")
        _print(found, recipe.calibration)
    if problems:
        raise UsageError("\n".join(problems))


def _print(found: "Preview", calibration: "Calibration") -> None:
    """What would become of a model: its linears, its size, and what that takes."""
    from rich.table import Table

    def sizes(least: int, most: int) -> str:
        return size_text(least) if least == most else f"{size_text(least)} to {size_text(most)}"

    table = Table()
    for heading in ("linears", "become", "by", "of", "to", "such as"):
        table.add_column(heading, justify="right" if heading in ("linears", "of", "to") else "left")
    for part in found.parts:
        table.add_row(
            str(len(part.linears)),
            part.becomes,
            part.method,
            size_text(part.before),
            sizes(part.least, part.most),
            part.linears[0],
        )
    console = stdout_console()
    console.print(table)
    text = f"{calibration.num_samples} windows of {calibration.seq_len} tokens of {calibration.dataset}"
    console.print(
        f"checkpoint: {size_text(found.before)} now, {sizes(found.least, found.most)} then; "
        f"{found.kv_cache or 'KV cache as it is'}; calibrates on {text if found.calibrates else 'nothing'}",
        soft_wrap=True,
    )
    if found.untied_head:
        console.print("lm_head gets numbers of its own; the embedding table, which it was, stays as it is")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from qtool.core.recipe import Recipe

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
    typer.echo(json.dumps(document, indent=2))
