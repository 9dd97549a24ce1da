"""``qtool recipe``: list, show and check recipes, and print their JSON Schema."""

import json
from typing import Annotated

import typer

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
) -> None:
    """Say ok, or everything that is wrong with exit code 2, for each recipe."""
    from qtool.compile.targets import check_target
    from qtool.errors import UsageError
    from qtool.recipes import find_recipe

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
        else:
            typer.echo(f"{reference}: ok")
    if problems:
        raise UsageError("\n".join(problems))


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from qtool.core.recipe import Recipe

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
    typer.echo(json.dumps(document, indent=2))
