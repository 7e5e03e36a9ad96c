import re

from proxy.api.admin.mount import PREFIX


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
