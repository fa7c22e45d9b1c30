"""Requirements with devices, in short form."""

from __future__ import annotations

from remit.law.fit import Requirements
from remit.law.requirements import compile_requirements
from remit.model.kinds import DeviceRequest, Placement, Template, WorkloadSpec
from remit.model.resources import Amount


def ask(*devices: DeviceRequest, cpu: int = 1_000, memory: int = 1 << 30, where: Placement = Placement()) -> Requirements:
    template = Template(command=("run",), resources=Amount({"cpu": cpu, "memory": memory}), devices=devices)
    return compile_requirements("acme", "work", {}, WorkloadSpec(type="service", template=template, placement=where), ())


def gpus(count: int, *models: str) -> DeviceRequest:
    return DeviceRequest(kind="gpu", count=count, models=models)


def share(size: int, kind: str = "gpu") -> DeviceRequest:
    return DeviceRequest(kind=kind, share=f"{size}m")
