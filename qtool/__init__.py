"""qtool: from a Hugging Face LLM checkpoint to a served endpoint.

The rooms, each a sub-package, know only those to their left:
``core <- calibrate <- quantize <- compile <- runtime <- eval <- cli``.
"""

__version__ = "0.1.0"
