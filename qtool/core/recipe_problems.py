"""What is wrong with a recipe file, said for the person who wrote it: file, line, key, what is wanted."""

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import ValidationError

from qtool.errors import nearest

Location = tuple[int | str, ...]
Schema = dict[str, Any]


def duplicate_keys(file: str, node: yaml.Node | None) -> list[str]:
    """Keys that a mapping holds twice: YAML would keep the last and drop the others in silence."""
    problems: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                problems.append(f"{file}:{key.start_mark.line + 1}: {key.value}: appears twice")
            seen.add(str(key.value))
            problems += duplicate_keys(file, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            problems += duplicate_keys(file, item)
    return problems


def explain(file: str, node: yaml.Node | None, schema: Schema, error: ValidationError) -> list[str]:
    """One line a problem. `node` is the file's parsed tree, `schema` the JSON Schema that it broke."""
    problems = error.errors()
    locations = [problem["loc"] for problem in problems]
    found = [
        (_line(node, location), f"{_written(node, location)}: {_reason(schema, problem)}")
        for problem, location in zip(problems, locations, strict=True)
        # a list whose items are wrong is also reported as too short
        if not (problem["type"] == "too_short" and any(_inside(location, other) for other in locations))
    ]
    return [f"{file}:{line}: {text}" for line, text in sorted(found)]


def _inside(outer: Location, inner: Location) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _reason(schema: Schema, problem: Any) -> str:
    match problem["type"]:
        case "extra_forbidden":
            return (
                f"unknown key; {nearest(str(problem['loc'][-1]), _known_keys(schema, problem['loc'][:-1]))}"
            )
        case "union_tag_invalid":
            tags = problem["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"{problem['ctx']['tag']!r} is not known; {nearest(problem['ctx']['tag'], tags)}"
        case "union_tag_not_found":
            return f"lacks {problem['ctx']['discriminator']}"
        case "missing":
            return "is missing"
        case "tuple_type":
            return f"should be a list (got {problem['input']!r})"
        case "model_type" | "model_attributes_type":
            wanted = "a name or a mapping" if _takes_names(schema, problem["loc"]) else "a mapping"
            return f"should be {wanted} (got {problem['input']!r})"
        case "too_short":
            return f"should have at least {problem['ctx']['min_length']} item"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"{message} (got {problem['input']!r})"


def _line(node: yaml.Node | None, location: Location) -> int:
    """The line of the innermost thing at `location` that the file has, counted from 1."""
    line = 1 if node is None else node.start_mark.line + 1
    for mark, _ in _walk(node, location):
        line = mark.line + 1
    return line


def _written(node: yaml.Node | None, location: Location) -> str:
    """`location` as one would write it: ``quantization.rules[0].method.grid``."""
    found = {index for _, index in _walk(node, location)}
    parts = ""
    for index, part in enumerate(location):
        if index in found or index == len(location) - 1:  # pydantic adds the names of a union's members
            parts += f"[{part}]" if isinstance(part, int) else f".{part}"
    return parts.removeprefix(".") or "recipe"


def _walk(node: yaml.Node | None, location: Location) -> Iterator[tuple[yaml.Mark, int]]:
    """Follow `location` through the tree; yields a mark and the part's index for each part found."""
    for index, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            entry = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if entry is not None:
                yield entry[0].start_mark, index
                node = entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            yield node.start_mark, index


def _known_keys(schema: Schema, location: Location) -> set[str]:
    """The keys that `schema` allows in the mapping at `location`."""
    return {key for option in _options_at(schema, location) for key in option.get("properties", {})}


def _takes_names(schema: Schema, location: Location) -> bool:
    """Whether `schema` allows one of some words at `location`."""
    return any("enum" in option for option in _options_at(schema, location))


def _options_at(schema: Schema, location: Location) -> list[Schema]:
    """The plain schemas that `schema` allows at `location`."""
    node = schema
    for part in location:
        node = next(found for option in _options(schema, node) if (found := _step(option, part)))
    return _options(schema, node)


def _step(option: Schema, part: int | str) -> Schema | None:
    if isinstance(part, int):
        return option.get("items")
    properties = option.get("properties", {})
    tag = properties.get("name") or properties.get("format") or {}
    if part == tag.get("const") or part in tag.get("enum", ()):
        return option
    found: Schema | None = properties.get(part)
    return found


def _options(schema: Schema, node: Schema) -> list[Schema]:
    """The plain schemas that `node` allows, references and unions followed."""
    if "$ref" in node:
        return _options(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[-1]])
    members = node.get("anyOf") or node.get("oneOf")
    if members:
        return [option for member in members for option in _options(schema, member)]
    return [node]
