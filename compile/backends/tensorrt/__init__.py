"""The TensorRT backends: the ONNX graph built into a plan, for RTX GPUs without having one.

One module a stage: `flavour` (which of the two libraries), `profiles` (bounds of a call), `zero_points` and
`checks` (what the graph must not hold), `worker` in a child process that `process` starts and follows, `log`
and `inspector` (what the builder said), `info` (the record that the runtime drives the plan by).
"""
