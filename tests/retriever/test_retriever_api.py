"""The HTTP interface keeps its own OpenAPI document, whatever is sent to it."""

import pytest
import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error

from kit.retriever_fakes import ROWS, FakeEncoder, FakeIndex
from verl_credit_retriever.http.server import create_app
from verl_credit_retriever.settings import Limits

ENCODER = FakeEncoder()
LIMITS = Limits(max_query_chars=1000, max_request_queries=50, max_topk=40, default_topk=4)
schema = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(FakeIndex(ENCODER), ENCODER, limits=LIMITS)
)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_answer_is_one_that_the_document_allows_and_a_success_is_right(case):
    answer = case.call()
    patience = (case.headers or {}).get("x-deadline-ms")
    too_late = answer.status_code == 504 and patience is not None and int(patience) < 10_000
    # A 504 is right when it was asked for; every other 5xx is a fault.
    case.validate_response(answer, excluded_checks=[not_a_server_error] if too_late else [])
    if answer.status_code == 200 and case.method == "POST":
        hits = answer.json().get("results") or answer.json().get("result")
        k = case.body["k"] if "k" in case.body else case.body.get("topk") or LIMITS.default_topk
        expected = [[f"{query}/{row}" for row in range(min(int(k), ROWS))] for query in case.body["queries"]]
        assert [[hit.get("document", hit)["id"] for hit in found] for found in hits or []] == expected


def test_the_document_holds_the_limits():
    schemas = schema.raw_schema["components"]["schemas"]
    queries = schemas["SearchRequest"]["properties"]["queries"]
    assert (queries["maxItems"], queries["items"]["maxLength"]) == (50, 1000)
    assert schemas["SearchRequest"]["properties"]["k"]["maximum"] == 40
    assert schemas["RetrieveRequest"]["properties"]["topk"]["anyOf"][0]["maximum"] == 40
