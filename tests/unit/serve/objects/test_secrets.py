"""Secrets over HTTP: sealed on every route, never accepted sealed, and resealed under new keys."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from remit.model.objects import decode
from remit.model.secrets import is_sealed
from remit.serve import admin_routes
from remit.store.protocol import Row
from tests.unit.serve.in_memory_server import Api, api, http_test, secret, tenant, workload

PATH = "/v1/tenants/acme/secrets"
CANARY = "canary-that-nobody-may-see"


async def patch(api: Api, path: str, change: Any, **headers: str) -> Any:
    return await api.ask("PATCH", path, change, headers={"content-type": "application/merge-patch+json", **headers})


async def stored_data(api: Api, name: str = "db") -> dict[str, str]:
    row = await api.store.get(f"secret/acme/{name}")
    assert row is not None
    return dict(decode(row.value).spec.data)  # type: ignore[union-attr]


async def unsealed_data(api: Api, name: str = "db") -> dict[str, str]:
    seals = api.server.keyring.sealing_keys
    return {field: seals.unseal(f"secret/acme/{name}", field, value) for field, value in (await stored_data(api, name)).items()}


async def rows(store: Any, prefix: str = "") -> list[Row]:
    found: list[Row] = []
    while True:
        page = await store.range(prefix, after=found[-1].key if found else "", limit=500)
        found += page.rows
        if not page.more:
            return found


@http_test
async def test_every_route_seals_and_store_never_holds_plain_value(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password=CANARY))
    await api.must("PUT", f"{PATH}/two", secret("two", password=CANARY + "2"))
    assert (await patch(api, f"{PATH}/db", {"spec": {"data": {"more": CANARY + "3"}}})).status == 200
    applied = await api.must("POST", "/v1/apply", [secret("three", password=CANARY + "4")])
    assert applied["results"][0]["action"] == "created"
    assert await unsealed_data(api) == {"password": CANARY, "more": CANARY + "3"}
    assert await unsealed_data(api, "two") == {"password": CANARY + "2"}
    assert await unsealed_data(api, "three") == {"password": CANARY + "4"}
    assert not [row.key for row in await rows(api.store) if CANARY.encode() in row.value]
    assert CANARY.encode() not in repr(api.server.watch_cache.rows).encode()


@http_test
async def test_patch_keeps_other_values_and_removes_null(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", a="1", b="2"))
    before = await stored_data(api)
    assert (await patch(api, f"{PATH}/db", {"spec": {"data": {"b": None, "c": "3"}}})).status == 200
    after = await stored_data(api)
    assert after["a"] == before["a"] and await unsealed_data(api) == {"a": "1", "c": "3"}


@http_test
async def test_client_sealed_value_is_refused_on_every_route(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password=CANARY))
    text = (await stored_data(api))["password"]
    for reply in (
        await api.ask("POST", PATH, secret("stolen", password=text)),
        await api.ask("PUT", f"{PATH}/db", secret("db", password=text, other=text)),
        await api.ask("PUT", f"{PATH}/db?dryRun=true", secret("db", password=text)),
        await patch(api, f"{PATH}/db", {"spec": {"data": {"copy": text}}}),
        await api.ask("POST", "/v1/apply", [secret("fine", a="b"), secret("stolen", password=text)]),
        await api.ask("POST", "/v1/plan", [secret("stolen", password=text)]),
    ):
        assert (reply.status, reply.json["code"]) == (422, "invalid"), reply.body
        assert reply.json["field"].startswith("spec.data.") and "plain value" in reply.json["cure"]
        assert text not in reply.body.decode()
    assert [row.key for row in await rows(api.store, "secret/")] == ["secret/acme/db"]


@http_test
async def test_claims_may_not_carry_secrets_sealed_or_plain(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password=CANARY))
    status = await api.must("GET", "/v1/status")
    for value in (CANARY, (await stored_data(api))["password"]):
        operation = {
            "id": f"{status['incarnation']}.{status['window']}.abcdefgh",
            "actor": {"name": "one", "role": "workloads"},
            "claim": {"do": "apply", "thing": secret("db", password=value)},
        }
        reply = await api.ask("POST", "/v1/claims", {"operations": [operation]})
        assert reply.status == 422 and "secret" in reply.json["detail"], reply.body
        assert CANARY not in reply.body.decode()
        answered = (await api.ask("POST", "/v1/ask", {"type": "call", "operations": [operation]})).json
        assert answered["verdicts"][0]["verdict"] == "refused"
    assert await unsealed_data(api) == {"password": CANARY}


@http_test
async def test_same_secret_is_unchanged_and_same_id_gets_same_answer(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    status = await api.must("GET", "/v1/status")
    mine = {"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.abcdefgh"}
    first = await api.ask("POST", PATH, secret("db", password=CANARY), headers=mine)
    again = await api.ask("POST", PATH, secret("db", password=CANARY), headers=mine)
    assert (first.status, again.status, first.body) == (201, 201, again.body)
    other = await api.ask("POST", PATH, secret("db", password="other"), headers=mine)
    assert other.json["code"] == "operation_mismatch"
    applied = await api.must("POST", "/v1/apply", [secret("db", password=CANARY)])
    assert applied["results"][0]["action"] == "unchanged"
    planned = await api.must("POST", "/v1/plan", [secret("db", password=CANARY + "!")])
    assert planned["items"][0]["diff"] == [{"path": "spec.data.password", "before": "(hidden)", "after": "(hidden)"}]


@http_test
async def test_retry_after_key_rotation_gets_first_answer(api: Api) -> None:
    """F03: resealed, the payload differs, and it is the same operation all the same."""
    await api.must("POST", "/v1/tenants", tenant())
    status = await api.must("GET", "/v1/status")
    ids = [{"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.abcdefg{n}"} for n in range(4)]
    once = await api.ask("POST", PATH, secret("db", password=CANARY), headers=ids[0])
    refused = await api.ask("POST", PATH, secret("db", password="else"), headers=ids[1])
    many = await api.ask("POST", "/v1/apply", [secret("db", password="new"), secret("more", a="b")], headers=ids[2])
    assert (once.status, refused.status, many.status) == (201, 409, 200)
    for keys in (2, 3):
        await api.server.world.offload(api.server.keyring.add_key)  # and nothing is resealed yet
        assert len(api.server.keyring.sealing_keys.keys) == keys
        again = await api.ask("POST", PATH, secret("db", password=CANARY), headers=ids[0])
        assert (again.status, again.json["metadata"]["revision"]) == (201, once.json["metadata"]["revision"])
        again = await api.ask("POST", PATH, secret("db", password="else"), headers=ids[1])
        assert (again.status, again.json["code"]) == (409, refused.json["code"])
        again = await api.ask("POST", "/v1/apply", [secret("db", password="new"), secret("more", a="b")], headers=ids[2])
        assert [one["revision"] for one in again.json["results"]] == [one["revision"] for one in many.json["results"]]
        other = await api.ask("POST", PATH, secret("db", password="other"), headers=ids[0])
        assert other.json["code"] == "operation_mismatch", "another operation is still distinguished"
    assert await unsealed_data(api) == {"password": "new"}, "nothing was applied twice"
    await api.must("POST", "/v1/secrets/rotate")
    again = await api.ask("POST", PATH, secret("db", password=CANARY), headers=ids[0])
    assert (again.status, again.json["metadata"]["revision"]) == (201, once.json["metadata"]["revision"])


@http_test
async def test_size_limits_apply_to_plain_values(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    longest = "ü" * 65_536
    assert (await api.ask("POST", PATH, secret("db", a=longest))).status == 201
    assert (await unsealed_data(api))["a"] == longest
    reply = await api.ask("POST", PATH, secret("more", a=longest + "x"))
    assert (reply.status, reply.json["field"], reply.json["cure"]) == (422, "spec.data.a", "use at most 65536")
    many = {f"k{n}": "x" * 65_000 for n in range(16)}  # almost the limit of one body, and a third more once sealed
    assert (await api.ask("POST", PATH, secret("many", **many))).status == 201
    assert (await patch(api, f"{PATH}/many", {"spec": {"data": {"k0": "y"}}})).status == 200
    assert (await unsealed_data(api, "many")) == {**many, "k0": "y"}


@http_test
async def test_value_sizes_are_shown_but_not_stored(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password="hunter2", empty="", wide="ü"))
    shown = await api.must("GET", f"{PATH}/db")
    assert shown["spec"]["data"] == {"password": "", "empty": "", "wide": ""}
    assert shown["status"]["sizes"] == {"password": 7, "empty": 0, "wide": 2}
    row = await api.store.get("secret/acme/db")
    assert row is not None and b"sizes" not in row.value


@http_test
async def test_refusals_never_repeat_secret_values(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    body = {"apiVersion": "remit/v1", "kind": "Secret", "metadata": {"name": "db", "tenant": "acme"}}
    for data in (
        {"a": 4711471147},
        {"a": 47114.71147},
        {"a": [CANARY]},
        {"a": {"b": CANARY}},
        {"a": CANARY + "\0"},
        {"..": CANARY},
    ):
        for path, sent in ((PATH, {**body, "spec": {"data": data}}), ("/v1/apply", [{**body, "spec": {"data": data}}])):
            reply = await api.ask("POST", path, sent)
            assert reply.status == 422, reply.body
            assert "canary" not in reply.body.decode() and "4711" not in reply.body.decode(), reply.body
    broken = json.dumps({**body, "spec": {"data": {"a": CANARY}}}).replace("}}}", '}} "')
    reply = await api.ask("POST", PATH, broken.encode())
    assert reply.status == 400 and "canary" not in reply.body.decode(), reply.body


@http_test
async def test_secret_in_use_cannot_be_deleted(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password=CANARY))
    await api.must("POST", "/v1/tenants/acme/configs", {**secret("settings", a="b"), "kind": "Config"})
    made = workload("web", replicas=0)
    made["spec"]["template"] |= {"secrets": [{"name": "db", "path": "run/db"}], "configs": [{"name": "settings"}]}
    await api.must("POST", "/v1/tenants/acme/workloads", made)
    for path in (f"{PATH}/db", "/v1/tenants/acme/configs/settings"):
        reply = await api.ask("DELETE", path)
        assert (reply.status, reply.json["code"]) == (409, "in_use"), reply.body
        assert "workload/acme/web" in reply.json["detail"]
    await api.must("PUT", "/v1/tenants/acme/workloads/web", workload("web"))
    await api.must("DELETE", f"{PATH}/db")
    await api.must("DELETE", "/v1/tenants/acme/configs/settings")


# -- key rotation ----------------------------------------------------------------------------------------------------------


async def rotate(api: Api, query: str = "newKey=true") -> dict[str, Any]:
    answer: dict[str, Any] = await api.must("POST", f"/v1/secrets/rotate?{query}")
    made = answer.get("made", False)
    while answer.get("after"):
        answer = await api.must("POST", f"/v1/secrets/rotate?after={answer['after']}")
    return {**answer, "made": made}


@http_test
async def test_new_key_reseals_all_and_old_keys_open_until_forgotten(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for name in ("a", "b", "c"):
        await api.must("POST", PATH, secret(name, password=CANARY + name))
    before = await stored_data(api, "a")
    old = api.server.keyring.sealing_keys.primary_id
    answer = await rotate(api)
    assert answer["made"] and answer["resealed"] == 3 and answer["key"] != old and answer["keys"] == [answer["key"], old]
    assert (await stored_data(api, "a")) != before and await unsealed_data(api, "a") == {"password": CANARY + "a"}
    assert all(is_sealed(value) and answer["key"] in value for value in (await stored_data(api, "b")).values())
    assert (await rotate(api, "forget=true"))["keys"] == [answer["key"]]
    assert await unsealed_data(api, "c") == {"password": CANARY + "c"}


@http_test
async def test_interrupted_rotation_continues_under_same_key(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    names = [f"s{n}" for n in range(5)]
    for name in names:
        await api.must("POST", PATH, secret(name, password=CANARY + name))
    rows_max, admin_routes.RESEAL_MAX = admin_routes.RESEAL_MAX, 1  # type: ignore[misc]  # one secret a request
    try:
        for turn in range(5):
            answer = await api.must("POST", "/v1/secrets/rotate?newKey=true")
            assert answer.get("made", False) == (turn == 0), "a key is created only by the first request"
            keys = api.server.keyring.sealing_keys.keys
            assert len(keys) == 2
            for name in names:
                assert await unsealed_data(api, name) == {"password": CANARY + name}
        forgotten = await api.must("POST", "/v1/secrets/rotate?forget=true")
        assert len(forgotten["keys"]) == 1
    finally:
        admin_routes.RESEAL_MAX = rows_max  # type: ignore[misc]
    assert await unsealed_data(api, "s4") == {"password": CANARY + "s4"}


@http_test
async def test_keys_are_kept_while_secret_needs_them(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for name in ("a", "b"):
        await api.must("POST", PATH, secret(name, password=CANARY))
    api.server.keyring.add_key()
    rows_max, admin_routes.RESEAL_MAX = admin_routes.RESEAL_MAX, 1  # type: ignore[misc]
    try:
        answer = await api.must("POST", "/v1/secrets/rotate?forget=true")
        assert answer["after"] == "secret/acme/a" and len(answer["keys"]) == 2
    finally:
        admin_routes.RESEAL_MAX = rows_max  # type: ignore[misc]
    assert await unsealed_data(api, "b") == {"password": CANARY}


@http_test
async def test_keys_are_kept_while_write_in_flight_may_use_them(api: Api) -> None:
    """A value sealed but not stored yet would become unreadable."""
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("a", password=CANARY))
    settle_ms, admin_routes.OLD_KEY_WRITES_MS_MAX = admin_routes.OLD_KEY_WRITES_MS_MAX, 100  # type: ignore[misc]
    try:
        with api.server.keyring.track_write():
            assert len((await api.must("POST", "/v1/secrets/rotate?newKey=true&forget=true"))["keys"]) == 2
        assert len((await api.must("POST", "/v1/secrets/rotate?forget=true"))["keys"]) == 1
    finally:
        admin_routes.OLD_KEY_WRITES_MS_MAX = settle_ms  # type: ignore[misc]
    assert await unsealed_data(api, "a") == {"password": CANARY}


@http_test
async def test_authority_refuses_unsealed_secret(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", PATH, secret("db", password="x"))
    seals = api.server.keyring.sealing_keys
    real = seals.seal
    try:
        seals.seal = lambda name, field, value: "plain"  # type: ignore[method-assign]
        reply = await api.ask("PUT", f"{PATH}/db", secret("db", password="y"))
        assert (reply.status, reply.json["code"]) == (422, "invalid")
    finally:
        seals.seal = real  # type: ignore[method-assign]
    assert await unsealed_data(api) == {"password": "x"}


def test_server_with_other_key_cannot_unseal() -> None:
    asyncio.run(_another_server())


async def _another_server() -> None:
    async with api() as first:
        await first.must("POST", "/v1/tenants", tenant())
        await first.must("POST", PATH, secret("db", password=CANARY))
        row = await first.store.get("secret/acme/db")
        assert row is not None
    async with api() as second:
        obj = decode(row.value)
        assert second.server.keyring.sealing_keys.unseal_object(obj) == obj  # type: ignore[arg-type]
