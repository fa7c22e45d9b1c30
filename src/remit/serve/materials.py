"""What does a node get of the secrets and configs of its work? What is stored, as of now, for that one copy alone.

Whose it is, is asked of the store and of the authority, never of a memory: the replica's row says to which node it is bound,
and the node's lease who speaks for that. `law/delivering.py` has the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from remit.client.endpoint import Endpoint, NoVerdict
from remit.law.delivering import why_not
from remit.model.claims import Role
from remit.model.data import Config, Secret
from remit.model.kinds import Mount, Template
from remit.model.material import Material, MaterialOf
from remit.model.objects import decode, key_of
from remit.model.records import Generation, Replica
from remit.serve.keyring import Keyring
from remit.serve.sealing import Unopened
from remit.store.protocol import Store, StoreError

encode: Final = msgspec.json.Encoder().encode
_NOT_YOURS: Final = "run the copy on the node that it is bound to, and ask while that node's lease is held"


class Materials:
    """For every agent of a scope."""

    def __init__(self, endpoint: Endpoint, store: Store, keyring: Keyring) -> None:
        self._endpoint, self._store, self._keyring = endpoint, store, keyring

    async def of(self, asked: MaterialOf) -> Material:
        try:
            return await self._of(asked)
        except (NoVerdict, StoreError) as error:
            return Material(failed="later", why=str(error), cure="nothing to do: it is asked again")

    async def _of(self, asked: MaterialOf) -> Material:
        if asked.actor.role is not Role.AGENT or not asked.actor.lease.startswith(f"{Role.AGENT}/"):
            return Material(failed="refused", why=f"{asked.actor.role} runs nothing", cure=_NOT_YOURS)
        if not asked.key.startswith("replica/"):
            return Material(failed="refused", why="only a replica reads anything", cure=_NOT_YOURS)
        if not await self._endpoint.renew(asked.actor):
            return Material(failed="refused", why=f"{asked.actor.lease} is not held by who asks", cure=_NOT_YOURS)
        # After that: what was bound there while the lease was another's is bound there no more.
        replica = await self._get(asked.key)
        why = why_not(asked, replica if isinstance(replica, Replica) else None)
        if why or not isinstance(replica, Replica):
            return Material(failed="refused", why=why, cure=_NOT_YOURS)
        tenant, spec = replica.metadata.tenant, replica.spec
        generation = await self._get(key_of("Generation", f"{spec.workload}/{spec.generation:08d}", tenant))
        if not isinstance(generation, Generation):
            return Material(failed="missing", why=f"generation {spec.generation} of {spec.workload} is not there", cure="")
        return await self._read(tenant, generation.spec.spec.template)

    async def _read(self, tenant: str, template: Template) -> Material:
        found: dict[str, dict[str, dict[str, str]]] = {"Secret": {}, "Config": {}}
        absent: list[str] = []
        for kind, mounts in (("Secret", template.secrets), ("Config", template.configs)):
            for mount in mounts:
                data = await self._data(kind, mount.name, tenant)
                if isinstance(data, Material):
                    return data
                lacks = [] if data is None else [one for one in mount.keys if one not in data]
                if data is None:
                    absent.append(f"{kind.lower()} {mount.name}")
                elif lacks:
                    absent.append(f"key {lacks[0]} of {kind.lower()} {mount.name}")
                else:
                    found[kind][mount.name] = _picked(data, mount)
        if absent:
            return _absent(absent)
        return Material(secrets=found["Secret"], configs=found["Config"])

    async def _data(self, kind: str, name: str, tenant: str) -> dict[str, str] | Material | None:
        where = key_of(kind, name, tenant)
        thing = await self._get(where)
        if isinstance(thing, Config):
            return dict(thing.spec.data)
        if not isinstance(thing, Secret):
            return None
        try:
            return {field: self._keyring.seals.open(where, field, value) for field, value in thing.spec.data.items()}
        except Unopened as error:
            return Material(failed="missing", why=str(error), cure=error.cure)

    async def _get(self, name: str) -> object:
        row = await self._store.get(name)
        return None if row is None else decode(row.value)


def _picked(data: dict[str, str], mount: Mount) -> dict[str, str]:
    return {name: data[name] for name in mount.keys} if mount.keys else data


def _absent(names: Sequence[str]) -> Material:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = names[0].split(" of ")[-1].split(" ")
    return Material(
        failed="missing",
        why=f"there is no {names[0]}{more}",
        cure=f"create it: remit create {first[0]} {first[1]} --from-literal KEY=VALUE",
    )
