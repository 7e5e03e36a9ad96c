from tests.kv_world import tokens


async def test_the_prefixes_of_the_last_prompts(world, client, pair):
    world.served(pair[0], tokens(64))
    world.record("r1", tokens(64))
    answer = (await client.get("/prefixes?depth=2&limit=5")).json()
    assert (answer["requests"], answer["tokens"]) == (1, 64)
    (only,) = answer["prefixes"]
    assert only["holders"] == [{"engine": "a", "tokens": {"gpu": 64}}]
    assert (await client.get(f"/prefixes?under={only['id']}")).json()["path"][0]["id"] == only["id"]


async def test_a_wrong_question_names_its_field(client, pair):
    for query, status, param in (
        ("depth=0", 400, "depth"),
        ("limit=501", 400, "limit"),
        ("under=x", 400, "under"),
        ("under=1", 404, "under"),
    ):
        answer = await client.get(f"/prefixes?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
