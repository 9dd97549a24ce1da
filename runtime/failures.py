"""Why a request that is right in itself gets no answer, or no whole one."""

from qtool.errors import QtoolError


class NotAdmittingError(QtoolError):
    """The loop takes no new requests: it is draining, has stopped or its engine failed."""


class OverloadedError(NotAdmittingError):
    """The loop takes no new requests for a while: the queue is full, or too long for the promised TTFT."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it may be otherwise: what a Retry-After header says."""


class GenerationError(QtoolError):
    """A request failed after it was admitted: the engine did, or was stopped."""


class NoTokenLeftError(GenerationError):
    """The request's own rules leave no token that could come next."""


class DeadlineExceededError(GenerationError):
    """The request's own time limit passed before its answer was complete."""
