"""The child process that runs a native builder: ``python -m qtool.compile.backends.tensorrt.worker``.

It reads a `BuildSpec` as JSON from stdin, writes the plan, appends every message of the builder to the log
file as a line of JSON, and tells its progress as lines of JSON on stdout.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict

from qtool.compile.backends.tensorrt.flavour import FLAVOURS, load
from qtool.core.lazy import load as load_plugins


class BuildSpec(BaseModel):
    """One build."""

    model_config = ConfigDict(frozen=True)

    target: str
    model: Path
    plan: Path
    log: Path
    compute_capabilities: tuple[int, ...]
    plugins: bool = False
    """Whether the graph has nodes of `qtool.compile.kernels.tensorrt_plugin`."""
    profiles: tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], ...]
    """Of each profile, the least, best and largest shape of each input."""


class Phases:
    """The builder's nested phases as one share of the whole, which never shrinks."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str | None, int, int]] = {}
        self._share = 0.0

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        """A phase begins, of `num_steps` steps, within a step of `parent`."""
        self._steps[name] = (parent, 0, max(num_steps, 1))

    def advance(self, name: str, step: int) -> float:
        """Step number `step` of a phase, counted from 0, is done; the share of the whole that is."""
        parent, _, total = self._steps[name]
        self._steps[name] = (parent, step + 1, total)
        share = 0.0
        at: str | None = name
        while at is not None:
            parent, done, total = self._steps[at]
            share, at = min((done + share) / total, 1.0), parent
        self._share = max(self._share, share)
        return self._share


def build(spec: BuildSpec, trt: ModuleType, events: TextIO) -> bool:
    """Parse the graph and write the plan; whether the builder gave one. What went wrong is in the log."""
    with spec.log.open("w", encoding="utf-8") as log:
        logger = _logger(trt, log)
        builder = trt.Builder(logger)
        if spec.plugins:
            load_plugins("qtool.compile.kernels.tensorrt_plugin:register", extra="kernels")()
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(spec.model)):
            return False
        plan = builder.build_serialized_network(network, _config(spec, trt, builder, events))
        if plan is None:
            return False
        spec.plan.write_bytes(plan)
        return True


def _config(spec: BuildSpec, trt: ModuleType, builder: Any, events: TextIO) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = _monitor(trt, events)
    if spec.compute_capabilities:
        config.num_compute_capabilities = len(spec.compute_capabilities)
        for index, capability in enumerate(spec.compute_capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[f"SM{capability}"], index)
    for shapes in spec.profiles:
        profile = builder.create_optimization_profile()
        for name, bounds in shapes.items():
            profile.set_shape(name, *bounds)
        config.add_optimization_profile(profile)
    return config


def _logger(trt: ModuleType, log: TextIO) -> Any:
    def write(logger: object, severity: object, text: str) -> None:
        log.write(json.dumps([str(severity).rpartition(".")[2], text]) + "\n")
        log.flush()  # a crash of the builder must not take the last lines with it

    return _implement(trt.ILogger, log=write)


def _monitor(trt: ModuleType, events: TextIO) -> Any:
    phases, last = Phases(), 0.0

    def start(monitor: object, name: str, parent: str | None, num_steps: int) -> None:
        phases.start(name, parent, num_steps)

    def step(monitor: object, name: str, number: int) -> bool:
        nonlocal last
        share = phases.advance(name, number)
        if time.monotonic() - last < _INTERVAL:
            return True
        last = time.monotonic()
        try:
            events.write(json.dumps([name, share]) + "\n")
            events.flush()
        except BrokenPipeError:  # nobody waits for this build any more: the builder shall stop
            return False
        return True

    def finish(monitor: object, name: str) -> None:
        """Its last step was told."""

    return _implement(trt.IProgressMonitor, phase_start=start, step_complete=step, phase_finish=finish)


def _implement(interface: type, **methods: Callable[..., object]) -> Any:
    """An object of a class of the bindings, which has to be subclassed, with these methods."""
    return type(interface.__name__, (interface,), methods)()


_INTERVAL = 0.1
"""Seconds between two messages of progress at least."""


def main() -> None:
    """Build as stdin says. Exit code 3: the builder failed, and the log says why."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the library prints is no progress
    spec = BuildSpec.model_validate_json(sys.stdin.read())
    sys.exit(0 if build(spec, load(FLAVOURS[spec.target]), events) else FAILED)


FAILED = 3

if __name__ == "__main__":
    main()
