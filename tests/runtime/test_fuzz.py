"""schemathesis over the API's own description: whatever is sent, nothing is a server error."""

import subprocess
import sys

import httpx

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine
from tests.runtime.served import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_that_the_schema_allows_is_a_server_error(byte_tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(num_blocks=128), byte_tokenizer) as served:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
        command += ["--phases", "fuzzing", "--max-examples", "25", "--generation-deterministic"]
        ended = subprocess.run([*command, "--checks", CHECKS], capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
        assert httpx.get(f"{served.url}/ready").status_code == 200


def test_the_schema_has_the_types_that_are_really_taken(byte_tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(), byte_tokenizer) as served:
        schema = httpx.get(f"{served.url}/openapi.json").json()
    schemas = schema["components"]["schemas"]
    prompt = schemas["CompletionBody"]["properties"]["prompt"]["anyOf"]
    assert [kind["type"] for kind in prompt] == ["string", "array", "array", "array"]
    stop = schemas["ChatBody"]["properties"]["stop"]["anyOf"]
    assert [kind["type"] for kind in stop] == ["string", "array"]
    content = schemas["ChatMessage"]["properties"]["content"]
    assert "text" in str(content)
    assert "ErrorBody" in schemas
    assert "HTTPValidationError" not in schemas
    responses = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert responses.keys() == {"200", "default"}
