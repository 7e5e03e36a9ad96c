from proxy.api.admin import answers
from proxy.api.admin.app import ENDPOINTS


def test_answers_are_closed_and_described():
    for endpoint in ENDPOINTS:
        if endpoint.answer is not None and endpoint.answer is not answers.OpenApi:
            assert endpoint.answer.__struct_config__.forbid_unknown_fields
            assert endpoint.answer.__doc__
