import re

from proxy.api.admin.mount import PREFIX, routes
from proxy.api.admin.openapi import with_document
from proxy.core.placement.decision import Cost
from proxy.settings import EngineSettings


async def document(client):
    answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def operations(document):
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


async def test_it_describes_every_route_and_no_other(world, client):
    described = set(operations(await document(client)))
    served = {
        (m, PREFIX + r.path)
        for r in routes(with_document(PREFIX, world.endpoints))
        for m in r.methods
        if m != "HEAD"
    }
    assert described == served


async def test_every_operation_is_told_in_words(world, client):
    made = operations(await document(client))
    assert (
        len({operation["operationId"] for operation in made.values()})
        == len(made)
        == len(world.endpoints) + 1
    )
    for operation in made.values():
        assert operation["summary"].endswith(".")
        assert "default" in operation["responses"]


async def test_references_lead_somewhere(client):
    made = await document(client)
    references = set(re.findall(r"#/components/schemas/(\w+)", str(made)))
    assert references
    assert references <= set(made["components"]["schemas"])


async def test_path_parameters_are_described(client):
    for (_, path), operation in operations(await document(client)).items():
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))


async def test_bodies_say_what_may_stand_in_them(client):
    made = await document(client)
    schemas = made["components"]["schemas"]
    assert schemas["Flush"]["additionalProperties"] is False
    assert schemas["DryRun"]["additionalProperties"] is True
    assert schemas["Flush"]["properties"]["wait_s"]["maximum"] == 60
    post = operations(made)["POST", f"{PREFIX}/prompt_tables"]
    assert set(post["requestBody"]["content"]) == {"application/json", "application/octet-stream"}


async def test_it_names_its_version_and_its_key(client):
    made = await document(client)
    assert made["openapi"] == "3.1.0"
    assert made["security"] == [{"adminKey": []}]
    assert made["components"]["securitySchemes"]["adminKey"]["scheme"] == "bearer"


async def test_an_engine_is_described_as_in_the_settings(client):
    schema = (await document(client))["components"]["schemas"]["EngineSettings"]
    assert set(schema["properties"]) == set(EngineSettings.model_fields)


async def test_answers_have_all_their_fields_and_a_sentence_on_them(world, client):
    schemas = (await document(client))["components"]["schemas"]
    for endpoint in world.endpoints:
        if endpoint.answer is not None:
            schema = schemas[endpoint.answer.__name__]
            assert schema["description"]
            assert schema["required"] == list(schema["properties"])


async def test_a_cost_is_declared_once(client):
    """What placement computes is what is described and answered."""
    schema = (await document(client))["components"]["schemas"]["CostAnswer"]
    assert set(schema["properties"]) == {*Cost.__struct_fields__, "first_token_s"}
