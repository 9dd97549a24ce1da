"""The routes that generate: completions, chat completions and responses."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from qtool.runtime.request import ParameterError, RequestOptions, refuse_ids_outside
from qtool.runtime.server.chat_body import ChatBody
from qtool.runtime.server.choices import ChatChoice, CompletionChoice
from qtool.runtime.server.completion_body import CompletionBody, Prompt
from qtool.runtime.server.generation import Generation, respond
from qtool.runtime.server.generation_body import GenerationBody
from qtool.runtime.server.response_body import ResponseBody
from qtool.runtime.server.response_writer import ResponseWriter
from qtool.runtime.server.responses import Envelope, Usage
from qtool.runtime.server.service import Service
from qtool.runtime.server.token_logprobs import CompletionLogprobs
from qtool.runtime.server.writers import ChoicesWriter
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tools.forcing import forced_calls, free_calls
from qtool.runtime.tools.formats import ToolFormat
from qtool.runtime.tools.parsers import make_parser


def generation_routes(service: Service) -> APIRouter:
    """/v1/completions, /v1/chat/completions and /v1/responses."""
    router = APIRouter(prefix="/v1", tags=["generation"])

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.refuse_other(body.model)
        param = "n" if body.n > len(body.prompt) else "prompt"
        service.refuse_crowd(param, len(body.prompt) * body.n)
        generation = await asyncio.to_thread(completion_generation, service, body)
        writer = completion_writer(service, body, generation)
        return await respond(service, request, generation, writer, stream=body.stream)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service.refuse_other(body.model)
        service.refuse_crowd("n", body.n)
        generation = await asyncio.to_thread(chat_generation, service, body)
        writer = chat_writer(service, body, generation)
        return await respond(service, request, generation, writer, stream=body.stream)

    @router.post("/responses")
    async def responses(body: ResponseBody, request: Request) -> Response:
        service.refuse_other(body.model)
        generation = await asyncio.to_thread(chat_generation, service, body.for_chat())
        writer = ResponseWriter(body, len(generation.prompts[0]))
        return await respond(service, request, generation, writer, stream=body.stream)

    return router


def completion_generation(service: Service, body: CompletionBody) -> Generation:
    """What a completion's body asks to generate. Encodes and compiles: not for the event loop."""
    params = body.sampling_params(
        service.client.tokenizer,
        max(1, body.max_tokens) if body.only_prompt else body.max_tokens,
        body.logprobs,
        body.logprobs if body.echo else None,
    )
    return Generation(_token_ids(service, body.prompt), params, _options(service, body, body.grammar()))


def completion_writer(service: Service, body: CompletionBody, generation: Generation) -> ChoicesWriter:
    """What writes the answer to a completion's body."""
    tokenizer = service.client.tokenizer

    def choice(index: int) -> CompletionChoice:
        ids = generation.prompts[index // body.n]
        prompt = body.prompt[index // body.n]
        # With log-probabilities, the text is that of the tokens, special ones included, as the offsets are.
        text = prompt if isinstance(prompt, str) else tokenizer.showing_special_tokens.decode(ids)
        return CompletionChoice(
            index,
            ids,
            text if body.echo else None,
            body.only_prompt,
            None if body.logprobs is None else CompletionLogprobs(tokenizer.token_bytes),
            generation.params.stop_token_ids,
        )

    return _writer(
        service,
        Envelope("text", service.model, body.include_usage, body.continuous_usage),
        [choice(index) for index in range(len(generation.prompts) * body.n)],
        generation,
        counts_tokens=not body.only_prompt,
    )


def chat_generation(service: Service, body: ChatBody) -> Generation:
    """What a chat's body asks to generate. Encodes and compiles: not for the event loop."""
    tokenizer = service.client.tokenizer
    prompt = tokenizer.encode_chat(
        [message.for_template() for message in body.messages],
        tools=[tool.for_template() for tool in body.tools] if body.may_call else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        most=service.client.max_tokens_per_sequence,
    )
    max_tokens = body.token_limit
    if max_tokens is None:
        max_tokens = max(1, service.client.max_tokens_per_sequence - len(prompt))
    grammar = body.grammar()
    if body.may_call:
        format_ = _tool_format(service)
        if tools := body.forced_tools:
            grammar = forced_calls(format_, tools, tokenizer, parallel=body.parallel_tool_calls)
        elif tools := body.strict_tools:
            grammar = free_calls(format_, tools, tokenizer, parallel=body.parallel_tool_calls)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(tokenizer, max_tokens, logprobs)
    return Generation([prompt], params, _options(service, body, grammar, may_call=body.may_call))


def chat_writer(service: Service, body: ChatBody, generation: Generation) -> ChoicesWriter:
    """What writes the answer to a chat's body."""
    return _writer(
        service,
        Envelope("chat", service.model, body.include_usage, body.continuous_usage),
        [chat_choice(service, body, generation, index) for index in range(body.n)],
        generation,
    )


def chat_choice(service: Service, body: ChatBody, generation: Generation, index: int) -> ChatChoice:
    """One choice of the answer to a chat's body."""
    format_ = _tool_format(service) if body.may_call else None
    return ChatChoice(
        index,
        make_parser(format_, [tool.function.name for tool in body.tools]),
        service.client.tokenizer.token_bytes,
        generation.params.stop_token_ids,
        max_calls=None if body.parallel_tool_calls else 1,
        id_length=ToolFormat.id_length if format_ is None else format_.id_length,
    )


def _writer(
    service: Service,
    envelope: Envelope,
    choices: Sequence[ChatChoice] | Sequence[CompletionChoice],
    generation: Generation,
    *,
    counts_tokens: bool = True,
) -> ChoicesWriter:
    usage = Usage(sum(map(len, generation.prompts)), speculates=service.client.speculates)
    return ChoicesWriter(envelope, choices, usage, generation.params.n, counts_tokens)


def _tool_format(service: Service) -> ToolFormat:
    if service.tool_format is None:
        raise ParameterError("tools", "this model's chat template knows of no tools; ask without them")
    return service.tool_format


def _options(
    service: Service, body: GenerationBody, grammar: Grammar | None, *, may_call: bool = False
) -> RequestOptions:
    constraint = None if grammar is None else service.grammars.compile(grammar)
    return RequestOptions(
        constraint=constraint,
        keep_special_tokens=may_call,
        cache_salt=body.cache_salt,
        priority=body.priority,
        timeout_s=body.timeout,
    )


def _token_ids(service: Service, prompts: Sequence[Prompt]) -> list[list[int]]:
    client = service.client
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(client.tokenizer.encode(prompt, most=client.max_tokens_per_sequence))
        else:
            refuse_ids_outside("prompt", prompt, client.vocab_size)
            encoded.append(prompt)
    return encoded
