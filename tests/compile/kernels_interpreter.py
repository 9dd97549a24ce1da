"""A process whose Triton kernels are interpreted: calls come in through stdin, results leave through stdout.

Run as a script, since Triton decides when it is imported whether kernels are compiled or interpreted.
"""

import io
import os
import pickle
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("error")

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from qtool.compile.kernels.launch import paged_attention  # noqa: E402
from qtool.compile.kernels.paged_attention import _widen  # noqa: E402

narrow_dot = InterpreterBuilder.create_dot


def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
    """Triton 3.7 keeps bfloat16 as bit patterns and multiplies those: widen them, as a tensor core does."""
    if left.dtype.scalar == tl.bfloat16:
        left, right = (self.cast_impl(side, tl.float32) for side in (left, right))
    return narrow_dot(self, left, right, *rest)


def widen_bfloat16() -> None:
    InterpreterBuilder.create_dot = dot


@triton.jit
def widen_kernel(codes, output, count: tl.constexpr):
    places = tl.arange(0, count)
    tl.store(output + places, _widen(tl.load(codes + places), output.dtype.element_ty))


def widen(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    output = torch.empty(codes.shape, dtype=dtype)
    widen_kernel[(1,)](codes, output, codes.numel())
    return output


def serve() -> None:
    widen_bfloat16()
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    functions = {"paged_attention": paged_attention, "widen": widen}
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        name, arguments, options = torch.load(io.BytesIO(request), weights_only=False)
        try:
            reply: object = functions[name](*arguments, **options)
        except Exception as failure:
            reply = failure
        content = io.BytesIO()
        torch.save(reply, content)
        pickle.dump(content.getvalue(), replies)
        replies.flush()


if __name__ == "__main__":
    serve()
