"""What every route works with."""

from dataclasses import dataclass

from qtool.runtime.client import Client
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
