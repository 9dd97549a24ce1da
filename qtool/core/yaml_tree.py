"""YAML as a tree, of a size and depth that a file written by a person has."""

import yaml

from qtool.errors import UsageError

_MOST_CHARACTERS = 1 << 18
_MOST_NODES = 10_000
_DEEPEST = 50


def read_tree(file: str, text: str) -> yaml.Node | None:
    """The tree of a YAML text, None when it is empty; `file` names it in errors.

    Raises UsageError for what is no YAML, for keys that are no words, and for a tree that is too large or too
    deep once its aliases are written out: a few lines of them can stand for more than any memory, or for
    themselves.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{file}: has {len(text)} characters, wanted at most {_MOST_CHARACTERS}")
    try:
        tree = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise invalid(file, error) from error
    except RecursionError as error:
        raise UsageError(f"{file}: is nested too deeply, wanted at most {_DEEPEST} levels") from error
    if tree is not None:
        _measure(file, tree, {})
    return tree


def invalid(file: str, error: Exception) -> UsageError:
    """What a parser found wrong with a file, in a line, and in which of the file's lines."""
    mark = getattr(error, "problem_mark", None)
    said = [getattr(error, "context", None), getattr(error, "problem", None)] if mark else [str(error)]
    text = " ".join(", ".join(part for part in said if part).split())
    return UsageError(f"{file}{f':{mark.line + 1}' if mark else ''}: is not valid YAML: {text}")


def _measure(file: str, node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """The nodes and the levels of the tree under `node`; in `known` those seen, None for those yet open."""
    if id(node) in known:
        measured = known[id(node)]
        if measured is None:
            raise UsageError(f"{file}:{node.start_mark.line + 1}: an alias stands for what it is part of")
        return measured
    known[id(node)] = None
    _check_keys(file, node)
    children = [_measure(file, child, known) for child in _children(node)]
    nodes = 1 + sum(count for count, _ in children)
    levels = 1 + max((depth for _, depth in children), default=0)
    where = f"{file}:{node.start_mark.line + 1}"
    if nodes > _MOST_NODES:
        raise UsageError(f"{where}: has more than {_MOST_NODES} values, aliases written out; write fewer")
    if levels > _DEEPEST:
        raise UsageError(f"{where}: is nested too deeply, wanted at most {_DEEPEST} levels")
    known[id(node)] = nodes, levels
    return nodes, levels


def _check_keys(file: str, node: yaml.Node) -> None:
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
            raise UsageError(f"{file}:{key.start_mark.line + 1}: has a {kind} for a key, wanted a word")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
