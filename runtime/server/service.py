"""What every route works with."""

from dataclasses import dataclass

from qtool.runtime.client import Client
from qtool.runtime.request import ParameterError
from qtool.runtime.server.errors import ModelNotFoundError
from qtool.runtime.server.metrics import Metrics
from qtool.runtime.server.settings import ServerSettings
from qtool.runtime.structured.compiler import GrammarCompiler
from qtool.runtime.tools.formats import ToolFormat, detect_format


@dataclass(frozen=True)
class Service:
    """One model behind the API."""

    client: Client
    model: str
    """Its name in the API."""
    settings: ServerSettings
    metrics: Metrics
    grammars: GrammarCompiler
    tool_format: ToolFormat | None
    """How the model writes tool calls; None when it was not taught to."""

    def refuse_other(self, name: str) -> None:
        """Raise ModelNotFoundError unless `name` is the model's."""
        if name != self.model:
            raise ModelNotFoundError(f"model {name!r:.80} is not served here; this server has {self.model!r}")

    def refuse_crowd(self, param: str, num_answers: int) -> None:
        """Raise ParameterError, for the field `param`, when one request asks for so many answers at once that
        it would leave the others no room: more than run at once and half of the queue.
        """
        limits = self.client.loop.scheduler.config
        fair = limits.max_num_seqs + (limits.max_queue + 1) // 2
        if num_answers > fair:
            raise ParameterError(
                param,
                f"asks for {num_answers} answers at once, and one request may ask for {fair}: the "
                f"{limits.max_num_seqs} that run together and half of the {limits.max_queue} that may wait; "
                "send several requests",
            )


def make_service(client: Client, model: str, settings: ServerSettings) -> Service:
    """A client's service under the name `model`."""
    return Service(
        client,
        model,
        settings,
        Metrics(client),
        GrammarCompiler(client.tokenizer, client.vocab_size),
        settings.tool_format or detect_format(client.tokenizer.chat_template),
    )
