"""Uses the kind that test_added_kind.py has added to a copy of the source: in the API, the command line and the authority."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import remit
from remit.cli.output.object_columns import RowContext, columns_of, row_of
from remit.cli.session.kind_names import parse_kind
from remit.model.claims import Apply, Code, Delete, SetCondition
from remit.model.kinds.registry import BY_KIND
from remit.model.manifests.json_schema import schema, schema_of_all
from remit.model.manifests.reader import read
from remit.model.metadata import Condition
from remit.model.objects import decode
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.protocol import Store
from tests.properties.authority_world import OPERATOR, USER, Scope, scope_test
from tests.unit.serve.in_memory_server import Api, http_test, world_of

EXAMPLE = BY_KIND["Announcement"].example
REGION = {"apiVersion": "remit/v1", "kind": "Region", "metadata": {"name": "eu"}, "spec": {"zones": ["eu-a"]}}
PATH, KEY = "/v1/announcements/maintenance", "announcement/maintenance"


def manifest(document: dict[str, Any]) -> Any:
    found = read(json.dumps(document).encode(), "manifest.json")
    assert not found.problems, found.problems
    return found.objects[0]


def check_schema_and_columns() -> None:
    assert {"region", "text"} == set(schema("Announcement")["$defs"]["AnnouncementSpec"]["required"])
    assert "Announcement" in schema_of_all()["discriminator"]["mapping"]
    assert parse_kind("ann") == parse_kind("announcements") == "Announcement"
    shown = dict(
        zip(
            (column.heading for column in columns_of("Announcement", all_tenants=False)),
            row_of(manifest(EXAMPLE), RowContext(), all_tenants=False),
            strict=True,
        )
    )
    assert (shown["NAME"], shown["REGION"], shown["TEXT"]) == ("maintenance", "eu", "maintenance on Sunday")


@http_test
async def check_api(api: Api) -> None:
    """The objects are applied in the order of their references, in any order of sending."""
    applied = await api.must("POST", "/v1/apply", [EXAMPLE, REGION])
    assert [result["action"] for result in applied["results"]] == ["created", "created"]
    assert (await api.must("GET", PATH))["spec"] == EXAMPLE["spec"]
    assert [item["metadata"]["name"] for item in (await api.must("GET", "/v1/announcements"))["items"]] == ["maintenance"]
    async with api.watch("/v1/announcements?watch=true") as watched:
        await api.must("PATCH", PATH, {"spec": {"text": "done"}}, headers={"content-type": "application/merge-patch+json"})
        assert (await watched.until("changed", "maintenance"))["object"]["spec"]["text"] == "done"
    refused = await api.ask("DELETE", "/v1/regions/eu")
    assert refused.json["detail"] == "region eu has 1 announcements; delete these first"
    described = await api.must("GET", "/openapi.json")
    assert "AnnouncementManifest" in described["components"]["schemas"]
    assert KEY in await listed(api, api.store)


async def listed(api: Api, store: Store) -> set[str]:
    """Return the keys that an observer has which starts now, so that it sees old rows only by listing them."""
    cache = WatchCache(world_of(api).clock)
    running = asyncio.ensure_future(Reflector(store, store, world_of(api), cache).run())
    async with asyncio.timeout(10):
        while cache.head is None:  # noqa: ASYNC110 - a cache has no event for its first list
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    return set(cache.rows)


@scope_test
async def check_authority(scope: Scope) -> None:
    announcement = manifest(EXAMPLE)
    assert await scope.refused(USER, Apply(announcement)) is Code.ROLE
    await scope.must(OPERATOR, Apply(manifest(REGION)), Apply(announcement))
    await scope.must(OPERATOR, SetCondition("Announcement", "maintenance", Condition(type="Sent", status="True")))
    assert await scope.refused(OPERATOR, Delete("Region", "eu")) is Code.IN_USE
    await scope.take_over()
    recovered = scope.books.lookup(KEY)[0]
    assert (recovered.spec, recovered.status.conditions[0].type) == (announcement.spec, "Sent")
    row = await scope.store.inner.get(KEY)
    assert row is not None and decode(row.value) == recovered
    await scope.must(OPERATOR, Delete("Announcement", "maintenance"), Delete("Region", "eu"))


if __name__ == "__main__":
    assert Path(remit.__file__).parent == Path(sys.argv[1]), f"the copy is not in use, but {remit.__file__}"
    check_schema_and_columns()
    check_api()
    check_authority()
